//! The Python class `Endpoint`: one UDP socket that dials and listens.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::{PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use quinn_proto::EndpointConfig;

use crate::quic::completions::{deadline, Completions};
use crate::quic::connection_config::{ConnectionConfig, Dial};
use crate::quic::driver::DriverElection;
use crate::quic::endpoint_shared::{EndpointCore, Guard, Shared};
use crate::quic::operation::{Operation, OperationState, Target, Value};
use crate::quic::settings::{within, Settings};
use crate::quic::socket::Socket;
use crate::quic::state::State;
use crate::quic::wait::{AnyOperation, Wait, WaitResult};
use crate::quic::{background, socket};
use crate::runtime::errors::{os_error, Failure};
use crate::runtime::{decref, process};
use crate::tls::identity::Credentials;
use crate::tls::trust::Trust;

#[pyclass(module = "nexar_native.quic", frozen)]
pub struct Endpoint {
    pub guard: Arc<Guard>,
}

type Address = (String, u16);

#[pymethods]
impl Endpoint {
    #[new]
    #[pyo3(signature = (address, credentials, trust, settings=None))]
    fn new(
        py: Python<'_>,
        address: Address,
        credentials: Option<&Credentials>,
        trust: &Trust,
        settings: Option<&Settings>,
    ) -> PyResult<Self> {
        if process::exiting() {
            let reason = "the interpreter exits".to_owned();
            return Err(Failure::Closed { reason }.into_py(py));
        }
        let address = socket::parse_address(&address)?;
        let settings = settings.cloned().unwrap_or_default();
        let connection_config =
            ConnectionConfig::new(&settings, credentials.cloned(), trust.rules.clone())
                .map_err(|failure| failure.into_py(py))?;
        let (socket, bound) =
            Socket::bind(address, settings.socket_buffer_bytes).map_err(os_error)?;
        let mut config = EndpointConfig::default();
        config
            .max_udp_payload_size(settings.largest_mtu())
            .map_err(|e| PyValueError::new_err(e.to_string()))?;
        let endpoint = quinn_proto::Endpoint::new(
            Arc::new(config),
            connection_config.server(false),
            !socket.may_fragment(),
            None,
        );
        let core = EndpointCore::new(endpoint, socket, settings);
        let state = State::new(
            connection_config,
            core,
            DriverElection::new().map_err(os_error)?,
        );
        let (shared, guard) = Shared::new(state, bound);
        shared.set_background(background::start(shared.clone()).map_err(os_error)?);
        process::register_for_exit(&shared);
        Ok(Endpoint { guard })
    }

    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<Address> {
        self.guard.0.enter(py)?;
        Ok(socket::address_to_python(self.guard.0.address))
    }

    fn replace_credentials(
        &self,
        py: Python<'_>,
        credentials: &Credentials,
        trust: &Trust,
    ) -> PyResult<()> {
        let (credentials, rules) = (credentials.clone(), trust.rules.clone());
        self.guard.0.call(py, false, |state| {
            state.connection_config.replace(Some(credentials), rules)?;
            let server = state.connection_config.server(false);
            state.core.endpoint.set_server_config(server);
            Ok(())
        })
    }

    fn set_max_handshakes(&self, py: Python<'_>, count: i64) -> PyResult<()> {
        let limit = within("count", count, 1, 1 << 24)? as usize;
        self.guard.0.call(py, false, |state| {
            state.core.handshakes.limit = limit;
            state.core.budget.resize(limit);
            Ok(())
        })
    }

    #[pyo3(signature = (address, server_name, completions=None, *, trust=None, verify=true,
        anonymous=false, token=None))]
    #[allow(clippy::too_many_arguments)]
    fn post_connect(
        &self,
        py: Python<'_>,
        address: Address,
        server_name: &str,
        completions: Option<&Completions>,
        trust: Option<&Trust>,
        verify: bool,
        anonymous: bool,
        token: Option<Py<PyAny>>,
    ) -> PyResult<Py<Operation>> {
        let dial = Dial {
            rules: trust.map(|t| t.rules.clone()),
            verify,
            anonymous,
            timed: false,
        };
        self.dial(py, address, server_name, dial, completions, token)
    }

    #[pyo3(signature = (completions=None, *, token=None))]
    fn post_accept(
        &self,
        py: Python<'_>,
        completions: Option<&Completions>,
        token: Option<Py<PyAny>>,
    ) -> PyResult<Py<Operation>> {
        let shared = &self.guard.0;
        let op = OperationState::new(Target::Accept, completions.map(|c| c.queue.clone()));
        Operation::post(py, shared, op, token, false, |state, op| {
            match state.core.accept_queue.pop_front() {
                Some(handle) => op.complete(Ok(Value::Connection(handle))),
                None => state.core.pending_accepts.push_back(op.clone()),
            }
            Ok(())
        })
    }

    fn refusals(&self, py: Python<'_>) -> PyResult<Vec<(Address, String)>> {
        let refusals = self.guard.0.call(py, false, |state| {
            Ok(std::mem::take(&mut state.core.refusals))
        })?;
        Ok(refusals
            .into_iter()
            .map(|(address, reason)| (socket::address_to_python(address), reason))
            .collect())
    }

    fn stats(&self, py: Python<'_>) -> PyResult<HashMap<&'static str, u64>> {
        self.guard.0.call(py, false, |state| Ok(stats(state)))
    }

    #[pyo3(signature = (operations, timeout=None, *, descriptors=Vec::new()),
        text_signature = "($self, operations, timeout=None, *, descriptors=())")]
    fn wait(
        &self,
        py: Python<'_>,
        operations: Vec<Py<Operation>>,
        timeout: Option<f64>,
        descriptors: Vec<RawFd>,
    ) -> PyResult<(Vec<Py<Operation>>, Vec<RawFd>)> {
        let ops = operations.iter().map(|o| o.get().op.clone()).collect();
        let condition = AnyOperation {
            ops,
            descriptors: descriptors.iter().map(|&fd| (fd, libc::POLLIN)).collect(),
        };
        let ready = self.wait_for(py, &condition, timeout)?;
        let mut done = Vec::new();
        for operation in operations {
            if operation.get().op.done() {
                operation.get().op.release_buffer(py);
                done.push(operation);
            }
        }
        Ok((done, ready))
    }

    #[pyo3(signature = (address, server_name, timeout=None, *, trust=None, verify=true,
        anonymous=false))]
    #[allow(clippy::too_many_arguments)]
    fn connect(
        &self,
        py: Python<'_>,
        address: Address,
        server_name: &str,
        timeout: Option<f64>,
        trust: Option<&Trust>,
        verify: bool,
        anonymous: bool,
    ) -> PyResult<Py<PyAny>> {
        let dial = Dial {
            rules: trust.map(|t| t.rules.clone()),
            verify,
            anonymous,
            timed: timeout.is_some(),
        };
        let dialing = self.dial(py, address, server_name, dial, None, None)?;
        self.wait_result(py, dialing, timeout, "connect")
    }

    #[pyo3(signature = (timeout=None))]
    fn accept(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        let accepting = self.post_accept(py, None, None)?;
        self.wait_result(py, accepting, timeout, "accept")
    }

    #[pyo3(signature = (code=0, reason=""))]
    fn close(&self, py: Python<'_>, code: u32, reason: &str) -> PyResult<()> {
        let shared = &self.guard.0;
        shared.enter(py)?;
        process::detached(py, || shared.close(code, reason));
        decref::release_deferred(py);
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exc))]
    fn __exit__(&self, py: Python<'_>, _exc: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.close(py, 0, "")
    }

    fn __repr__(&self) -> String {
        format!("<nexar_native.quic.Endpoint {}>", self.guard.0.address)
    }

    /// For tests: the next round panics.
    fn _panic_in_next_round(&self, py: Python<'_>) -> PyResult<()> {
        self.guard.0.call(py, false, |state| {
            state.panic_wanted = true;
            state.election.request_background();
            state.election.wake_all();
            Ok(())
        })
    }
}

impl Endpoint {
    fn dial(
        &self,
        py: Python<'_>,
        address: Address,
        server_name: &str,
        dial: Dial,
        completions: Option<&Completions>,
        token: Option<Py<PyAny>>,
    ) -> PyResult<Py<Operation>> {
        let remote = socket::parse_address(&address)?;
        let queue = completions.map(|c| c.queue.clone());
        let op = OperationState::new(Target::Connect(None), queue);
        Operation::post(py, &self.guard.0, op, token, false, |state, op| {
            state.dial(remote, server_name, &dial, op)
        })
    }

    /// Waits until the condition is true or a descriptor is ready, and returns the ready
    /// descriptors. Returns at the timeout too.
    fn wait_for(
        &self,
        py: Python<'_>,
        condition: &AnyOperation,
        timeout: Option<f64>,
    ) -> PyResult<Vec<RawFd>> {
        let shared = &self.guard.0;
        shared.enter(py)?;
        let wait = Wait {
            shared,
            condition,
            deadline: deadline(timeout)?,
            spin: Duration::ZERO,
        };
        loop {
            let result = process::detached(py, || wait.run());
            match result {
                Ok(WaitResult::Ready(descriptors)) => return Ok(descriptors),
                Ok(WaitResult::TimedOut) => return Ok(Vec::new()),
                Ok(WaitResult::Signals) => py.check_signals()?,
                Err(_) if condition.ops.iter().any(|op| op.done()) => return Ok(Vec::new()),
                Err(failure) => return Err(failure.into_py(py)),
            }
        }
    }

    /// Waits for one operation and returns its result. In all other cases the operation is
    /// cancelled.
    fn wait_result(
        &self,
        py: Python<'_>,
        operation: Py<Operation>,
        timeout: Option<f64>,
        what: &str,
    ) -> PyResult<Py<PyAny>> {
        let operation = operation.get();
        let condition = AnyOperation {
            ops: vec![operation.op.clone()],
            descriptors: Vec::new(),
        };
        let waited = self.wait_for(py, &condition, timeout);
        if !operation.op.done() {
            self.guard.0.cancel(py, &operation.op)?;
            waited?;
            let limit = timeout.unwrap_or_default();
            return Err(PyTimeoutError::new_err(format!(
                "{what}: nothing within {limit} s"
            )));
        }
        waited?;
        operation.result(py)
    }
}

fn stats(state: &State) -> HashMap<&'static str, u64> {
    let counters = &state.core.counters;
    HashMap::from([
        ("connections", state.core.live as u64),
        ("handshakes", state.core.half_open as u64),
        ("inbound_handshakes", state.core.handshakes.len() as u64),
        ("datagrams_sent", counters.datagrams_sent),
        ("datagrams_received", counters.datagrams_received),
        ("bytes_sent", counters.bytes_sent),
        ("bytes_received", counters.bytes_received),
        ("refused", counters.refused),
        ("retried", counters.retried),
        ("ignored", counters.ignored),
        ("waiting", state.election.waiting as u64),
        ("rounds", counters.rounds),
        ("background_rounds", counters.background_rounds),
    ])
}
