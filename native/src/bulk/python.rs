//! The Python classes `Endpoint` and `Channel`, and the module `nexar_native.bulk`.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use rustls::pki_types::ServerName;

use super::channel::{Core, Redirected};
use super::config::Identity;
use super::connection::Connection;
use super::dial::{dial, Plan};
use super::frame::{CHUNK_BYTES, MAX_CONNECTIONS, MAX_HELLO_BYTES, PREAMBLE};
use super::memory::{Reduction, Region};
use super::shared::{closed, Event, Guard, Shared};
use super::socket::Socket;
use super::transfers::{Inbound, Outbound, Target};
use crate::quic::{parse_address, within};
use crate::reduce;
use crate::runtime::errors::{
    os_error, ConnectError, ConnectionLost, EndpointClosed, Failure, ForkedError, QuicError,
    VerificationError,
};
use crate::runtime::{decref, process};
use crate::tls::identity::{random_bytes, Credentials};
use crate::tls::trust::{fingerprint as parse_fingerprint, Trust};

const ACCEPTED: u8 = 1;
const LANDED: u8 = 2;
const SENT: u8 = 3;
const FINISHED: u8 = 4;
const LOST: u8 = 5;
const REFUSED: u8 = 6;
const MOVED: u8 = 7;
const UNKNOWN: u8 = 8;

const MAX_THREADS: i64 = 64;

#[pyclass(module = "nexar_native.bulk", frozen)]
pub struct Endpoint {
    guard: Arc<Guard>,
}

#[pymethods]
impl Endpoint {
    #[new]
    #[pyo3(signature = (credentials, trust, *, threads, allow_plain=false, handshake_timeout=10.0, max_handshakes=256))]
    fn new(
        py: Python<'_>,
        credentials: &Credentials,
        trust: &Trust,
        threads: i64,
        allow_plain: bool,
        handshake_timeout: f64,
        max_handshakes: i64,
    ) -> PyResult<Self> {
        if process::exiting() {
            let reason = "the interpreter exits".to_owned();
            return Err(Failure::Closed { reason }.into_py(py));
        }
        let threads = within("threads", threads, 1, MAX_THREADS)? as usize;
        let max_handshakes = within("max_handshakes", max_handshakes, 1, 1 << 24)? as usize;
        let handshake_timeout = seconds("handshake_timeout", handshake_timeout)?;
        let identity = Identity::new(credentials.clone(), trust.rules.clone())
            .map_err(|failure| failure.into_py(py))?;
        let shared = Shared::new(
            identity,
            threads,
            allow_plain,
            handshake_timeout,
            max_handshakes,
        );
        Ok(Endpoint {
            guard: Arc::new(Guard(shared.map_err(os_error)?)),
        })
    }

    fn replace_credentials(
        &self,
        py: Python<'_>,
        credentials: &Credentials,
        trust: &Trust,
    ) -> PyResult<()> {
        let shared = self.enter(py)?;
        let identity = Identity::new(credentials.clone(), trust.rules.clone())
            .map_err(|failure| failure.into_py(py))?;
        *shared.identity.lock() = identity;
        Ok(())
    }

    #[pyo3(signature = (addresses, server_name, fingerprint, hello, *, connections=1, plain=false, timeout))]
    #[allow(clippy::too_many_arguments)]
    fn connect(
        &self,
        py: Python<'_>,
        addresses: Vec<(String, u16)>,
        server_name: &str,
        fingerprint: Option<&Bound<'_, PyAny>>,
        hello: &[u8],
        connections: i64,
        plain: bool,
        timeout: f64,
    ) -> PyResult<Channel> {
        let shared = self.enter(py)?;
        let deadline = Instant::now() + seconds("timeout", timeout)?;
        let count = within("connections", connections, 1, MAX_CONNECTIONS as i64)? as usize;
        if hello.len() > MAX_HELLO_BYTES {
            let text = format!("hello: {} bytes; at most {MAX_HELLO_BYTES}", hello.len());
            return Err(PyValueError::new_err(text));
        }
        let addresses = addresses
            .iter()
            .map(parse_address)
            .collect::<PyResult<Vec<_>>>()?;
        if addresses.is_empty() {
            return Err(PyValueError::new_err("addresses: there is none"));
        }
        let name = ServerName::try_from(server_name.to_owned()).map_err(|_| {
            PyValueError::new_err(format!("server_name: {server_name:?} is not a valid name"))
        })?;
        let pin = fingerprint.map(parse_fingerprint).transpose()?;
        let identity = shared.identity.lock().clone();
        let config = identity
            .client(pin)
            .map_err(|failure| failure.into_py(py))?;
        let plan = Plan {
            addresses,
            name,
            config,
            hello: hello.to_vec(),
            count,
            plain,
            nonce: random_bytes().map_err(|failure| failure.into_py(py))?,
            deadline,
        };
        let core = dial(py, shared, &plan)?;
        Ok(Channel::new(core, &self.guard))
    }

    fn adopt(&self, py: Python<'_>, fd: RawFd) -> PyResult<()> {
        let shared = self.enter(py)?;
        let socket = Socket::adopt(fd).map_err(os_error)?;
        shared.check_open().map_err(|failure| failure.into_py(py))?;
        let Some(unverified) = shared.count_unverified() else {
            let reason = "too many handshakes in progress".to_owned();
            shared.refuse(&socket.peer_address(), reason);
            return Ok(());
        };
        let address = socket.peer_address();
        let served = shared.serve(|link| Connection::accept(shared, socket, link, unverified));
        match served {
            Err(Failure::Connect { reason, .. }) => {
                shared.refuse(&address, reason);
                Ok(())
            }
            other => other.map_err(|failure| failure.into_py(py)),
        }
    }

    fn fileno(&self, py: Python<'_>) -> PyResult<RawFd> {
        let shared = self.enter(py)?;
        shared.check_open().map_err(|failure| failure.into_py(py))?;
        Ok(shared.fileno().unwrap_or(-1))
    }

    fn poll<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let shared = self.enter(py)?;
        shared.check_open().map_err(|failure| failure.into_py(py))?;
        let events = shared.take_events();
        decref::release_deferred(py); // memory of transfers that have ended
        events
            .into_iter()
            .map(|event| self.reported(py, event))
            .collect()
    }

    fn stats(&self, py: Python<'_>) -> PyResult<HashMap<&'static str, u64>> {
        let shared = self.enter(py)?;
        let counters = &shared.counters;
        Ok(HashMap::from([
            ("threads", shared.threads() as u64),
            ("channels", shared.channel_count() as u64),
            (
                "connections",
                counters.connections.load(Ordering::Relaxed) as u64,
            ),
            (
                "handshakes",
                counters.handshakes.load(Ordering::Relaxed) as u64,
            ),
            ("refused", counters.refused.load(Ordering::Relaxed)),
            ("bytes_sent", counters.bytes_sent.load(Ordering::Relaxed)),
            (
                "bytes_received",
                counters.bytes_received.load(Ordering::Relaxed),
            ),
            ("rounds", counters.rounds.load(Ordering::Relaxed)),
        ]))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let shared = self.enter(py)?;
        process::detached(py, || shared.close("the endpoint was closed"));
        decref::release_deferred(py);
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exc))]
    fn __exit__(&self, py: Python<'_>, _exc: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }
}

impl Endpoint {
    fn enter(&self, py: Python<'_>) -> PyResult<&Arc<Shared>> {
        self.guard.0.enter(py)?;
        Ok(&self.guard.0)
    }

    fn reported<'py>(&self, py: Python<'py>, event: Event) -> PyResult<Bound<'py, PyTuple>> {
        let none = || py.None().into_bound(py);
        let (code, channel, transfer, detail) = match event {
            Event::Accepted(core) => {
                let id = core.id;
                let channel = Bound::new(py, Channel::new(core, &self.guard))?;
                (ACCEPTED, id, 0, channel.into_any())
            }
            Event::Landed(channel, transfer) => (LANDED, channel, transfer, none()),
            Event::Sent(channel, transfer) => (SENT, channel, transfer, none()),
            Event::Finished(channel) => (FINISHED, channel, 0, none()),
            Event::Lost(channel, kind, reason) => {
                let detail = (kind, reason).into_pyobject(py)?.into_any();
                (LOST, channel, 0, detail)
            }
            Event::Refused(address, reason) => {
                let detail = (address, reason).into_pyobject(py)?.into_any();
                (REFUSED, 0, 0, detail)
            }
        };
        (code, channel, transfer, detail).into_pyobject(py)
    }
}

/// Dropping it ends the channel.
#[pyclass(module = "nexar_native.bulk", frozen)]
pub struct Channel {
    core: Arc<Core>,
    guard: Arc<Guard>,
}

impl Channel {
    fn new(core: Arc<Core>, guard: &Arc<Guard>) -> Self {
        Channel {
            core,
            guard: guard.clone(),
        }
    }

    fn enter(&self, py: Python<'_>) -> PyResult<&Core> {
        self.guard.0.enter(py)?;
        Ok(&self.core)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        match self.guard.0.made_in_parent() {
            true => std::mem::forget(self.core.clone()), // its locks may be held by no thread
            false => self.core.end(closed("the channel was dropped")),
        }
    }
}

#[pymethods]
impl Channel {
    #[getter]
    fn id(&self) -> u64 {
        self.core.id
    }

    #[getter]
    fn dialed(&self) -> bool {
        self.core.dialed
    }

    #[getter]
    fn connections(&self) -> usize {
        self.core.count
    }

    #[getter]
    fn hello<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.core.hello)
    }

    #[getter]
    fn peer_certificate<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.enter(py)?.peer_certificate()))
    }

    #[getter]
    fn plain(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.enter(py)?.plain())
    }

    #[pyo3(signature = (transfer, into, *, op=0, dtype=0, before=false))]
    fn expect(
        &self,
        py: Python<'_>,
        transfer: u64,
        into: &Bound<'_, PyAny>,
        op: i64,
        dtype: i64,
        before: bool,
    ) -> PyResult<()> {
        let core = self.enter(py)?;
        let region = Region::writable(into)?;
        let length = region.length();
        let target = match (op, dtype) {
            (0, 0) => Target::Memory(region),
            _ => Target::Reduce(region, reduction(op, dtype, before, length)?),
        };
        let expected = core.expect(Inbound::new(transfer, length, target));
        expected.map_err(|failure| rejected(py, failure))
    }

    fn redirect(
        &self,
        py: Python<'_>,
        transfer: u64,
        into: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u8> {
        let core = self.enter(py)?;
        let target = match into {
            Some(into) => Target::Memory(Region::writable(into)?),
            None => Target::Discard,
        };
        let (redirected, unused) = process::detached(py, || core.redirect(transfer, target))
            .map_err(|failure| rejected(py, failure))?;
        if let Target::Memory(region) | Target::Reduce(region, _) = unused {
            region.release(py);
        }
        decref::release_deferred(py);
        Ok(match redirected {
            Redirected::Moved => MOVED,
            Redirected::Landed => LANDED,
            Redirected::Unknown => UNKNOWN,
        })
    }

    fn applied(&self, py: Python<'_>, transfer: u64) -> PyResult<Vec<(u64, u64)>> {
        Ok(self.enter(py)?.applied(transfer))
    }

    fn send(&self, py: Python<'_>, transfer: u64, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let core = self.enter(py)?;
        let region = Region::readable(data)?;
        let outbound = Outbound::new(transfer, region.length(), Some(region));
        core.send(outbound).map_err(|failure| rejected(py, failure))
    }

    fn withdraw(&self, py: Python<'_>, transfer: u64) -> PyResult<()> {
        let core = self.enter(py)?;
        if let Some(region) = process::detached(py, || core.withdraw(transfer)) {
            region.release(py);
        }
        decref::release_deferred(py);
        Ok(())
    }

    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        self.enter(py)?.finish();
        Ok(())
    }

    #[pyo3(signature = (reason=""))]
    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let core = self.enter(py)?;
        process::detached(py, || core.end(closed(reason)));
        decref::release_deferred(py);
        Ok(())
    }

    fn stats(&self, py: Python<'_>) -> PyResult<HashMap<&'static str, f64>> {
        let core = self.enter(py)?;
        let counters = &core.counters;
        let (expected, sending) = core.counts();
        Ok(HashMap::from([
            ("connections", core.count as f64),
            (
                "bytes_sent",
                counters.bytes_sent.load(Ordering::Relaxed) as f64,
            ),
            (
                "bytes_received",
                counters.bytes_received.load(Ordering::Relaxed) as f64,
            ),
            (
                "transfers_sent",
                counters.transfers_sent.load(Ordering::Relaxed) as f64,
            ),
            (
                "transfers_received",
                counters.transfers_received.load(Ordering::Relaxed) as f64,
            ),
            ("expected", expected as f64),
            ("sending", sending as f64),
        ]))
    }
}

/// A call that was rejected keeps no memory.
fn rejected(py: Python<'_>, failure: Failure) -> PyErr {
    decref::release_deferred(py);
    failure.into_py(py)
}

fn reduction(op: i64, dtype: i64, before: bool, length: u64) -> PyResult<Reduction> {
    let code = |number| u8::try_from(number).unwrap_or(0);
    let (op, dtype) = (code(op), code(dtype));
    let defined = reduce::is_supported(op, dtype);
    let Some(itemsize) = reduce::itemsize(dtype).filter(|_| defined) else {
        return Err(PyValueError::new_err(reduce::Invalid::Undefined.message()));
    };
    if length % itemsize as u64 != 0 {
        return Err(PyValueError::new_err(reduce::Invalid::Partial.message()));
    }
    Ok(Reduction {
        op,
        dtype,
        before,
        itemsize,
    })
}

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    if value.is_finite() && (0.0..=1e9).contains(&value) {
        return Ok(Duration::from_secs_f64(value));
    }
    let text = format!("{name}: {value} is not a number of seconds");
    Err(PyValueError::new_err(text))
}

pub fn module(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    let module = PyModule::new(py, "nexar_native.bulk")?;
    module.setattr(
        "__doc__",
        "Large transfers over TCP, moved by native threads.",
    )?;
    module.add_class::<Endpoint>()?;
    module.add_class::<Channel>()?;
    module.add("PREAMBLE", PyBytes::new(py, PREAMBLE))?;
    module.add("CHUNK_BYTES", CHUNK_BYTES)?;
    for (name, code) in [
        ("ACCEPTED", ACCEPTED),
        ("LANDED", LANDED),
        ("SENT", SENT),
        ("FINISHED", FINISHED),
        ("LOST", LOST),
        ("REFUSED", REFUSED),
        ("MOVED", MOVED),
        ("UNKNOWN", UNKNOWN),
    ] {
        module.add(name, code)?;
    }
    module.add("Credentials", py.get_type::<Credentials>())?;
    module.add("Trust", py.get_type::<Trust>())?;
    module.add("ConnectError", py.get_type::<ConnectError>())?;
    module.add("VerificationError", py.get_type::<VerificationError>())?;
    module.add("ConnectionLost", py.get_type::<ConnectionLost>())?;
    module.add("EndpointClosed", py.get_type::<EndpointClosed>())?;
    module.add("ForkedError", py.get_type::<ForkedError>())?;
    module.add("QuicError", py.get_type::<QuicError>())?;
    Ok(module)
}
