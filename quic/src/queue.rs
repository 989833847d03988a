//! The queue behind a `Completions`.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use crate::event::Event;
use crate::op::Op;
use crate::operation::Operation;
use crate::waiter::Waiter;

/// One finished operation, ready to be handed out.
pub struct Finished {
    pub op: Arc<Op>,
    pub object: Py<Operation>,
}

/// The Python objects of operations, pending and finished, belong to the queue and so to its
/// `Completions`, which shows them to the garbage collector: an operation's token may well lead
/// back to the endpoint.
///
/// Its lock comes after the endpoint's; whatever makes a waiter's condition true happens under both.
#[derive(Default)]
pub struct Queue {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    pending: Vec<Option<Py<Operation>>>,
    vacant: Vec<usize>,
    ready: Vec<Finished>,
    waiters: Vec<Arc<Waiter>>,
    kicked: bool,
    watched: Vec<(RawFd, i16)>,
    /// Readable while `ready` is not empty, from the first `fileno()` on.
    event: Option<Event>,
    /// The spin budget is halved so many times: it did not pay lately.
    halvings: u32,
}

const MOST_HALVINGS: u32 = 4;

impl Queue {
    /// An operation is about to be posted: keep its object. Returns where.
    pub fn keep(&self, object: Py<Operation>) -> usize {
        let mut inner = self.inner.lock();
        match inner.vacant.pop() {
            Some(slot) => {
                inner.pending[slot] = Some(object);
                slot
            }
            None => {
                inner.pending.push(Some(object));
                inner.pending.len() - 1
            }
        }
    }

    /// It was not posted after all.
    pub fn release(&self, slot: usize) -> Option<Py<Operation>> {
        self.inner.lock().release(slot)
    }

    /// Under the endpoint's lock. A queue nobody can wait on any more takes nothing in.
    pub fn push(&self, op: Arc<Op>, slot: usize) {
        let mut inner = self.inner.lock();
        let Some(object) = inner.release(slot) else {
            return;
        };
        inner.ready.push(Finished { op, object });
        if inner.ready.len() == 1 {
            if let Some(event) = &inner.event {
                event.signal();
            }
        }
        inner.wake();
    }

    /// Is there a reason to return? Does not take it.
    pub fn ready(&self) -> bool {
        let inner = self.inner.lock();
        inner.kicked || !inner.ready.is_empty()
    }

    /// Everything finished so far; also ends a kick.
    pub fn take(&self) -> Vec<Finished> {
        let mut inner = self.inner.lock();
        inner.kicked = false;
        if inner.ready.is_empty() {
            return Vec::new();
        }
        if let Some(event) = &inner.event {
            event.drain();
        }
        std::mem::take(&mut inner.ready)
    }

    /// Under the endpoint's lock.
    pub fn kick(&self) {
        let mut inner = self.inner.lock();
        inner.kicked = true;
        inner.wake();
    }

    /// Under the endpoint's lock: those asleep poll the new set.
    pub fn watch(&self, descriptor: RawFd, events: i16) {
        let mut inner = self.inner.lock();
        inner.watched.retain(|&(fd, _)| fd != descriptor);
        if events != 0 {
            inner.watched.push((descriptor, events));
        }
        inner.wake();
    }

    pub fn watched(&self) -> Vec<(RawFd, i16)> {
        self.inner.lock().watched.clone()
    }

    pub fn descriptor(&self) -> io::Result<RawFd> {
        let mut inner = self.inner.lock();
        if let Some(event) = &inner.event {
            return Ok(event.raw());
        }
        let event = Event::new()?;
        if !inner.ready.is_empty() {
            event.signal();
        }
        let raw = event.raw();
        inner.event = Some(event);
        Ok(raw)
    }

    /// Somebody relies on `fileno()`, so the background thread has to drive at once.
    pub fn armed(&self) -> bool {
        self.inner.lock().event.is_some()
    }

    pub fn enlist(&self, waiter: &Arc<Waiter>) {
        self.inner.lock().waiters.push(waiter.clone());
    }

    pub fn dismiss(&self, waiter: &Arc<Waiter>) {
        let mut inner = self.inner.lock();
        inner.waiters.retain(|w| !Arc::ptr_eq(w, waiter));
    }

    /// How long to spin, given what the caller allows.
    pub fn budget(&self, allowed: Duration) -> Duration {
        allowed / (1 << self.inner.lock().halvings)
    }

    /// It spun and slept in vain, or what it waited for came within the time allowed.
    pub fn learn(&self, paid: bool) {
        let mut inner = self.inner.lock();
        inner.halvings = match paid {
            true => 0,
            false => (inner.halvings + 1).min(MOST_HALVINGS),
        };
    }

    /// Let go of every Python object. GIL held, no lock of ours.
    pub fn clear(&self) {
        let mut inner = self.inner.lock();
        inner.vacant.clear();
        let pending = std::mem::take(&mut inner.pending);
        let ready = std::mem::take(&mut inner.ready);
        drop(inner);
        drop((pending, ready));
    }

    /// For the garbage collector. A queue in use just now is not garbage.
    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Some(inner) = self.inner.try_lock() else {
            return Ok(());
        };
        for object in inner.pending.iter().flatten() {
            visit.call(object)?;
        }
        for finished in &inner.ready {
            visit.call(&finished.object)?;
        }
        Ok(())
    }
}

impl Inner {
    fn release(&mut self, slot: usize) -> Option<Py<Operation>> {
        let object = self.pending.get_mut(slot)?.take()?;
        self.vacant.push(slot);
        Some(object)
    }

    /// All of them: one that leaves for another reason would otherwise take the news with it.
    fn wake(&self) {
        for waiter in &self.waiters {
            waiter.wake();
        }
    }
}
