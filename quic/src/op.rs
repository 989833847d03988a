//! A posted operation, as the driver sees it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use quinn_proto::Dir;

use crate::buffer::Borrowed;
use crate::errors::Failure;
use crate::grip::{ConnectionGrip, StreamGrip};
use crate::operation::Operation;
use crate::queue::Queue;
use crate::trash;
use crate::waiter::Waiter;

/// What an operation is about: where the driver keeps it while it is pending.
pub enum Target {
    /// The connection is made when the operation is posted.
    Connect(OnceLock<Arc<ConnectionGrip>>),
    Accept,
    Open(Arc<ConnectionGrip>, Dir),
    AcceptStream(Arc<ConnectionGrip>, Dir),
    Closed(Arc<ConnectionGrip>),
    Read(Arc<StreamGrip>),
    Write(Arc<StreamGrip>),
    Finished(Arc<StreamGrip>),
}

/// What an operation gave.
#[derive(Clone)]
pub enum Value {
    Nothing,
    Count(usize),
    Connection(Arc<ConnectionGrip>),
    Stream(Arc<StreamGrip>),
}

pub type Outcome = Result<Value, Failure>;

/// Shared by the driver, which completes it, and its Python `Operation`.
pub struct Op {
    pub target: Target,
    done: AtomicBool,
    cell: Mutex<Cell>,
}

/// The changing part. Its lock comes after the endpoint's and is held only to copy. Once `outcome`
/// is set nobody but a thread with the GIL touches the buffer, and only to give it back.
pub struct Cell {
    pub buffer: Option<Borrowed>,
    /// Bytes moved so far.
    pub moved: usize,
    /// A read is done once so many bytes are there.
    pub minimum: usize,
    outcome: Option<Outcome>,
    queue: Option<Arc<Queue>>,
    /// What the queue hands out. Keeps the Python object alive while the operation is pending.
    object: Option<Py<Operation>>,
    waiters: Vec<Arc<Waiter>>,
}

impl Op {
    pub fn new(target: Target, queue: Option<Arc<Queue>>) -> Self {
        Self::moving(target, queue, None, 0)
    }

    pub fn moving(
        target: Target,
        queue: Option<Arc<Queue>>,
        buffer: Option<Borrowed>,
        minimum: usize,
    ) -> Self {
        Op {
            target,
            done: AtomicBool::new(false),
            cell: Mutex::new(Cell {
                buffer,
                moved: 0,
                minimum,
                outcome: None,
                queue,
                object: None,
                waiters: Vec::new(),
            }),
        }
    }

    /// Under the endpoint's lock: the first outcome stays; the waiters concerned are woken.
    pub fn complete(self: &Arc<Self>, outcome: Outcome) {
        let mut cell = self.cell.lock();
        if cell.outcome.is_some() {
            return;
        }
        cell.outcome = Some(outcome);
        self.done.store(true, Ordering::Release);
        for waiter in &cell.waiters {
            waiter.wake();
        }
        let Some(queue) = cell.queue.take() else {
            return;
        };
        let object = cell.object.take();
        drop(cell);
        queue.push(self.clone(), object);
    }

    pub fn done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    pub fn cell(&self) -> MutexGuard<'_, Cell> {
        self.cell.lock()
    }

    /// Give the buffer back if nothing will touch it any more. GIL held, no lock of ours.
    pub fn settle(&self, py: Python<'_>) {
        if !self.done() {
            return;
        }
        let buffer = self.cell.lock().buffer.take();
        if let Some(buffer) = buffer {
            buffer.release(py);
        }
    }

    /// It could not be posted after all. GIL held, no lock of ours.
    pub fn unpost(&self, py: Python<'_>) {
        let mut cell = self.cell.lock();
        let (buffer, object) = (cell.buffer.take(), cell.object.take());
        drop(cell);
        if let Some(buffer) = buffer {
            buffer.release(py);
        }
        drop(object);
    }
}

impl Cell {
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome.clone()
    }

    /// Before the operation is posted: it will appear in the queue as `object`.
    pub fn queued(&self) -> bool {
        self.queue.is_some()
    }

    pub fn keep(&mut self, object: Py<Operation>) {
        self.object = Some(object);
    }

    pub fn enlist(&mut self, waiter: &Arc<Waiter>) {
        self.waiters.push(waiter.clone());
    }

    pub fn dismiss(&mut self, waiter: &Arc<Waiter>) {
        self.waiters.retain(|w| !Arc::ptr_eq(w, waiter));
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        if let Some(object) = self.object.take() {
            trash::put(trash::Item::Object(object.into_any()));
        }
    }
}
