//! `Completions`: a queue of finished operations.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;
use pyo3::{PyTraverseError, PyVisit};

use crate::endpoint::Endpoint;
use crate::errors::Failure;
use crate::exit;
use crate::queue::{Finished, Queue};
use crate::shared::Guard;
use crate::wait::{Ended, Vigil};

#[pyclass(module = "nexar_quic", frozen)]
pub struct Completions {
    guard: Arc<Guard>,
    pub queue: Arc<Queue>,
}

type Results<'py> = (Bound<'py, PyList>, Vec<RawFd>);

impl Completions {
    fn collect<'py>(&self, py: Python<'py>, ready: Vec<RawFd>) -> PyResult<Results<'py>> {
        let list = PyList::empty(py);
        for Finished { op, object } in self.queue.take() {
            op.settle(py);
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
            queue: Arc::new(Queue::default()),
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
        let vigil = Vigil {
            shared,
            wanted: &*self.queue,
            deadline: deadline(timeout)?,
            spin: span("spin", spin)?,
        };
        loop {
            if self.queue.ready() && self.queue.watched().is_empty() {
                return self.collect(py, Vec::new());
            }
            let ended = exit::detached(py, || vigil.keep());
            match ended {
                Ok(Ended::Ready(descriptors)) => {
                    self.summon(timeout);
                    return self.collect(py, descriptors);
                }
                Ok(Ended::TimedOut) => {
                    self.summon(timeout);
                    return self.collect(py, Vec::new());
                }
                Ok(Ended::Signals) => py.check_signals()?,
                // What failed because of the closing is still handed out.
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
            state.crew.call_background();
            queue
                .descriptor()
                .map_err(|e| Failure::Os(e.raw_os_error().unwrap_or(0)))
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.queue.traverse(&visit)
    }

    fn __clear__(&self) {
        if !self.guard.0.foreign() {
            self.queue.clear();
        }
    }
}

impl Completions {
    fn closed(&self) -> bool {
        self.guard.0.state.lock().closed.is_some()
    }

    /// After a non-blocking look by someone who polls `fileno()`: nobody waits now, so the
    /// background thread must not linger.
    fn summon(&self, timeout: Option<f64>) {
        if timeout == Some(0.0) && self.queue.armed() {
            self.guard.0.state.lock().crew.call_background();
        }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        if self.guard.0.foreign() {
            std::mem::forget(self.queue.clone()); // never freed, hence never looked at
            return;
        }
        // Only Python drops it: the GIL is held.
        self.queue.clear();
    }
}

/// None waits for ever.
pub fn deadline(timeout: Option<f64>) -> PyResult<Option<Instant>> {
    match timeout {
        None => Ok(None),
        Some(t) => Ok(Some(Instant::now() + span("timeout", t)?)),
    }
}

fn span(name: &str, seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() {
        return Err(PyValueError::new_err(format!("{name}: not a number")));
    }
    // About three years stand for ever; an Instant cannot hold much more.
    Ok(Duration::from_secs_f64(seconds.clamp(0.0, 1e8)))
}
