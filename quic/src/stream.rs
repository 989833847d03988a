//! `Stream`: as Python sees it.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use quinn_proto::VarInt;

use crate::buffer::Borrowed;
use crate::completions::Completions;
use crate::connection::{session, Connection};
use crate::errors::Failure;
use crate::grip::StreamGrip;
use crate::op::{Op, Target};
use crate::operation::Operation;
use crate::session::Session;
use crate::shared::Guard;

/// Above this the GIL is let go for the copy and the encryption.
const LARGE_BYTES: usize = 32 << 10;

#[pyclass(module = "nexar_quic", frozen)]
pub struct Stream {
    guard: Arc<Guard>,
    grip: Option<Arc<StreamGrip>>,
}

impl Stream {
    pub fn new(guard: Arc<Guard>, grip: Arc<StreamGrip>) -> Self {
        Stream {
            guard,
            grip: Some(grip),
        }
    }

    fn grip(&self) -> &Arc<StreamGrip> {
        self.grip.as_ref().expect("taken only by drop")
    }

    fn call<R: Send>(
        &self,
        py: Python<'_>,
        large: bool,
        work: impl FnOnce(&mut Session) -> Result<R, Failure> + Send,
    ) -> PyResult<R> {
        let grip = self.grip();
        self.guard
            .0
            .call(py, large, |state| work(session(state, &grip.connection)?))
    }

    fn post(
        &self,
        py: Python<'_>,
        op: Op,
        token: Option<Py<PyAny>>,
        large: bool,
        place: impl FnOnce(&mut Session, &Arc<Op>) -> Result<(), Failure> + Send,
    ) -> PyResult<Py<Operation>> {
        let grip = self.grip();
        Operation::post(py, &self.guard.0, op, token, large, |state, op| {
            place(session(state, &grip.connection)?, op)
        })
    }
}

#[pymethods]
impl Stream {
    #[getter]
    fn id(&self) -> u64 {
        VarInt::from(self.grip().id).into_inner()
    }

    #[getter]
    fn connection(&self) -> Connection {
        Connection::of(&self.guard, self.grip())
    }

    #[getter]
    fn priority(&self, py: Python<'_>) -> PyResult<i32> {
        let id = self.grip().id;
        self.call(py, false, |session| Ok(session.channel(id)?.priority))
    }

    #[setter]
    fn set_priority(&self, py: Python<'_>, priority: i32) -> PyResult<()> {
        let id = self.grip().id;
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
        let id = self.grip().id;
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
        let id = self.grip().id;
        self.call(py, false, |session| {
            Ok(session.channel(id).map_or(0, |channel| channel.queued))
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
        let grip = self.grip().clone();
        let id = grip.id;
        let queue = completions.map(|c| c.queue.clone());
        let op = Op::moving(Target::Write(grip), queue, Some(buffer), 0);
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
        let grip = self.grip().clone();
        let id = grip.id;
        let queue = completions.map(|c| c.queue.clone());
        let op = Op::moving(Target::Read(grip), queue, Some(buffer), minimum);
        self.post(py, op, token, false, |session, op| {
            session.post_read(id, op)
        })
    }

    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let id = self.grip().id;
        self.call(py, false, |session| session.finish(id))
    }

    #[pyo3(signature = (completions=None, *, token=None))]
    fn post_finished(
        &self,
        py: Python<'_>,
        completions: Option<&Completions>,
        token: Option<Py<PyAny>>,
    ) -> PyResult<Py<Operation>> {
        let grip = self.grip().clone();
        let id = grip.id;
        let op = Op::new(Target::Finished(grip), completions.map(|c| c.queue.clone()));
        self.post(py, op, token, false, |session, op| {
            session.post_finished(id, op)
        })
    }

    #[pyo3(signature = (code=0))]
    fn reset(&self, py: Python<'_>, code: u32) -> PyResult<()> {
        let id = self.grip().id;
        self.call(py, false, |session| {
            session.reset(id, VarInt::from_u32(code))
        })
    }

    #[pyo3(signature = (code=0))]
    fn stop(&self, py: Python<'_>, code: u32) -> PyResult<()> {
        let id = self.grip().id;
        self.call(py, false, |session| {
            session.stop(id, VarInt::from_u32(code))
        })
    }

    fn __repr__(&self) -> String {
        format!("<nexar_quic.Stream {}>", self.grip().id)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        drop(self.grip.take());
        self.guard.0.tidy();
    }
}
