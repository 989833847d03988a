//! What the users of an endpoint share.
//!
//! `Shared` is shared by its Python objects, its waiting threads and its background thread.
//! `EndpointCore`, inside the lock, is shared by its sessions.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use pyo3::prelude::*;
use quinn_proto::{Endpoint, Transmit, VarInt};

use crate::quic::handles::{ConnectionHandle, Dropped};
use crate::quic::handshake_budget::HandshakeBudget;
use crate::quic::handshakes::Handshakes;
use crate::quic::operation::{OperationState, Value};
use crate::quic::settings::Settings;
use crate::quic::socket::{self, BufferPool, Socket};
use crate::quic::state::{Round, State, ROUND_BYTES};
use crate::quic::stream_state::STAGE_BYTES;
use crate::runtime::errors::{Failure, ForkedError};
use crate::runtime::{decref, process};

/// How often a closing endpoint repeats its close packets, and the time between, in which the
/// peers' socket buffers drain.
const CLOSE_REPEATS: usize = 3;
const CLOSE_REPEAT_INTERVAL: Duration = Duration::from_millis(3);

/// Order of locks: the endpoint's `state` first, then one of the leaf locks (an operation's cell, a
/// queue, `dropped`, the tables of `decref` and `descriptors`), one at a time. The GIL comes before
/// all of them: a thread with the GIL may take a lock, a thread with a lock never takes the GIL.
pub struct Shared {
    pub state: Mutex<State>,
    /// Signalled when the last waiting thread has left a closed endpoint.
    no_waiters: Condvar,
    pub address: SocketAddr,
    generation: u32,
    dropped: Mutex<Vec<Dropped>>,
    any_dropped: AtomicBool,
    background: Mutex<Option<JoinHandle<()>>>,
    guard: OnceLock<Weak<Guard>>,
}

impl process::CloseAtExit for Shared {
    fn close_at_exit(&self) {
        self.close(0, "the process exits");
    }
}

/// Held by every Python object that needs the endpoint; dropping the last one closes the endpoint.
/// Pending operations do not hold it: the endpoint holds them.
pub struct Guard(pub Arc<Shared>);

impl Drop for Guard {
    fn drop(&mut self) {
        match self.0.made_in_parent() {
            true => std::mem::forget(self.0.clone()), // never freed: its memory may be inconsistent here
            false => self.0.close(0, ""),
        }
    }
}

impl Shared {
    pub fn new(state: State, address: SocketAddr) -> (Arc<Self>, Arc<Guard>) {
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            no_waiters: Condvar::new(),
            address,
            generation: process::generation(),
            dropped: Mutex::new(Vec::new()),
            any_dropped: AtomicBool::new(false),
            background: Mutex::new(None),
            guard: OnceLock::new(),
        });
        shared.state.lock().shared = Arc::downgrade(&shared);
        let guard = Arc::new(Guard(shared.clone()));
        let _ = shared.guard.set(Arc::downgrade(&guard));
        (shared, guard)
    }

    pub fn set_background(&self, background: JoinHandle<()>) {
        *self.background.lock() = Some(background);
    }

    /// Whether the endpoint was made in the parent of this process. A thread that does not exist
    /// here may hold a lock of it, and what the lock protects may be inconsistent.
    pub fn made_in_parent(&self) -> bool {
        self.generation != process::generation()
    }

    /// The first step of every call from Python. No lock of ours is held.
    pub fn enter(&self, py: Python<'_>) -> PyResult<()> {
        if self.made_in_parent() {
            return Err(ForkedError::new_err(
                "made in the parent process; a forked child must make its own endpoint",
            ));
        }
        decref::release_deferred(py);
        Ok(())
    }

    pub fn guard(&self, py: Python<'_>) -> PyResult<Arc<Guard>> {
        let guard = self.guard.get().and_then(|weak| weak.upgrade());
        guard.ok_or_else(|| {
            let reason = "nothing holds it any more".to_owned();
            Failure::Closed { reason }.into_py(py)
        })
    }

    /// Runs `work` under the lock and then processes what it changed. Keeps the GIL if the lock is
    /// free and the work is small: releasing the GIL and taking it again may cost a switch
    /// interval.
    pub fn call<R: Send>(
        &self,
        py: Python<'_>,
        large: bool,
        work: impl FnOnce(&mut State) -> Result<R, Failure> + Send,
    ) -> PyResult<R> {
        self.enter(py)?;
        // With the GIL held, at most one round's bytes are sent; the driver sends the rest.
        let result = match self.state.try_lock() {
            Some(state) if !large => self.run_locked(state, ROUND_BYTES, work),
            held => {
                drop(held);
                process::detached(py, || self.run_locked(self.state.lock(), usize::MAX, work))
            }
        };
        result.map_err(|failure| failure.into_py(py))
    }

    fn run_locked<R>(
        &self,
        mut state: MutexGuard<'_, State>,
        budget: usize,
        work: impl FnOnce(&mut State) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        state.open()?;
        let attempt = catch_unwind(AssertUnwindSafe(|| {
            let result = work(&mut state);
            self.process_pending(&mut state, budget);
            result
        }));
        attempt.unwrap_or_else(|panic| {
            state.poison(&*panic);
            Err(state.open().err().unwrap_or(Failure::Cancelled))
        })
    }

    /// Transmits what became possible, and wakes the driver if it would sleep past the
    /// consequences.
    fn process_pending(&self, state: &mut State, budget: usize) {
        if !state.unfinished() && !self.any_dropped.load(Ordering::Relaxed) {
            return;
        }
        let unfinished = state.process_dirty(Instant::now(), budget);
        let next = state.next_timer();
        let blocked = !state.core.blocked.is_empty();
        state
            .election
            .wake_driver_if_needed(next, blocked, unfinished);
    }

    /// One round, with panics caught. The caller holds the lock.
    pub fn drive(&self, state: &mut State) -> Result<Round, Failure> {
        state.open()?;
        match catch_unwind(AssertUnwindSafe(|| state.round())) {
            Ok(round) => Ok(round),
            Err(panic) => {
                state.poison(&*panic);
                Err(state.open().err().unwrap_or(Failure::Cancelled))
            }
        }
    }

    pub fn cancel(&self, py: Python<'_>, op: &Arc<OperationState>) -> PyResult<bool> {
        let done = |state: &mut State| Ok(state.cancel(op));
        match self.call(py, false, done) {
            // Closed meanwhile: all operations are done then.
            Err(_) if op.done() => Ok(false),
            other => other,
        }
    }

    /// Called by handles that are dropped, under any lock.
    pub fn note_dropped(&self, dropped: Dropped) {
        self.dropped.lock().push(dropped);
        self.any_dropped.store(true, Ordering::Relaxed);
    }

    /// Under the endpoint's lock.
    pub fn next_dropped(&self) -> Option<Dropped> {
        if !self.any_dropped.load(Ordering::Relaxed) {
            return None;
        }
        let mut dropped = self.dropped.lock();
        let next = dropped.pop();
        if dropped.is_empty() {
            self.any_dropped.store(false, Ordering::Relaxed);
        }
        next
    }

    /// A Python object was dropped: acts on it now instead of in the next call or round.
    pub fn process_dropped(&self) {
        if !self.made_in_parent() && self.any_dropped.load(Ordering::Relaxed) {
            let _ = self.run_locked(self.state.lock(), ROUND_BYTES, |_| Ok(()));
        }
    }

    /// Wakes `close` if the endpoint is closed and the last thread has left.
    pub fn notify_if_empty(&self, state: &State) {
        if state.closed.is_some() && state.election.waiting == 0 {
            self.no_waiters.notify_all();
        }
    }

    /// Tells every peer, fails all operations, waits until all threads have left, closes the
    /// socket. Needs no GIL.
    pub fn close(&self, code: u32, reason: &str) {
        let mut state = self.state.lock();
        let failure = Failure::Closed {
            reason: "it was closed".to_owned(),
        };
        let attempt = catch_unwind(AssertUnwindSafe(|| {
            state.shut_down(failure, VarInt::from_u32(code), reason)
        }));
        if let Err(panic) = attempt {
            state.poison(&*panic);
        }
        while state.election.waiting > 0 {
            self.no_waiters.wait(&mut state);
        }
        drop(state);
        // Holding the lock while joining makes a second caller of `close` wait too.
        let mut background = self.background.lock();
        if let Some(background) = background.take() {
            let _ = background.join();
        }
        drop(background);
        for _ in 0..CLOSE_REPEATS {
            if !self.state.lock().repeat_close_packets() {
                break;
            }
            std::thread::sleep(CLOSE_REPEAT_INTERVAL);
        }
        // No thread polls the socket any more, so its number may be reused.
        let mut state = self.state.lock();
        let socket = state.core.socket.take();
        let sessions = std::mem::take(&mut state.sessions);
        state.election.close();
        drop(state);
        drop((socket, sessions));
    }
}

const REFUSALS_KEPT: usize = 256;
/// Send buffers that are kept for reuse (8 MiB: twice the default send window).
const SEND_BUFFERS: usize = 128;

#[derive(Default)]
pub struct Counters {
    pub datagrams_sent: u64,
    pub datagrams_received: u64,
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub refused: u64,
    pub retried: u64,
    pub ignored: u64,
    pub rounds: u64,
    pub background_rounds: u64,
}

/// What the sessions of one endpoint share: the socket, the protocol's endpoint, the accept queue.
pub struct EndpointCore {
    pub settings: Settings,
    pub endpoint: Endpoint,
    /// None once the endpoint is closed.
    pub socket: Option<Socket>,
    /// Inbound connections not accepted yet, at most `max_connections`. Lost ones are included,
    /// because the data that they delivered can be read.
    pub accept_queue: VecDeque<Arc<ConnectionHandle>>,
    pub pending_accepts: VecDeque<Arc<OperationState>>,
    pub refusals: VecDeque<(SocketAddr, String)>,
    pub counters: Counters,
    /// Connections that are not lost, and those of them that are in their handshake.
    pub live: usize,
    pub half_open: usize,
    /// Inbound handshakes in progress.
    pub handshakes: Handshakes,
    pub budget: HandshakeBudget,
    /// Sessions whose transmit waits for a writable socket.
    pub blocked: Vec<u64>,
    /// Where packets are built.
    pub scratch: Vec<u8>,
    /// Copies of borrowed data that are being sent.
    pub pool: BufferPool,
}

impl EndpointCore {
    pub fn new(endpoint: Endpoint, socket: Socket, settings: Settings) -> Self {
        let handshakes = Handshakes::new(settings.max_handshakes);
        let budget = HandshakeBudget::new(
            settings.max_handshakes,
            settings.handshake_budget,
            Instant::now(),
        );
        EndpointCore {
            settings,
            endpoint,
            socket: Some(socket),
            accept_queue: VecDeque::new(),
            pending_accepts: VecDeque::new(),
            refusals: VecDeque::new(),
            counters: Counters::default(),
            live: 0,
            half_open: 0,
            handshakes,
            budget,
            blocked: Vec::new(),
            scratch: Vec::new(),
            pool: BufferPool::new(STAGE_BYTES, SEND_BUFFERS),
        }
    }

    /// Completes the first pending accept, or queues the connection.
    pub fn deliver(&mut self, handle: Arc<ConnectionHandle>) {
        match self.pending_accepts.pop_front() {
            Some(op) => op.complete(Ok(Value::Connection(handle))),
            None => {
                if self.accept_queue.len() == self.settings.max_connections {
                    self.accept_queue.pop_front();
                }
                self.accept_queue.push_back(handle);
            }
        }
    }

    pub fn refuse(&mut self, remote: SocketAddr, reason: String) {
        self.counters.refused += 1;
        if self.refusals.len() == REFUSALS_KEPT {
            self.refusals.pop_front();
        }
        self.refusals
            .push_back((socket::canonical_address(remote), reason));
    }

    pub fn segments(&self, mtu: u16) -> usize {
        self.socket.as_ref().map_or(1, |s| s.segments(mtu))
    }

    /// False: the kernel's buffer is full.
    pub fn send(&mut self, transmit: &Transmit, contents: &[u8]) -> bool {
        let Some(socket) = &self.socket else {
            return true;
        };
        if !socket.send(transmit, contents) {
            return false;
        }
        let size = transmit.size;
        let segment = transmit.segment_size.unwrap_or(size).max(1);
        self.counters.datagrams_sent += size.div_ceil(segment) as u64;
        self.counters.bytes_sent += size as u64;
        true
    }
}

/// The packet that tells a peer that we closed. Any datagram may be lost and nothing repeats it once the
/// socket is closed, so the packet is kept, to be sent several times.
pub struct ClosePacket {
    transmit: Transmit,
    contents: Vec<u8>,
}

impl ClosePacket {
    pub fn of(transmit: &Transmit, contents: &[u8]) -> Self {
        let transmit = Transmit {
            destination: transmit.destination,
            ecn: transmit.ecn,
            size: transmit.size,
            segment_size: transmit.segment_size,
            src_ip: transmit.src_ip,
        };
        ClosePacket {
            transmit,
            contents: contents.to_vec(),
        }
    }

    pub fn send(&self, core: &mut EndpointCore) {
        core.send(&self.transmit, &self.contents);
    }
}
