//! `Completions`, and the queue of finished operations behind it.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;
use pyo3::{PyTraverseError, PyVisit};

use crate::quic::driver::Waiter;
use crate::quic::endpoint::Endpoint;
use crate::quic::endpoint_shared::Guard;
use crate::quic::operation::{Operation, OperationState};
use crate::quic::wait::{Wait, WaitResult};
use crate::runtime::descriptors::Event;
use crate::runtime::errors::Failure;
use crate::runtime::process;

/// A finished operation.
pub struct Finished {
    pub op: Arc<OperationState>,
    pub object: Py<Operation>,
}

/// The queue owns the Python objects of pending and finished operations. Its `Completions` shows
/// them to the garbage collector, because the token of an operation may refer to the endpoint.
///
/// Its lock is taken after the endpoint's. Everything that makes a waiter's condition true happens
/// under both.
#[derive(Default)]
pub struct CompletionQueue {
    inner: Mutex<QueueState>,
}

#[derive(Default)]
struct QueueState {
    pending: Vec<Option<Py<Operation>>>,
    vacant: Vec<usize>,
    ready: Vec<Finished>,
    waiters: Vec<Arc<Waiter>>,
    kicked: bool,
    watched: Vec<(RawFd, i16)>,
    /// Readable while `ready` is not empty. Made by the first `fileno()`.
    event: Option<Event>,
    /// How often the spin budget is halved, because spinning did not pay lately.
    halvings: u32,
}

const MAX_HALVINGS: u32 = 4;

impl CompletionQueue {
    /// Stores the object of an operation that is about to be posted. Returns its slot.
    pub fn add_pending(&self, object: Py<Operation>) -> usize {
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

    /// Removes the object of an operation that could not be posted.
    pub fn remove_pending(&self, slot: usize) -> Option<Py<Operation>> {
        self.inner.lock().remove_pending(slot)
    }

    /// Under the endpoint's lock. A queue that was cleared ignores the operation.
    pub fn push(&self, op: Arc<OperationState>, slot: usize) {
        let mut inner = self.inner.lock();
        let Some(object) = inner.remove_pending(slot) else {
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

    /// Whether a wait should return. Changes nothing.
    pub fn ready(&self) -> bool {
        let inner = self.inner.lock();
        inner.kicked || !inner.ready.is_empty()
    }

    /// Takes all finished operations, and clears a kick.
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

    /// Under the endpoint's lock. Threads that sleep poll the new set.
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

    /// Whether `fileno()` is in use, so that the background thread must drive without delay.
    pub fn has_descriptor(&self) -> bool {
        self.inner.lock().event.is_some()
    }

    pub fn add_waiter(&self, waiter: &Arc<Waiter>) {
        self.inner.lock().waiters.push(waiter.clone());
    }

    pub fn remove_waiter(&self, waiter: &Arc<Waiter>) {
        let mut inner = self.inner.lock();
        inner.waiters.retain(|w| !Arc::ptr_eq(w, waiter));
    }

    /// How long to spin, of the time that the caller allows.
    pub fn spin_budget(&self, allowed: Duration) -> Duration {
        allowed / (1 << self.inner.lock().halvings)
    }

    /// Records whether spinning paid: whether the condition came true within the allowed time.
    pub fn record_spin(&self, paid: bool) {
        let mut inner = self.inner.lock();
        inner.halvings = match paid {
            true => 0,
            false => (inner.halvings + 1).min(MAX_HALVINGS),
        };
    }

    /// Drops all Python objects. GIL held, no lock of ours.
    pub fn clear(&self) {
        let mut inner = self.inner.lock();
        inner.vacant.clear();
        let pending = std::mem::take(&mut inner.pending);
        let ready = std::mem::take(&mut inner.ready);
        drop(inner);
        drop((pending, ready));
    }

    /// For the garbage collector. A queue that is locked is in use, so it is not garbage.
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

impl QueueState {
    fn remove_pending(&mut self, slot: usize) -> Option<Py<Operation>> {
        let object = self.pending.get_mut(slot)?.take()?;
        self.vacant.push(slot);
        Some(object)
    }

    /// Wakes all waiters: one alone might leave for another reason, and the others would miss the
    /// event.
    fn wake(&self) {
        for waiter in &self.waiters {
            waiter.wake();
        }
    }
}

#[pyclass(module = "nexar_native.quic", frozen)]
pub struct Completions {
    guard: Arc<Guard>,
    pub queue: Arc<CompletionQueue>,
}

type Results<'py> = (Bound<'py, PyList>, Vec<RawFd>);

impl Completions {
    fn collect<'py>(&self, py: Python<'py>, ready: Vec<RawFd>) -> PyResult<Results<'py>> {
        let list = PyList::empty(py);
        for Finished { op, object } in self.queue.take() {
            op.release_buffer(py);
            list.append(object)?;
        }
        Ok((list, ready))
    }
}

#[pymethods]
impl Completions {
    #[new]
    fn new(py: Python<'_>, endpoint: &Endpoint) -> PyResult<Self> {
        endpoint.guard.0.enter(py)?;
        Ok(Completions {
            guard: endpoint.guard.clone(),
            queue: Arc::new(CompletionQueue::default()),
        })
    }

    #[pyo3(signature = (timeout=None, *, spin=0.0))]
    fn wait<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
        spin: f64,
    ) -> PyResult<Results<'py>> {
        let shared = &self.guard.0;
        shared.enter(py)?;
        let wait = Wait {
            shared,
            condition: &*self.queue,
            deadline: deadline(timeout)?,
            spin: duration("spin", spin)?,
        };
        loop {
            if self.queue.ready() && self.queue.watched().is_empty() {
                return self.collect(py, Vec::new());
            }
            let result = process::detached(py, || wait.run());
            match result {
                Ok(WaitResult::Ready(descriptors)) => {
                    self.request_background(timeout);
                    return self.collect(py, descriptors);
                }
                Ok(WaitResult::TimedOut) => {
                    self.request_background(timeout);
                    return self.collect(py, Vec::new());
                }
                Ok(WaitResult::Signals) => py.check_signals()?,
                // Operations that failed because the endpoint was closed are still returned.
                Err(_) if self.queue.ready() => return self.collect(py, Vec::new()),
                Err(failure) => return Err(failure.into_py(py)),
            }
        }
    }

    #[pyo3(signature = (descriptor, *, readable=true, writable=false))]
    fn watch(
        &self,
        py: Python<'_>,
        descriptor: RawFd,
        readable: bool,
        writable: bool,
    ) -> PyResult<()> {
        if descriptor < 0 || !(readable || writable) {
            return Err(PyValueError::new_err(
                "watch: needs a descriptor, and readable or writable",
            ));
        }
        let events =
            if readable { libc::POLLIN } else { 0 } | if writable { libc::POLLOUT } else { 0 };
        let queue = &self.queue;
        self.guard.0.call(py, false, |_| {
            queue.watch(descriptor, events);
            Ok(())
        })
    }

    fn unwatch(&self, py: Python<'_>, descriptor: RawFd) -> PyResult<()> {
        let queue = &self.queue;
        self.guard.0.enter(py)?;
        let done = self.guard.0.call(py, false, |_| {
            queue.watch(descriptor, 0);
            Ok(())
        });
        // A closed endpoint watches nothing.
        done.or_else(|error| if self.closed() { Ok(()) } else { Err(error) })
    }

    fn kick(&self, py: Python<'_>) -> PyResult<()> {
        let queue = &self.queue;
        self.guard.0.enter(py)?;
        let done = self.guard.0.call(py, false, |_| {
            queue.kick();
            Ok(())
        });
        done.or_else(|error| if self.closed() { Ok(()) } else { Err(error) })
    }

    fn fileno(&self, py: Python<'_>) -> PyResult<RawFd> {
        let queue = &self.queue;
        self.guard.0.call(py, false, |state| {
            state.election.request_background();
            queue
                .descriptor()
                .map_err(|e| Failure::Os(e.raw_os_error().unwrap_or(0)))
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.queue.traverse(&visit)
    }

    fn __clear__(&self) {
        if !self.guard.0.made_in_parent() {
            self.queue.clear();
        }
    }
}

impl Completions {
    fn closed(&self) -> bool {
        self.guard.0.state.lock().closed.is_some()
    }

    /// After a non-blocking wait by a caller that polls `fileno()`: no thread waits now, so the
    /// background thread must drive at once.
    fn request_background(&self, timeout: Option<f64>) {
        if timeout == Some(0.0) && self.queue.has_descriptor() {
            self.guard.0.state.lock().election.request_background();
        }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        if self.guard.0.made_in_parent() {
            std::mem::forget(self.queue.clone()); // never freed: its memory may be inconsistent here
            return;
        }
        // Only Python drops it: the GIL is held.
        self.queue.clear();
    }
}

/// None: no limit.
pub fn deadline(timeout: Option<f64>) -> PyResult<Option<Instant>> {
    match timeout {
        None => Ok(None),
        Some(t) => Ok(Some(Instant::now() + duration("timeout", t)?)),
    }
}

fn duration(name: &str, seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() {
        return Err(PyValueError::new_err(format!("{name}: not a number")));
    }
    // Three years stand for no limit; an Instant cannot hold much more.
    Ok(Duration::from_secs_f64(seconds.clamp(0.0, 1e8)))
}
