//! The Python class `Stream`.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use quinn_proto::VarInt;

use crate::quic::completions::Completions;
use crate::quic::connection::{session, Connection};
use crate::quic::endpoint_shared::Guard;
use crate::quic::handles::StreamHandle;
use crate::quic::operation::{Operation, OperationState, Target};
use crate::quic::session::Session;
use crate::runtime::buffer::Borrowed;
use crate::runtime::errors::Failure;

/// Above this size the GIL is released while the data is copied and encrypted.
const LARGE_BYTES: usize = 32 << 10;

#[pyclass(module = "nexar_native.quic", frozen)]
pub struct Stream {
    guard: Arc<Guard>,
    handle: Option<Arc<StreamHandle>>,
}

impl Stream {
    pub fn new(guard: Arc<Guard>, handle: Arc<StreamHandle>) -> Self {
        Stream {
            guard,
            handle: Some(handle),
        }
    }

    fn handle(&self) -> &Arc<StreamHandle> {
        self.handle.as_ref().expect("taken only by drop")
    }

    fn call<R: Send>(
        &self,
        py: Python<'_>,
        large: bool,
        work: impl FnOnce(&mut Session) -> Result<R, Failure> + Send,
    ) -> PyResult<R> {
        let handle = self.handle();
        self.guard
            .0
            .call(py, large, |state| work(session(state, &handle.connection)?))
    }

    fn post(
        &self,
        py: Python<'_>,
        op: OperationState,
        token: Option<Py<PyAny>>,
        large: bool,
        place: impl FnOnce(&mut Session, &Arc<OperationState>) -> Result<(), Failure> + Send,
    ) -> PyResult<Py<Operation>> {
        let handle = self.handle();
        Operation::post(py, &self.guard.0, op, token, large, |state, op| {
            place(session(state, &handle.connection)?, op)
        })
    }
}

#[pymethods]
impl Stream {
    #[getter]
    fn id(&self) -> u64 {
        VarInt::from(self.handle().id).into_inner()
    }

    #[getter]
    fn connection(&self) -> Connection {
        Connection::of(&self.guard, self.handle())
    }

    #[getter]
    fn priority(&self, py: Python<'_>) -> PyResult<i32> {
        let id = self.handle().id;
        self.call(py, false, |session| Ok(session.stream(id)?.priority))
    }

    #[setter]
    fn set_priority(&self, py: Python<'_>, priority: i32) -> PyResult<()> {
        let id = self.handle().id;
        self.call(py, false, |session| session.prioritise(id, priority))
    }

    #[pyo3(signature = (*buffers))]
    fn write(&self, py: Python<'_>, buffers: &Bound<'_, PyTuple>) -> PyResult<()> {
        let held = buffers
            .iter()
            .map(|buffer| Borrowed::readable(&buffer))
            .collect::<PyResult<Vec<_>>>()?;
        let slices: Vec<&[u8]> = held.iter().map(|buffer| buffer.bytes()).collect();
        let total: usize = slices.iter().map(|slice| slice.len()).sum();
        let id = self.handle().id;
        let written = self.call(py, total > LARGE_BYTES, |session| {
            session.write(id, &slices)
        });
        drop(slices);
        for buffer in held {
            buffer.release(py);
        }
        written
    }

    #[getter]
    fn queued_bytes(&self, py: Python<'_>) -> PyResult<usize> {
        let id = self.handle().id;
        self.call(py, false, |session| {
            Ok(session.stream(id).map_or(0, |stream| stream.queued))
        })
    }

    #[pyo3(signature = (buffer, completions=None, *, token=None))]
    fn post_write(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        completions: Option<&Completions>,
        token: Option<Py<PyAny>>,
    ) -> PyResult<Py<Operation>> {
        let buffer = Borrowed::readable(buffer)?;
        let large = buffer.len() > LARGE_BYTES;
        let handle = self.handle().clone();
        let id = handle.id;
        let queue = completions.map(|c| c.queue.clone());
        let op = OperationState::with_buffer(Target::Write(handle), queue, Some(buffer), 0);
        self.post(py, op, token, large, |session, op| {
            session.post_write(id, op)
        })
    }

    #[pyo3(signature = (buffer, completions=None, *, minimum=None, token=None))]
    fn post_read(
        &self,
        py: Python<'_>,
        buffer: &Bound<'_, PyAny>,
        completions: Option<&Completions>,
        minimum: Option<usize>,
        token: Option<Py<PyAny>>,
    ) -> PyResult<Py<Operation>> {
        let buffer = Borrowed::writable(buffer)?;
        let minimum = minimum.unwrap_or(buffer.len());
        if minimum > buffer.len() {
            buffer.release(py);
            return Err(PyValueError::new_err("minimum: above the buffer's size"));
        }
        let handle = self.handle().clone();
        let id = handle.id;
        let queue = completions.map(|c| c.queue.clone());
        let op = OperationState::with_buffer(Target::Read(handle), queue, Some(buffer), minimum);
        self.post(py, op, token, false, |session, op| {
            session.post_read(id, op)
        })
    }

    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let id = self.handle().id;
        self.call(py, false, |session| session.finish(id))
    }

    #[pyo3(signature = (completions=None, *, token=None))]
    fn post_finished(
        &self,
        py: Python<'_>,
        completions: Option<&Completions>,
        token: Option<Py<PyAny>>,
    ) -> PyResult<Py<Operation>> {
        let handle = self.handle().clone();
        let id = handle.id;
        let op = OperationState::new(
            Target::Finished(handle),
            completions.map(|c| c.queue.clone()),
        );
        self.post(py, op, token, false, |session, op| {
            session.post_finished(id, op)
        })
    }

    #[pyo3(signature = (code=0))]
    fn reset(&self, py: Python<'_>, code: u32) -> PyResult<()> {
        let id = self.handle().id;
        self.call(py, false, |session| {
            session.reset(id, VarInt::from_u32(code))
        })
    }

    #[pyo3(signature = (code=0))]
    fn stop(&self, py: Python<'_>, code: u32) -> PyResult<()> {
        let id = self.handle().id;
        self.call(py, false, |session| {
            session.stop(id, VarInt::from_u32(code))
        })
    }

    fn __repr__(&self) -> String {
        format!("<nexar_native.quic.Stream {}>", self.handle().id)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        drop(self.handle.take());
        self.guard.0.process_dropped();
    }
}
