//! `Connection`: as Python sees it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use quinn_proto::{Dir, VarInt};

use crate::address;
use crate::completions::Completions;
use crate::errors::Failure;
use crate::grip::{ConnectionGrip, StreamGrip};
use crate::op::{Op, Target};
use crate::operation::Operation;
use crate::session::Session;
use crate::shared::Guard;
use crate::state::State;
use crate::stream::Stream;

#[pyclass(module = "nexar_quic", frozen)]
pub struct Connection {
    guard: Arc<Guard>,
    grip: Option<Arc<ConnectionGrip>>,
}

impl Connection {
    pub fn new(guard: Arc<Guard>, grip: Arc<ConnectionGrip>) -> Self {
        Connection {
            guard,
            grip: Some(grip),
        }
    }

    fn grip(&self) -> &Arc<ConnectionGrip> {
        self.grip.as_ref().expect("taken only by drop")
    }

    /// Post `target` by handing it to `place` together with its session.
    fn post(
        &self,
        py: Python<'_>,
        target: Target,
        completions: Option<&Completions>,
        token: Option<Py<PyAny>>,
        place: impl FnOnce(&mut Session, Arc<Op>) + Send,
    ) -> PyResult<Py<Operation>> {
        let op = Op::new(target, completions.map(|c| c.queue.clone()));
        let grip = self.grip();
        Operation::post(py, &self.guard.0, op, token, false, |state, op| {
            place(session(state, grip)?, op.clone());
            Ok(())
        })
    }

    fn open(&self, py: Python<'_>, dir: Dir) -> PyResult<Stream> {
        let grip = self.grip();
        let stream = self.guard.0.call(py, false, |state| {
            let session = session(state, grip)?;
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
        let target = Target::Open(self.grip().clone(), dir);
        self.post(
            py,
            target,
            completions,
            token,
            move |session, op| match session.alive() {
                Err(loss) => op.complete(Err(loss)),
                Ok(()) => {
                    session.openers[dir as usize].push_back(op);
                    session.serve_openers(dir);
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
        let target = Target::AcceptStream(self.grip().clone(), dir);
        self.post(py, target, completions, token, move |session, op| {
            session.acceptors[dir as usize].push_back(op);
            session.serve_acceptors(dir);
            if let Err(loss) = session.alive() {
                for op in session.acceptors[dir as usize].drain(..) {
                    op.complete(Err(loss.clone()));
                }
            }
        })
    }
}

pub fn session<'a>(
    state: &'a mut State,
    grip: &ConnectionGrip,
) -> Result<&'a mut Session, Failure> {
    let lost = grip.lost.get().cloned();
    state
        .touch(grip.serial)
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
        let peer = self.grip().peer.get()?;
        peer.certificate.as_deref().map(Cow::Borrowed)
    }

    #[getter]
    fn verified(&self) -> bool {
        self.grip().peer.get().is_some_and(|peer| peer.verified)
    }

    #[getter]
    fn dialed(&self) -> bool {
        self.grip().dialed
    }

    #[getter]
    fn remote_address(&self) -> (String, u16) {
        address::present(self.grip().remote)
    }

    #[getter]
    fn local_certificate(&self) -> Option<Cow<'_, [u8]>> {
        self.grip().local_certificate.as_deref().map(Cow::Borrowed)
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
        let grip = self.grip();
        let material = self.guard.0.call(py, false, |state| {
            let session = session(state, grip)?;
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
        let serial = self.grip().serial;
        self.guard.0.call(py, false, |state| {
            state.soil(serial);
            if let Some(session) = state.sessions.get_mut(&serial) {
                session.lift_limits(&mut state.hub);
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
        let target = Target::Closed(self.grip().clone());
        self.post(
            py,
            target,
            completions,
            token,
            |session, op| match session.alive() {
                Err(loss) => op.complete(Err(loss)),
                Ok(()) => session.closers.push(op),
            },
        )
    }

    fn stats(&self, py: Python<'_>) -> PyResult<HashMap<&'static str, f64>> {
        let grip = self.grip();
        self.guard
            .0
            .call(py, false, |state| Ok(stats(session(state, grip)?)))
    }

    #[pyo3(signature = (code=0, reason=""))]
    fn close(&self, py: Python<'_>, code: u32, reason: &str) -> PyResult<()> {
        let serial = self.grip().serial;
        self.guard.0.enter(py)?;
        let closed = self.guard.0.call(py, false, |state| {
            state.soil(serial);
            let (hub, sessions) = (&mut state.hub, &mut state.sessions);
            if let Some(session) = sessions.get_mut(&serial) {
                let code = VarInt::from_u32(code);
                session.close(hub, std::time::Instant::now(), code, reason);
            }
            Ok(())
        });
        // With a closed endpoint there is nothing left to close.
        closed.or_else(|error| {
            let gone = self.grip().lost.get().is_some();
            if gone {
                Ok(())
            } else {
                Err(error)
            }
        })
    }

    fn __repr__(&self) -> String {
        let way = if self.grip().dialed { "to" } else { "from" };
        format!("<nexar_quic.Connection {way} {}>", self.grip().remote)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        drop(self.grip.take());
        self.guard.0.tidy();
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
        ("streams", session.channels.len() as f64),
        ("last_received", session.heard.elapsed().as_secs_f64()),
    ])
}

impl Connection {
    pub fn of(guard: &Arc<Guard>, stream: &StreamGrip) -> Self {
        Connection::new(guard.clone(), stream.connection.clone())
    }
}
