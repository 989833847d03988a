//! An endpoint as its Python objects, its waiting threads and its background thread share it.

use std::net::SocketAddr;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use pyo3::prelude::*;
use quinn_proto::VarInt;

use crate::errors::{Failure, ForkedError};
use crate::grip::Dropped;
use crate::op::Op;
use crate::state::{Round, State, ROUND_BYTES};
use crate::{exit, fork, trash};

/// How often a closing endpoint repeats its last word, and how long the peers get to make room for it.
const FAREWELLS: usize = 3;
const BETWEEN_FAREWELLS: Duration = Duration::from_millis(3);

/// Order of locks: the endpoint's `state` first, then any of the leaves (an operation's cell, a
/// queue, `dropped`, the tables of trash and descriptors), one at a time. The GIL comes before them
/// all: a thread that has it may take a lock, a thread that has a lock never asks for the GIL.
pub struct Shared {
    pub state: Mutex<State>,
    /// Signalled when the last waiting thread has left a closed endpoint.
    vacated: Condvar,
    pub address: SocketAddr,
    generation: u32,
    dropped: Mutex<Vec<Dropped>>,
    any_dropped: AtomicBool,
    background: Mutex<Option<JoinHandle<()>>>,
    guard: OnceLock<Weak<Guard>>,
}

/// Held by every Python object that needs the endpoint; the last one to go closes it. Pending
/// operations do not hold it: the endpoint holds them.
pub struct Guard(pub Arc<Shared>);

impl Drop for Guard {
    fn drop(&mut self) {
        match self.0.foreign() {
            true => std::mem::forget(self.0.clone()), // never freed, hence never looked at
            false => self.0.close(0, ""),
        }
    }
}

impl Shared {
    pub fn new(state: State, address: SocketAddr) -> (Arc<Self>, Arc<Guard>) {
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            vacated: Condvar::new(),
            address,
            generation: fork::generation(),
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

    pub fn employ(&self, background: JoinHandle<()>) {
        *self.background.lock() = Some(background);
    }

    /// Made in the parent of this process: a lock of it may be held by a thread that is not here,
    /// and what that lock protects may be half changed.
    pub fn foreign(&self) -> bool {
        self.generation != fork::generation()
    }

    /// What every call from Python does first. No lock of ours is held.
    pub fn enter(&self, py: Python<'_>) -> PyResult<()> {
        if self.foreign() {
            return Err(ForkedError::new_err(
                "made in the parent process; a forked child must make its own endpoint",
            ));
        }
        trash::empty(py);
        Ok(())
    }

    pub fn guard(&self, py: Python<'_>) -> PyResult<Arc<Guard>> {
        let guard = self.guard.get().and_then(|weak| weak.upgrade());
        guard.ok_or_else(|| {
            let reason = "nothing holds it any more".to_owned();
            Failure::Closed { reason }.into_py(py)
        })
    }

    /// Run `work` under the lock, then do what follows from it. Keeps the GIL if the lock is free
    /// and the work is small (letting it go and getting it back may cost a switch interval).
    pub fn call<R: Send>(
        &self,
        py: Python<'_>,
        large: bool,
        work: impl FnOnce(&mut State) -> Result<R, Failure> + Send,
    ) -> PyResult<R> {
        self.enter(py)?;
        // With the GIL held, at most one round's worth is sent; whoever drives sends the rest.
        let result = match self.state.try_lock() {
            Some(state) if !large => self.perform(state, ROUND_BYTES, work),
            held => {
                drop(held);
                exit::detached(py, || self.perform(self.state.lock(), usize::MAX, work))
            }
        };
        result.map_err(|failure| failure.into_py(py))
    }

    fn perform<R>(
        &self,
        mut state: MutexGuard<'_, State>,
        budget: usize,
        work: impl FnOnce(&mut State) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        state.open()?;
        let attempt = catch_unwind(AssertUnwindSafe(|| {
            let result = work(&mut state);
            self.follow_up(&mut state, budget);
            result
        }));
        attempt.unwrap_or_else(|panic| {
            state.poison(&*panic);
            Err(state.open().err().unwrap_or(Failure::Cancelled))
        })
    }

    /// Transmit what became possible, and wake the leader if it would sleep past what that started.
    fn follow_up(&self, state: &mut State, budget: usize) {
        if !state.unfinished() && !self.any_dropped.load(Ordering::Relaxed) {
            return;
        }
        let unfinished = state.settle(Instant::now(), budget);
        let next = state.next_timer();
        let blocked = !state.hub.blocked.is_empty();
        state.crew.rouse(next, blocked, unfinished);
    }

    /// One round, its panics caught. Lock held by the caller.
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

    pub fn cancel(&self, py: Python<'_>, op: &Arc<Op>) -> PyResult<bool> {
        let done = |state: &mut State| Ok(state.cancel(op));
        match self.call(py, false, done) {
            // Closed meanwhile: everything is done then.
            Err(_) if op.done() => Ok(false),
            other => other,
        }
    }

    /// Called by grips on their way out, under whatever lock.
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

    /// A Python object went; act on it now rather than at the next occasion.
    pub fn tidy(&self) {
        if !self.foreign() && self.any_dropped.load(Ordering::Relaxed) {
            let _ = self.perform(self.state.lock(), ROUND_BYTES, |_| Ok(()));
        }
    }

    /// The last thread has left; `close` waits for it.
    pub fn vacate(&self, state: &State) {
        if state.closed.is_some() && state.crew.inside == 0 {
            self.vacated.notify_all();
        }
    }

    /// Tell every peer, fail everything, see all threads out, close the socket. Needs no GIL.
    pub fn close(&self, code: u32, reason: &str) {
        let mut state = self.state.lock();
        let failure = Failure::Closed {
            reason: "it was closed".to_owned(),
        };
        let attempt = catch_unwind(AssertUnwindSafe(|| {
            state.shut(failure, VarInt::from_u32(code), reason)
        }));
        if let Err(panic) = attempt {
            state.poison(&*panic);
        }
        while state.crew.inside > 0 {
            self.vacated.wait(&mut state);
        }
        drop(state);
        // The lock is held while joining, so that a second closer waits as well.
        let mut background = self.background.lock();
        if let Some(background) = background.take() {
            let _ = background.join();
        }
        drop(background);
        for _ in 0..FAREWELLS {
            if !self.state.lock().repeat_farewells() {
                break;
            }
            std::thread::sleep(BETWEEN_FAREWELLS);
        }
        // Nobody polls it any more, so its number may be given to others.
        let mut state = self.state.lock();
        let socket = state.hub.socket.take();
        let sessions = std::mem::take(&mut state.sessions);
        state.crew.disband();
        drop(state);
        drop((socket, sessions));
    }
}
