//! A posted operation, as the driver sees it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use quinn_proto::Dir;

use crate::buffer::Borrowed;
use crate::errors::Failure;
use crate::grip::{ConnectionGrip, StreamGrip};
use crate::operation::Operation;
use crate::queue::Queue;
use crate::waiter::Waiter;

/// What an operation is about: where the driver keeps it while it is pending.
pub enum Target {
    /// The connection is made when the operation is posted.
    Connect(Option<Arc<ConnectionGrip>>),
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
    done: AtomicBool,
    cell: Mutex<Cell>,
}

/// The changing part. Its lock comes after the endpoint's and is held only to copy. Once `outcome`
/// is set nobody but a thread with the GIL touches the buffer, and only to give it back.
pub struct Cell {
    /// None once done: an operation that is only looked at holds nothing open.
    target: Option<Target>,
    pub buffer: Option<Borrowed>,
    /// Bytes moved so far.
    pub moved: usize,
    /// A read is done once so many bytes are there.
    pub minimum: usize,
    outcome: Option<Outcome>,
    queue: Option<Arc<Queue>>,
    /// Where the queue keeps the Python object.
    slot: usize,
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
            done: AtomicBool::new(false),
            cell: Mutex::new(Cell {
                target: Some(target),
                buffer,
                moved: 0,
                minimum,
                outcome: None,
                queue,
                slot: 0,
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
        let target = cell.target.take();
        self.done.store(true, Ordering::Release);
        for waiter in &cell.waiters {
            waiter.wake();
        }
        let (queue, slot) = (cell.queue.take(), cell.slot);
        drop(cell);
        drop(target);
        if let Some(queue) = queue {
            queue.push(self.clone(), slot);
        }
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
        let (buffer, queue, slot) = (cell.buffer.take(), cell.queue.take(), cell.slot);
        drop(cell);
        if let Some(buffer) = buffer {
            buffer.release(py);
        }
        drop(queue.and_then(|queue| queue.release(slot)));
    }
}

impl Cell {
    /// To withdraw the operation from where it is posted.
    pub fn take_target(&mut self) -> Option<Target> {
        self.target.take()
    }

    /// The dial has begun.
    pub fn dialing(&mut self, grip: Arc<ConnectionGrip>) {
        self.target = Some(Target::Connect(Some(grip)));
    }

    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome.clone()
    }

    /// Before the operation is posted: it will appear in its queue, if it has one, as `object`.
    pub fn keep(&mut self, py: Python<'_>, object: &Py<Operation>) {
        if let Some(queue) = &self.queue {
            self.slot = queue.keep(object.clone_ref(py));
        }
    }

    pub fn enlist(&mut self, waiter: &Arc<Waiter>) {
        self.waiters.push(waiter.clone());
    }

    pub fn dismiss(&mut self, waiter: &Arc<Waiter>) {
        self.waiters.retain(|w| !Arc::ptr_eq(w, waiter));
    }
}
