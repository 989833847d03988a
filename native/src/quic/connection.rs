//! The Python class `Connection`.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use quinn_proto::{Dir, VarInt};

use crate::quic::completions::Completions;
use crate::quic::endpoint_shared::Guard;
use crate::quic::handles::{ConnectionHandle, StreamHandle};
use crate::quic::operation::{Operation, OperationState, Target};
use crate::quic::session::Session;
use crate::quic::socket;
use crate::quic::state::State;
use crate::quic::stream::Stream;
use crate::runtime::errors::Failure;

#[pyclass(module = "nexar_native.quic", frozen)]
pub struct Connection {
    guard: Arc<Guard>,
    handle: Option<Arc<ConnectionHandle>>,
}

impl Connection {
    pub fn new(guard: Arc<Guard>, handle: Arc<ConnectionHandle>) -> Self {
        Connection {
            guard,
            handle: Some(handle),
        }
    }

    fn handle(&self) -> &Arc<ConnectionHandle> {
        self.handle.as_ref().expect("taken only by drop")
    }

    /// Posts an operation by passing it to `place` with its session.
    fn post(
        &self,
        py: Python<'_>,
        target: Target,
        completions: Option<&Completions>,
        token: Option<Py<PyAny>>,
        place: impl FnOnce(&mut Session, Arc<OperationState>) + Send,
    ) -> PyResult<Py<Operation>> {
        let op = OperationState::new(target, completions.map(|c| c.queue.clone()));
        let handle = self.handle();
        Operation::post(py, &self.guard.0, op, token, false, |state, op| {
            place(session(state, handle)?, op.clone());
            Ok(())
        })
    }

    fn open(&self, py: Python<'_>, dir: Dir) -> PyResult<Stream> {
        let handle = self.handle();
        let stream = self.guard.0.call(py, false, |state| {
            let session = session(state, handle)?;
            session.alive()?;
            session
                .open(dir)
                .ok_or(Failure::WouldBlock("the peer's stream limit is reached"))
        })?;
        Ok(Stream::new(self.guard.clone(), stream))
    }

    fn post_open(
        &self,
        py: Python<'_>,
        dir: Dir,
        completions: Option<&Completions>,
        token: Option<Py<PyAny>>,
    ) -> PyResult<Py<Operation>> {
        let target = Target::Open(self.handle().clone(), dir);
        self.post(
            py,
            target,
            completions,
            token,
            move |session, op| match session.alive() {
                Err(loss) => op.complete(Err(loss)),
                Ok(()) => {
                    session.pending_opens[dir as usize].push_back(op);
                    session.complete_opens(dir);
                }
            },
        )
    }

    fn post_accept(
        &self,
        py: Python<'_>,
        dir: Dir,
        completions: Option<&Completions>,
        token: Option<Py<PyAny>>,
    ) -> PyResult<Py<Operation>> {
        let target = Target::AcceptStream(self.handle().clone(), dir);
        self.post(py, target, completions, token, move |session, op| {
            session.pending_accepts[dir as usize].push_back(op);
            session.complete_accepts(dir);
            if let Err(loss) = session.alive() {
                for op in session.pending_accepts[dir as usize].drain(..) {
                    op.complete(Err(loss.clone()));
                }
            }
        })
    }
}

pub fn session<'a>(
    state: &'a mut State,
    handle: &ConnectionHandle,
) -> Result<&'a mut Session, Failure> {
    let lost = handle.lost.get().cloned();
    state
        .touch(handle.serial)
        .ok_or(lost.unwrap_or(Failure::Lost {
            kind: "closed",
            code: None,
            reason: String::new(),
        }))
}

#[pymethods]
impl Connection {
    #[getter]
    fn peer_certificate(&self) -> Option<Cow<'_, [u8]>> {
        let peer = self.handle().peer.get()?;
        peer.certificate.as_deref().map(Cow::Borrowed)
    }

    #[getter]
    fn verified(&self) -> bool {
        self.handle().peer.get().is_some_and(|peer| peer.verified)
    }

    #[getter]
    fn dialed(&self) -> bool {
        self.handle().dialed
    }

    #[getter]
    fn remote_address(&self) -> (String, u16) {
        socket::address_to_python(self.handle().remote)
    }

    #[getter]
    fn local_certificate(&self) -> Option<Cow<'_, [u8]>> {
        self.handle()
            .local_certificate
            .as_deref()
            .map(Cow::Borrowed)
    }

    fn export_keying_material(
        &self,
        py: Python<'_>,
        label: &[u8],
        context: &[u8],
        length: usize,
    ) -> PyResult<Cow<'static, [u8]>> {
        if !(1..=8160).contains(&length) {
            return Err(PyValueError::new_err("length: must be within 1 and 8160"));
        }
        let handle = self.handle();
        let material = self.guard.0.call(py, false, |state| {
            let session = session(state, handle)?;
            let mut out = vec![0; length];
            session
                .connection
                .crypto_session()
                .export_keying_material(&mut out, label, context)
                .map_err(|_| Failure::Value("no keying material could be exported".to_owned()))?;
            Ok(out)
        })?;
        Ok(material.into())
    }

    fn lift_limits(&self, py: Python<'_>) -> PyResult<()> {
        let serial = self.handle().serial;
        self.guard.0.call(py, false, |state| {
            state.mark_dirty(serial);
            if let Some(session) = state.sessions.get_mut(&serial) {
                session.lift_limits(&mut state.core);
            }
            Ok(())
        })
    }

    fn open_uni(&self, py: Python<'_>) -> PyResult<Stream> {
        self.open(py, Dir::Uni)
    }

    fn open_bi(&self, py: Python<'_>) -> PyResult<Stream> {
        self.open(py, Dir::Bi)
    }

    #[pyo3(signature = (completions=None, *, token=None))]
    fn post_open_uni(
        &self,
        py: Python<'_>,
        completions: Option<&Completions>,
        token: Option<Py<PyAny>>,
    ) -> PyResult<Py<Operation>> {
        self.post_open(py, Dir::Uni, completions, token)
    }

    #[pyo3(signature = (completions=None, *, token=None))]
    fn post_open_bi(
        &self,
        py: Python<'_>,
        completions: Option<&Completions>,
        token: Option<Py<PyAny>>,
    ) -> PyResult<Py<Operation>> {
        self.post_open(py, Dir::Bi, completions, token)
    }

    #[pyo3(signature = (completions=None, *, token=None))]
    fn post_accept_uni(
        &self,
        py: Python<'_>,
        completions: Option<&Completions>,
        token: Option<Py<PyAny>>,
    ) -> PyResult<Py<Operation>> {
        self.post_accept(py, Dir::Uni, completions, token)
    }

    #[pyo3(signature = (completions=None, *, token=None))]
    fn post_accept_bi(
        &self,
        py: Python<'_>,
        completions: Option<&Completions>,
        token: Option<Py<PyAny>>,
    ) -> PyResult<Py<Operation>> {
        self.post_accept(py, Dir::Bi, completions, token)
    }

    #[pyo3(signature = (completions=None, *, token=None))]
    fn post_closed(
        &self,
        py: Python<'_>,
        completions: Option<&Completions>,
        token: Option<Py<PyAny>>,
    ) -> PyResult<Py<Operation>> {
        let target = Target::Closed(self.handle().clone());
        self.post(
            py,
            target,
            completions,
            token,
            |session, op| match session.alive() {
                Err(loss) => op.complete(Err(loss)),
                Ok(()) => session.pending_closed.push(op),
            },
        )
    }

    fn stats(&self, py: Python<'_>) -> PyResult<HashMap<&'static str, f64>> {
        let handle = self.handle();
        self.guard
            .0
            .call(py, false, |state| Ok(stats(session(state, handle)?)))
    }

    #[pyo3(signature = (code=0, reason=""))]
    fn close(&self, py: Python<'_>, code: u32, reason: &str) -> PyResult<()> {
        let serial = self.handle().serial;
        self.guard.0.enter(py)?;
        let closed = self.guard.0.call(py, false, |state| {
            state.mark_dirty(serial);
            let (core, sessions) = (&mut state.core, &mut state.sessions);
            if let Some(session) = sessions.get_mut(&serial) {
                let code = VarInt::from_u32(code);
                session.close(core, std::time::Instant::now(), code, reason);
            }
            Ok(())
        });
        // Nothing is left to close if the endpoint is closed.
        closed.or_else(|error| {
            let gone = self.handle().lost.get().is_some();
            if gone {
                Ok(())
            } else {
                Err(error)
            }
        })
    }

    fn __repr__(&self) -> String {
        let way = if self.handle().dialed { "to" } else { "from" };
        format!(
            "<nexar_native.quic.Connection {way} {}>",
            self.handle().remote
        )
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        drop(self.handle.take());
        self.guard.0.process_dropped();
    }
}

fn stats(session: &Session) -> HashMap<&'static str, f64> {
    let s = session.connection.stats();
    HashMap::from([
        ("rtt", s.path.rtt.as_secs_f64()),
        ("min_rtt", s.path.min_rtt.as_secs_f64()),
        ("cwnd", s.path.cwnd as f64),
        ("mtu", f64::from(s.path.current_mtu)),
        ("lost_packets", s.path.lost_packets as f64),
        ("lost_bytes", s.path.lost_bytes as f64),
        ("sent_packets", s.path.sent_packets as f64),
        ("congestion_events", s.path.congestion_events as f64),
        ("black_holes", s.path.black_holes_detected as f64),
        ("datagrams_sent", s.udp_tx.datagrams as f64),
        ("datagrams_received", s.udp_rx.datagrams as f64),
        ("bytes_sent", s.udp_tx.bytes as f64),
        ("bytes_received", s.udp_rx.bytes as f64),
        ("streams", session.streams.len() as f64),
        (
            "last_received",
            session.last_received.elapsed().as_secs_f64(),
        ),
    ])
}

impl Connection {
    pub fn of(guard: &Arc<Guard>, stream: &StreamHandle) -> Self {
        Connection::new(guard.clone(), stream.connection.clone())
    }
}
