//! The queue behind a `Completions`.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::event::Event;
use crate::op::Op;
use crate::operation::Operation;
use crate::trash;
use crate::waiter::Waiter;

/// One finished operation, ready to be handed out.
pub struct Finished {
    pub op: Arc<Op>,
    pub object: Py<Operation>,
}

/// Its lock comes after the endpoint's; whatever makes a waiter's condition true happens under both.
#[derive(Default)]
pub struct Queue {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    ready: Vec<Finished>,
    waiters: Vec<Arc<Waiter>>,
    kicked: bool,
    watched: Vec<(RawFd, i16)>,
    /// Readable while `ready` is not empty, from the first `fileno()` on.
    event: Option<Event>,
    closed: bool,
    /// The spin budget is halved so many times: it did not pay lately.
    halvings: u32,
}

const MOST_HALVINGS: u32 = 4;

impl Queue {
    /// Under the endpoint's lock. A queue nobody can wait on any more takes nothing in.
    pub fn push(&self, op: Arc<Op>, object: Option<Py<Operation>>) {
        let mut inner = self.inner.lock();
        let Some(object) = object else { return };
        if inner.closed {
            return trash::put(trash::Item::Object(object.into_any()));
        }
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

    /// The Python object is gone. What it held is let go by the caller.
    pub fn close(&self) -> Vec<Finished> {
        let mut inner = self.inner.lock();
        inner.closed = true;
        inner.event = None;
        std::mem::take(&mut inner.ready)
    }
}

impl Inner {
    /// All of them: one that leaves for another reason would otherwise take the news with it.
    fn wake(&self) {
        for waiter in &self.waiters {
            waiter.wake();
        }
    }
}
