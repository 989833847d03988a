//! A posted operation: the state that the driver completes, and the Python class `Operation`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};
use quinn_proto::Dir;

use crate::quic::completions::CompletionQueue;
use crate::quic::connection::Connection;
use crate::quic::driver::Waiter;
use crate::quic::endpoint_shared::Shared;
use crate::quic::handles::{ConnectionHandle, StreamHandle};
use crate::quic::state::State;
use crate::quic::stream::Stream;
use crate::runtime::buffer::Borrowed;
use crate::runtime::errors::Failure;

/// The object of an operation: where it is stored while it is pending.
pub enum Target {
    /// The connection is created when the operation is posted.
    Connect(Option<Arc<ConnectionHandle>>),
    Accept,
    Open(Arc<ConnectionHandle>, Dir),
    AcceptStream(Arc<ConnectionHandle>, Dir),
    Closed(Arc<ConnectionHandle>),
    Read(Arc<StreamHandle>),
    Write(Arc<StreamHandle>),
    Finished(Arc<StreamHandle>),
}

/// The result of an operation.
#[derive(Clone)]
pub enum Value {
    Nothing,
    Count(usize),
    Connection(Arc<ConnectionHandle>),
    Stream(Arc<StreamHandle>),
}

pub type Outcome = Result<Value, Failure>;

/// Shared by the driver, which completes it, and its Python `Operation`.
pub struct OperationState {
    done: AtomicBool,
    cell: Mutex<Cell>,
}

/// The mutable part. Its lock is taken after the endpoint's and held only to copy. Once `outcome`
/// is set, only a thread with the GIL touches the buffer, and only to release it.
pub struct Cell {
    /// None once done, so that a finished operation keeps no handle.
    target: Option<Target>,
    pub buffer: Option<Borrowed>,
    /// Bytes moved so far.
    pub moved: usize,
    /// A read is done when this many bytes have arrived.
    pub minimum: usize,
    outcome: Option<Outcome>,
    queue: Option<Arc<CompletionQueue>>,
    /// Slot of the Python object in the queue.
    slot: usize,
    waiters: Vec<Arc<Waiter>>,
}

impl OperationState {
    pub fn new(target: Target, queue: Option<Arc<CompletionQueue>>) -> Self {
        Self::with_buffer(target, queue, None, 0)
    }

    pub fn with_buffer(
        target: Target,
        queue: Option<Arc<CompletionQueue>>,
        buffer: Option<Borrowed>,
        minimum: usize,
    ) -> Self {
        OperationState {
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

    /// Sets the outcome, under the endpoint's lock, and wakes the waiters. The first outcome stays.
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

    /// Releases the buffer if the operation is done. GIL held, no lock of ours.
    pub fn release_buffer(&self, py: Python<'_>) {
        if !self.done() {
            return;
        }
        let buffer = self.cell.lock().buffer.take();
        if let Some(buffer) = buffer {
            buffer.release(py);
        }
    }

    /// Undoes the preparation of an operation that could not be posted. GIL held, no lock of ours.
    pub fn unpost(&self, py: Python<'_>) {
        let mut cell = self.cell.lock();
        let (buffer, queue, slot) = (cell.buffer.take(), cell.queue.take(), cell.slot);
        drop(cell);
        if let Some(buffer) = buffer {
            buffer.release(py);
        }
        drop(queue.and_then(|queue| queue.remove_pending(slot)));
    }
}

impl Cell {
    /// Takes the target, to remove the operation from where it is posted.
    pub fn take_target(&mut self) -> Option<Target> {
        self.target.take()
    }

    /// The dial has started.
    pub fn set_connecting(&mut self, handle: Arc<ConnectionHandle>) {
        self.target = Some(Target::Connect(Some(handle)));
    }

    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome.clone()
    }

    /// Before the operation is posted: stores its Python object in its queue, if it has one.
    pub fn register(&mut self, py: Python<'_>, object: &Py<Operation>) {
        if let Some(queue) = &self.queue {
            self.slot = queue.add_pending(object.clone_ref(py));
        }
    }

    pub fn add_waiter(&mut self, waiter: &Arc<Waiter>) {
        self.waiters.push(waiter.clone());
    }

    pub fn remove_waiter(&mut self, waiter: &Arc<Waiter>) {
        self.waiters.retain(|w| !Arc::ptr_eq(w, waiter));
    }
}

#[pyclass(module = "nexar_native.quic", frozen)]
pub struct Operation {
    pub shared: Arc<Shared>,
    pub op: Arc<OperationState>,
    token: Mutex<Option<Py<PyAny>>>,
    /// The result as a Python object, so that each call returns the same one.
    value: Mutex<Option<Py<PyAny>>>,
}

impl Operation {
    /// Posts `op` by passing it to `place` under the lock. The Python object is made before that,
    /// because the operation may be done before `place` returns. If `place` fails, the operation
    /// was not posted.
    pub fn post(
        py: Python<'_>,
        shared: &Arc<Shared>,
        op: OperationState,
        token: Option<Py<PyAny>>,
        large: bool,
        place: impl FnOnce(&mut State, &Arc<OperationState>) -> Result<(), Failure> + Send,
    ) -> PyResult<Py<Operation>> {
        let op = Arc::new(op);
        let object = Self::make(py, shared, op.clone(), token)?;
        let posted = shared.call(py, large, |state| place(state, &op));
        if posted.is_err() {
            op.unpost(py);
        }
        posted.map(|()| object)
    }

    /// Makes the Python object of `op`. The queue, if there is one, keeps it alive.
    fn make(
        py: Python<'_>,
        shared: &Arc<Shared>,
        op: Arc<OperationState>,
        token: Option<Py<PyAny>>,
    ) -> PyResult<Py<Operation>> {
        let object = Py::new(
            py,
            Operation {
                shared: shared.clone(),
                op: op.clone(),
                token: Mutex::new(token),
                value: Mutex::new(None),
            },
        )?;
        op.cell().register(py, &object);
        Ok(object)
    }

    fn object(&self, py: Python<'_>, value: Value) -> PyResult<Py<PyAny>> {
        match value {
            Value::Nothing => Ok(py.None()),
            Value::Count(count) => Ok(count.into_pyobject(py)?.into_any().unbind()),
            Value::Connection(handle) => {
                Ok(Py::new(py, Connection::new(self.shared.guard(py)?, handle))?.into_any())
            }
            Value::Stream(handle) => {
                Ok(Py::new(py, Stream::new(self.shared.guard(py)?, handle))?.into_any())
            }
        }
    }

    /// The Python object of `outcome`, made once.
    fn value_object(&self, py: Python<'_>, outcome: Outcome) -> PyResult<Py<PyAny>> {
        let value = outcome.map_err(|failure| failure.into_py(py))?;
        if let Some(known) = &*self.value.lock() {
            return Ok(known.clone_ref(py));
        }
        let object = self.object(py, value)?;
        *self.value.lock() = Some(object.clone_ref(py));
        Ok(object)
    }
}

#[pymethods]
impl Operation {
    #[getter]
    fn token(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.token.lock().as_ref().map(|token| token.clone_ref(py))
    }

    #[setter]
    fn set_token(&self, token: Option<Py<PyAny>>) {
        let old = std::mem::replace(&mut *self.token.lock(), token);
        drop(old);
    }

    #[getter]
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        self.shared.enter(py)?;
        self.op.release_buffer(py);
        Ok(self.op.done())
    }

    #[getter]
    fn transferred(&self, py: Python<'_>) -> PyResult<usize> {
        self.shared.enter(py)?;
        Ok(self.op.cell().moved)
    }

    pub fn result(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.shared.enter(py)?;
        self.op.release_buffer(py);
        let outcome = self.op.cell().outcome();
        match outcome {
            Some(outcome) => self.value_object(py, outcome),
            None => Err(PyRuntimeError::new_err("the operation is not done")),
        }
    }

    fn cancel(&self, py: Python<'_>) -> PyResult<bool> {
        self.shared.enter(py)?;
        let cancelled = !self.op.done() && self.shared.cancel(py, &self.op)?;
        self.op.release_buffer(py);
        Ok(cancelled)
    }

    fn __repr__(&self) -> String {
        let state = if self.op.done() { "done" } else { "pending" };
        format!("<nexar_native.quic.Operation {state}>")
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for slot in [&self.token, &self.value] {
            if let Some(slot) = slot.try_lock() {
                if let Some(object) = &*slot {
                    visit.call(object)?;
                }
            }
        }
        Ok(())
    }

    fn __clear__(&self) {
        let token = self.token.lock().take();
        let value = self.value.lock().take();
        drop((token, value));
    }
}
