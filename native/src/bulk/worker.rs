//! A worker: a native thread that owns connections, both directions of each. It never takes the GIL.

use std::collections::HashMap;
use std::io;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{fence, AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::connection::{Connection, Step};
use super::shared::Shared;
use crate::runtime::descriptors::{Event, Readiness, Ready};
use crate::runtime::errors::Failure;
use crate::runtime::signals::with_signals_blocked;

const STACK_BYTES: usize = 512 << 10;
/// Without a deadline.
const IDLE: Duration = Duration::from_secs(3600);
/// The number of the worker's own eventfd among those of connections.
const OWN: u64 = 0;

pub struct Worker {
    inbox: Mutex<Vec<Command>>,
    event: Event,
    /// The thread sleeps, or is about to, and must be woken after a command.
    sleeping: AtomicBool,
    closed: AtomicBool,
    last_key: AtomicU64,
}

enum Command {
    Take(Link, Box<Connection>),
    /// The channel has something to send.
    Kick(u64),
    /// The channel has ended, for this reason.
    Drop(u64, String),
}

/// A connection of a worker, as others know it.
#[derive(Clone)]
pub struct Link {
    worker: Arc<Worker>,
    key: u64,
    kicked: Arc<AtomicBool>,
}

impl Link {
    /// Makes the worker look for something to send.
    pub fn kick(&self) {
        if !self.kicked.swap(true, Ordering::AcqRel) {
            self.worker.post(Command::Kick(self.key));
        }
    }

    pub fn drop_connection(&self, reason: &str) {
        self.worker.post(Command::Drop(self.key, reason.to_owned()));
    }
}

impl Worker {
    pub fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Worker {
            inbox: Mutex::default(),
            event: Event::new()?,
            sleeping: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            last_key: AtomicU64::new(OWN),
        }))
    }

    pub fn new_link(self: &Arc<Self>) -> Link {
        Link {
            worker: self.clone(),
            key: self.last_key.fetch_add(1, Ordering::Relaxed) + 1,
            kicked: Arc::default(),
        }
    }

    pub fn take(&self, link: Link, connection: Connection) {
        self.post(Command::Take(link, Box::new(connection)));
    }

    fn post(&self, command: Command) {
        self.inbox.lock().push(command);
        self.wake();
    }

    /// The fence orders the command before the look at `sleeping`; the thread has one between them too, the other way
    /// round. So either it sees the command, or this sees that it sleeps.
    fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleeping.swap(false, Ordering::AcqRel) {
            self.event.signal();
        }
    }

    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.event.signal();
    }

    /// After the thread has ended.
    pub fn clear(&self) {
        let commands = std::mem::take(&mut *self.inbox.lock());
        drop(commands);
    }

    /// True: the thread may sleep.
    fn prepare_sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        let idle = self.inbox.lock().is_empty();
        if !idle {
            self.sleeping.store(false, Ordering::Release);
        }
        idle
    }
}

pub fn start(shared: Arc<Shared>, worker: Arc<Worker>) -> io::Result<JoinHandle<()>> {
    let readiness = Readiness::new()?;
    readiness.add(worker.event.raw(), OWN)?;
    with_signals_blocked(|| {
        Builder::new()
            .name("nexar-bulk".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let mut thread = Thread {
                    shared,
                    worker,
                    readiness,
                    connections: HashMap::new(),
                    busy: Vec::new(),
                    timed: false,
                };
                thread.run();
            })
    })
}

struct Thread {
    shared: Arc<Shared>,
    worker: Arc<Worker>,
    readiness: Readiness,
    connections: HashMap<u64, (Link, Box<Connection>)>,
    /// Connections that have more to do without waiting.
    busy: Vec<u64>,
    /// Connections may have a deadline.
    timed: bool,
}

impl Thread {
    fn run(&mut self) {
        let mut ready = Vec::new();
        while !self.worker.closed.load(Ordering::Acquire) {
            let commands = std::mem::take(&mut *self.worker.inbox.lock());
            for command in commands {
                self.execute(command);
            }
            for key in std::mem::take(&mut self.busy) {
                self.step(key);
            }
            let timeout = match self.busy.is_empty() && self.worker.prepare_sleep() {
                true => self.next_deadline(),
                false => Duration::ZERO,
            };
            self.readiness.wait(timeout, &mut ready);
            self.worker.sleeping.store(false, Ordering::Release);
            self.shared.counters.rounds.fetch_add(1, Ordering::Relaxed);
            for &(key, events) in &ready {
                self.ready(key, events);
            }
            self.expire();
        }
        let commands = std::mem::take(&mut *self.worker.inbox.lock());
        for command in commands {
            if let Command::Drop(..) = command {
                self.execute(command); // says why
            }
        }
        for (_, mut connection) in std::mem::take(&mut self.connections).into_values() {
            connection.part("the endpoint was closed");
        }
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Take(link, connection) => {
                let key = link.key;
                if let Err(error) = self.readiness.add(connection.descriptor(), key) {
                    connection.lost(&Failure::connect(error));
                    return;
                }
                self.connections.insert(key, (link, connection));
                self.timed = true;
                self.step(key);
            }
            Command::Kick(key) => self.step(key),
            Command::Drop(key, reason) => {
                if let Some((_, mut connection)) = self.connections.remove(&key) {
                    connection.part(&reason);
                }
            }
        }
    }

    fn ready(&mut self, key: u64, events: Ready) {
        if key == OWN {
            self.worker.event.drain();
        } else if let Some((_, connection)) = self.connections.get_mut(&key) {
            connection.became_ready(events);
            self.step(key);
        }
    }

    /// Lets a connection do what it can. A panic ends its channel only.
    fn step(&mut self, key: u64) {
        let Some((link, connection)) = self.connections.get_mut(&key) else {
            return;
        };
        link.kicked.store(false, Ordering::Release);
        fence(Ordering::SeqCst); // before the look at the channel's queue
        let step = catch_unwind(AssertUnwindSafe(|| connection.step()));
        let failure = match step {
            Ok(Ok(Step::Waits)) => return,
            Ok(Ok(Step::HasMore)) => {
                if !self.busy.contains(&key) {
                    self.busy.push(key);
                }
                return;
            }
            Ok(Ok(Step::Finished)) => None,
            Ok(Err(failure)) => Some(failure),
            Err(_) => Some(Failure::Lost {
                kind: "fault",
                code: None,
                reason: "an internal error in a worker".to_owned(),
            }),
        };
        if let Some((_, mut connection)) = self.connections.remove(&key) {
            match failure {
                Some(failure) => {
                    let _ = catch_unwind(AssertUnwindSafe(|| connection.say_why(&failure)));
                    connection.lost(&failure);
                }
                None => connection.finished(),
            }
        }
    }

    fn next_deadline(&self) -> Duration {
        if !self.timed {
            return IDLE;
        }
        let deadlines = self
            .connections
            .values()
            .filter_map(|each| each.1.deadline());
        let next = deadlines.min();
        next.map_or(IDLE, |next| next.saturating_duration_since(Instant::now()))
    }

    fn expire(&mut self) {
        if !self.timed {
            return;
        }
        let now = Instant::now();
        let late: Vec<u64> = self
            .connections
            .iter_mut()
            .filter_map(|(&key, (_, connection))| connection.is_late(now).then_some(key))
            .collect();
        let mut left = self.connections.values();
        self.timed = left.any(|each| each.1.deadline().is_some());
        for key in late {
            if let Some((_, mut connection)) = self.connections.remove(&key) {
                let failure = Failure::Connect {
                    kind: "timed_out",
                    reason: connection.waits_for().to_owned(),
                };
                connection.say_why(&failure);
                connection.lost(&failure);
            }
        }
    }
}
