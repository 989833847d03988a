//! `Operation`: a posted operation, as Python sees it.

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use crate::connection::Connection;
use crate::errors::Failure;
use crate::op::{Op, Outcome, Value};
use crate::shared::Shared;
use crate::state::State;
use crate::stream::Stream;

#[pyclass(module = "nexar_quic", frozen)]
pub struct Operation {
    pub shared: Arc<Shared>,
    pub op: Arc<Op>,
    token: Mutex<Option<Py<PyAny>>>,
    /// The result as a Python object, so that asking twice gives the same one.
    value: Mutex<Option<Py<PyAny>>>,
}

impl Operation {
    /// Post `op` by handing it to `place` under the lock. Its Python object is made before, for it
    /// may be done before `place` returns; if `place` fails it was never posted.
    pub fn post(
        py: Python<'_>,
        shared: &Arc<Shared>,
        op: Op,
        token: Option<Py<PyAny>>,
        large: bool,
        place: impl FnOnce(&mut State, &Arc<Op>) -> Result<(), Failure> + Send,
    ) -> PyResult<Py<Operation>> {
        let op = Arc::new(op);
        let object = Self::make(py, shared, op.clone(), token)?;
        let posted = shared.call(py, large, |state| place(state, &op));
        if posted.is_err() {
            op.unpost(py);
        }
        posted.map(|()| object)
    }

    /// The Python side of `op`. If it goes to a queue, the operation keeps this object alive.
    fn make(
        py: Python<'_>,
        shared: &Arc<Shared>,
        op: Arc<Op>,
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
        op.cell().keep(py, &object);
        Ok(object)
    }

    fn object(&self, py: Python<'_>, value: Value) -> PyResult<Py<PyAny>> {
        match value {
            Value::Nothing => Ok(py.None()),
            Value::Count(count) => Ok(count.into_pyobject(py)?.into_any().unbind()),
            Value::Connection(grip) => {
                Ok(Py::new(py, Connection::new(self.shared.guard(py)?, grip))?.into_any())
            }
            Value::Stream(grip) => {
                Ok(Py::new(py, Stream::new(self.shared.guard(py)?, grip))?.into_any())
            }
        }
    }

    /// The object for `outcome`, made once.
    fn present(&self, py: Python<'_>, outcome: Outcome) -> PyResult<Py<PyAny>> {
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
        self.op.settle(py);
        Ok(self.op.done())
    }

    #[getter]
    fn transferred(&self, py: Python<'_>) -> PyResult<usize> {
        self.shared.enter(py)?;
        Ok(self.op.cell().moved)
    }

    pub fn result(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.shared.enter(py)?;
        self.op.settle(py);
        let outcome = self.op.cell().outcome();
        match outcome {
            Some(outcome) => self.present(py, outcome),
            None => Err(PyRuntimeError::new_err("the operation is not done")),
        }
    }

    fn cancel(&self, py: Python<'_>) -> PyResult<bool> {
        self.shared.enter(py)?;
        let cancelled = !self.op.done() && self.shared.cancel(py, &self.op)?;
        self.op.settle(py);
        Ok(cancelled)
    }

    fn __repr__(&self) -> String {
        let state = if self.op.done() { "done" } else { "pending" };
        format!("<nexar_quic.Operation {state}>")
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
