//! What the Python objects of an endpoint and its workers share: events, channels, workers.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::prelude::*;

use super::channel::{Changed, Core};
use super::config::Identity;
use super::connection::Connection;
use super::frame::{Hello, Nonce};
use super::worker::{self, Link, Worker};
use crate::runtime::descriptors::Event as Doorbell;
use crate::runtime::errors::{Failure, ForkedError};
use crate::runtime::{decref, process};

/// The newest refusals are kept for `poll`.
const MAX_REFUSED: usize = 256;
/// Connections of one endpoint, also those that are not verified. Each takes up to 1 MiB.
const MAX_CONNECTIONS: usize = 4096;

/// Something that `poll` reports.
pub enum Event {
    Accepted(Arc<Core>),
    Landed(u64, u64),
    Sent(u64, u64),
    Finished(u64),
    Lost(u64, &'static str, String),
    Refused(String, String),
}

struct Queue {
    events: VecDeque<Event>,
    refused: usize,
    /// Readable while there are events. None: the endpoint is closed.
    doorbell: Option<Doorbell>,
}

pub struct Shared {
    pub identity: Mutex<Identity>,
    pub allow_plain: bool,
    pub handshake_timeout: Duration,
    max_handshakes: usize,
    generation: u32,
    queue: Mutex<Queue>,
    channels: Mutex<HashMap<u64, Arc<Core>>>,
    dialed_by_peers: Mutex<HashMap<Origin, Arc<Core>>>,
    last_id: AtomicU64,
    /// Empty: the endpoint is closed.
    workers: Mutex<Vec<Arc<Worker>>>,
    threads: Mutex<Option<Vec<JoinHandle<()>>>>,
    next_worker: AtomicUsize,
    pub closed: AtomicBool,
    pub counters: Counters,
}

/// The certificate and the nonce of a channel that a peer has dialed.
type Origin = (Vec<u8>, Nonce);

#[derive(Default)]
pub struct Counters {
    pub connections: AtomicUsize,
    pub handshakes: AtomicUsize,
    pub refused: AtomicU64,
    pub bytes_sent: AtomicU64,
    pub bytes_received: AtomicU64,
    pub rounds: AtomicU64,
}

/// Held by every Python object of the endpoint; dropping the last one closes it.
pub struct Guard(pub Arc<Shared>);

impl Drop for Guard {
    fn drop(&mut self) {
        match self.0.made_in_parent() {
            true => std::mem::forget(self.0.clone()), // never freed: its memory may be inconsistent here
            false => self.0.close("the endpoint was dropped"),
        }
    }
}

impl process::CloseAtExit for Shared {
    fn close_at_exit(&self) {
        self.close("the process exits");
    }
}

/// Counts a connection until it is dropped.
pub struct Counted(Arc<Shared>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.counters.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts a connection whose peer is not verified.
pub struct Unverified(Arc<Shared>);

impl Drop for Unverified {
    fn drop(&mut self) {
        self.0.counters.handshakes.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Shared {
    pub fn new(
        identity: Identity,
        threads: usize,
        allow_plain: bool,
        handshake_timeout: Duration,
        max_handshakes: usize,
    ) -> io::Result<Arc<Self>> {
        let workers: io::Result<Vec<_>> = (0..threads).map(|_| Worker::new()).collect();
        let shared = Arc::new(Shared {
            identity: Mutex::new(identity),
            allow_plain,
            handshake_timeout,
            max_handshakes,
            generation: process::generation(),
            queue: Mutex::new(Queue {
                events: VecDeque::new(),
                refused: 0,
                doorbell: Some(Doorbell::new()?),
            }),
            channels: Mutex::default(),
            dialed_by_peers: Mutex::default(),
            last_id: AtomicU64::new(0),
            workers: Mutex::new(workers?),
            threads: Mutex::new(None),
            next_worker: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            counters: Counters::default(),
        });
        process::register_for_exit(&shared);
        Ok(shared)
    }

    // -- Python ---------------------------------------------------------------------------------------

    /// Whether the endpoint was made in the parent of this process. A thread that does not exist here may hold one of
    /// its locks.
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

    pub fn check_open(&self) -> Result<(), Failure> {
        match self.closed.load(Ordering::Acquire) {
            true => Err(is_closed()),
            false => Ok(()),
        }
    }

    pub fn fileno(&self) -> Option<i32> {
        let queue = self.queue.lock();
        queue.doorbell.as_ref().map(Doorbell::raw)
    }

    pub fn take_events(&self) -> VecDeque<Event> {
        let mut queue = self.queue.lock();
        if let Some(doorbell) = queue.doorbell.as_ref().filter(|_| !queue.events.is_empty()) {
            doorbell.drain();
        }
        queue.refused = 0;
        std::mem::take(&mut queue.events)
    }

    /// Ends all channels and joins the workers. Idempotent. Does not need the GIL.
    pub fn close(&self, reason: &str) {
        self.closed.store(true, Ordering::Release);
        let channels: Vec<_> = self.channels.lock().values().cloned().collect();
        for core in channels {
            core.end(closed(reason));
        }
        let threads = self.threads.lock().replace(Vec::new());
        let workers = std::mem::take(&mut *self.workers.lock());
        workers.iter().for_each(|each| each.close());
        for thread in threads.into_iter().flatten() {
            let _ = thread.join();
        }
        workers.iter().for_each(|each| each.clear());
        // A connection may have joined a channel meanwhile.
        let channels: Vec<_> = self.channels.lock().values().cloned().collect();
        for core in channels {
            core.end(closed(reason));
        }
        let mut queue = self.queue.lock();
        queue.doorbell = None;
        let events = std::mem::take(&mut queue.events);
        drop(queue);
        drop(events);
    }

    // -- events ---------------------------------------------------------------------------------------

    pub fn push(&self, event: Event) {
        let mut queue = self.queue.lock();
        let Some(doorbell) = &queue.doorbell else {
            return;
        };
        if queue.events.is_empty() {
            doorbell.signal();
        }
        queue.events.push_back(event);
    }

    pub fn accepted(&self, id: u64) {
        let core = self.channels.lock().get(&id).cloned();
        if let Some(core) = core {
            self.push(Event::Accepted(core));
        }
    }

    pub fn refuse(&self, address: &str, reason: String) {
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        let mut queue = self.queue.lock();
        if queue.refused == MAX_REFUSED {
            return;
        }
        queue.refused += 1;
        drop(queue);
        self.push(Event::Refused(address.to_owned(), reason));
    }

    // -- channels -------------------------------------------------------------------------------------

    pub fn next_id(&self) -> u64 {
        self.last_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub fn channel_count(&self) -> usize {
        self.channels.lock().len()
    }

    pub fn register(&self, core: &Arc<Core>) {
        self.channels.lock().insert(core.id, core.clone());
    }

    pub fn forget(&self, id: u64) {
        let core = self.channels.lock().remove(&id);
        if core.is_some_and(|core| !core.dialed) {
            self.dialed_by_peers.lock().retain(|_, core| core.id != id);
        }
    }

    /// The channel that this hello belongs to: the first hello of a channel makes it.
    pub fn channel_of(
        self: &Arc<Self>,
        hello: &Hello,
        certificate: &[u8],
    ) -> Result<Arc<Core>, &'static str> {
        let mut dialed = self.dialed_by_peers.lock();
        let key = (certificate.to_vec(), hello.nonce);
        if let Some(core) = dialed.get(&key) {
            let same = core.count == usize::from(hello.count) && core.hello == hello.text;
            return match same {
                true => Ok(core.clone()),
                false => Err("hellos of one channel that differ"),
            };
        }
        let core = Core::new(
            self,
            false,
            hello.text.clone(),
            usize::from(hello.count),
            Arc::<Changed>::default(),
        );
        dialed.insert(key, core.clone());
        self.register(&core);
        Ok(core)
    }

    // -- workers --------------------------------------------------------------------------------------

    /// Gives a connection to the next worker. The first one starts the threads.
    pub fn serve(
        self: &Arc<Self>,
        make: impl FnOnce(Link) -> Result<Connection, Failure>,
    ) -> Result<(), Failure> {
        self.start().map_err(|error| Failure::Os(os_code(&error)))?;
        let turn = self.next_worker.fetch_add(1, Ordering::Relaxed);
        let worker = {
            let workers = self.workers.lock();
            let count = workers.len().max(1);
            workers.get(turn % count).cloned()
        };
        let worker = worker.ok_or_else(is_closed)?;
        let link = worker.new_link();
        let connection = make(link.clone())?;
        worker.take(link, connection);
        Ok(())
    }

    fn start(self: &Arc<Self>) -> io::Result<()> {
        let mut threads = self.threads.lock();
        if threads.is_some() {
            return Ok(()); // running, or closed
        }
        let mut started = Vec::new();
        for worker in self.workers.lock().iter() {
            match worker::start(self.clone(), worker.clone()) {
                Ok(thread) => started.push(thread),
                Err(error) if started.is_empty() => return Err(error),
                Err(_) => break, // fewer threads do the work
            }
        }
        self.workers.lock().truncate(started.len());
        *threads = Some(started);
        Ok(())
    }

    pub fn threads(&self) -> usize {
        self.threads.lock().as_ref().map_or(0, Vec::len)
    }

    /// None: there are too many connections.
    pub fn count_connection(self: &Arc<Self>) -> Option<Counted> {
        let count = self.counters.connections.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(self.clone());
        (count < MAX_CONNECTIONS).then_some(counted)
    }

    /// None: there are too many peers that are not verified.
    pub fn count_unverified(self: &Arc<Self>) -> Option<Unverified> {
        let count = self.counters.handshakes.fetch_add(1, Ordering::Relaxed);
        let counted = Unverified(self.clone());
        (count < self.max_handshakes).then_some(counted)
    }
}

fn is_closed() -> Failure {
    Failure::Closed {
        reason: "it was closed".to_owned(),
    }
}

pub fn closed(reason: &str) -> Failure {
    Failure::Lost {
        kind: "closed",
        code: None,
        reason: reason.to_owned(),
    }
}

pub fn os_code(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}
