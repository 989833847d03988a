//! Failures: plain values that need no GIL, and the Python exceptions made of them.

use pyo3::exceptions::{
    PyBlockingIOError, PyConnectionError, PyOSError, PyRuntimeError, PyValueError,
};
use pyo3::prelude::*;
use pyo3::{create_exception, PyTypeInfo};
use quinn_proto::{ConnectError as DialError, ConnectionError, TransportErrorCode};

create_exception!(
    nexar_native.quic,
    QuicError,
    PyConnectionError,
    "Root of every error of this package."
);
create_exception!(
    nexar_native.quic,
    ConnectError,
    QuicError,
    "The dial failed. Carries .kind and .reason."
);
create_exception!(
    nexar_native.quic,
    VerificationError,
    ConnectError,
    "A certificate was not accepted. Carries .kind, .reason and .by."
);
create_exception!(
    nexar_native.quic,
    ConnectionLost,
    QuicError,
    "The connection is gone. Carries .kind, .code, .reason."
);
create_exception!(
    nexar_native.quic,
    StreamError,
    QuicError,
    "The stream is unusable. Carries .kind and .code."
);
create_exception!(
    nexar_native.quic,
    Cancelled,
    QuicError,
    "The operation was cancelled by its owner."
);
create_exception!(
    nexar_native.quic,
    EndpointClosed,
    QuicError,
    "The endpoint was closed, or poisoned (then .reason says why)."
);
create_exception!(
    nexar_native.quic,
    ForkedError,
    PyRuntimeError,
    "The object was made in the parent process."
);

/// A failure as a plain value: made, cloned and stored without the GIL.
#[derive(Clone, Debug, PartialEq)]
pub enum Failure {
    Connect {
        kind: &'static str,
        reason: String,
    },
    Verification {
        reason: String,
        by: &'static str,
    },
    Lost {
        kind: &'static str,
        code: Option<u64>,
        reason: String,
    },
    Stream {
        kind: &'static str,
        code: Option<u64>,
    },
    Cancelled,
    Closed {
        reason: String,
    },
    WouldBlock(&'static str),
    Value(String),
    Os(i32),
}

impl Failure {
    pub fn stream_closed() -> Self {
        Failure::Stream {
            kind: "closed",
            code: None,
        }
    }

    pub fn connect(reason: impl ToString) -> Self {
        Failure::Connect {
            kind: "failed",
            reason: reason.to_string(),
        }
    }

    /// The loss of an established connection.
    pub fn lost(error: &ConnectionError) -> Self {
        let (kind, code, reason) = match error {
            ConnectionError::ApplicationClosed(close) => (
                "peer_closed",
                Some(close.error_code.into_inner()),
                String::from_utf8_lossy(&close.reason).into_owned(),
            ),
            ConnectionError::LocallyClosed => ("closed", None, String::new()),
            ConnectionError::TimedOut => (
                "timed_out",
                None,
                "nothing heard within the idle timeout".to_owned(),
            ),
            ConnectionError::Reset => (
                "reset",
                None,
                "the peer no longer knows this connection".to_owned(),
            ),
            ConnectionError::ConnectionClosed(close) => (
                "protocol",
                Some(u64::from(close.error_code)),
                error.to_string(),
            ),
            other => ("protocol", None, other.to_string()),
        };
        Failure::Lost { kind, code, reason }
    }

    /// The end of a connection before its handshake had completed.
    pub fn handshake(error: &ConnectionError) -> Self {
        match error {
            ConnectionError::TransportError(e) if is_certificate_alert(e.code) => {
                Failure::Verification {
                    reason: e.reason.clone(),
                    by: "us",
                }
            }
            ConnectionError::ConnectionClosed(close) if is_certificate_alert(close.error_code) => {
                Failure::Verification {
                    reason: String::from_utf8_lossy(&close.reason).into_owned(),
                    by: "peer",
                }
            }
            ConnectionError::TimedOut => Failure::Connect {
                kind: "timed_out",
                reason: error.to_string(),
            },
            other => Failure::connect(other),
        }
    }

    pub fn dial(error: DialError) -> Self {
        match error {
            DialError::InvalidServerName(name) => {
                Failure::Value(format!("server_name: {name:?} is not a valid name"))
            }
            DialError::InvalidRemoteAddress(address) => {
                Failure::Value(format!("address: {address} cannot be dialed"))
            }
            other => Failure::connect(other),
        }
    }

    /// One line for `refusals()`.
    pub fn describe(&self) -> String {
        match self {
            Failure::Verification { reason, by: "peer" } => {
                format!("the peer refused our certificate: {reason}")
            }
            Failure::Verification { reason, .. } | Failure::Connect { reason, .. } => {
                reason.clone()
            }
            Failure::Lost { kind, reason, .. } => format!("{kind}: {reason}"),
            other => format!("{other:?}"),
        }
    }

    /// The Python exception. Needs the GIL. The caller does not hold the endpoint's lock.
    pub fn into_py(self, py: Python<'_>) -> PyErr {
        match self {
            Failure::Connect { kind, reason } => {
                with_attributes::<ConnectError>(py, reason.clone(), |e| {
                    e.setattr("kind", kind)?;
                    e.setattr("reason", reason)
                })
            }
            Failure::Verification { reason, by } => {
                let whose = if by == "us" { "their" } else { "our" };
                let text = format!("{whose} certificate was refused: {reason}");
                with_attributes::<VerificationError>(py, text, |e| {
                    e.setattr("kind", "verification")?;
                    e.setattr("reason", reason)?;
                    e.setattr("by", by)
                })
            }
            Failure::Lost { kind, code, reason } => {
                let text = lost_text(kind, code, &reason);
                with_attributes::<ConnectionLost>(py, text, |e| {
                    e.setattr("kind", kind)?;
                    e.setattr("code", code)?;
                    e.setattr("reason", reason)
                })
            }
            Failure::Stream { kind, code } => {
                let text = stream_text(kind, code);
                with_attributes::<StreamError>(py, text, |e| {
                    e.setattr("kind", kind)?;
                    e.setattr("code", code)
                })
            }
            Failure::Cancelled => Cancelled::new_err("the operation was cancelled"),
            Failure::Closed { reason } => {
                let text = format!("the endpoint is closed: {reason}");
                with_attributes::<EndpointClosed>(py, text, |e| e.setattr("reason", reason))
            }
            Failure::WouldBlock(text) => PyBlockingIOError::new_err(text),
            Failure::Value(text) => PyValueError::new_err(text),
            Failure::Os(code) => os_error(std::io::Error::from_raw_os_error(code)),
        }
    }
}

/// An OSError with errno. PyO3's own conversion keeps the number in the text only.
pub fn os_error(error: std::io::Error) -> PyErr {
    let Some(code) = error.raw_os_error() else {
        return error.into();
    };
    let text = error.to_string();
    let brief = text.strip_suffix(&format!(" (os error {code})"));
    PyOSError::new_err((code, brief.unwrap_or(&text).to_owned()))
}

fn lost_text(kind: &str, code: Option<u64>, reason: &str) -> String {
    let code = code.map(|c| format!(" (code {c})")).unwrap_or_default();
    let colon = if reason.is_empty() { "" } else { ": " };
    format!("the connection is gone, {kind}{code}{colon}{reason}")
}

fn stream_text(kind: &str, code: Option<u64>) -> String {
    let code = code.map(|c| format!(" (code {c})")).unwrap_or_default();
    match kind {
        "reset" => format!("the peer reset the stream{code}"),
        "stopped" => format!("the peer stopped the stream{code}"),
        _ => "the stream was finished, reset or stopped by us".to_owned(),
    }
}

/// Creates the exception now. Creating it lazily would release the GIL for a moment, and the
/// interpreter may have been finalized when the thread takes it again (see `process`).
fn with_attributes<E: PyTypeInfo>(
    py: Python<'_>,
    text: String,
    set: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<()>,
) -> PyErr {
    let made = E::type_object(py).call1((text,)).and_then(|error| {
        set(&error)?;
        Ok(PyErr::from_value(error))
    });
    made.unwrap_or_else(|unexpected| unexpected)
}

/// TLS alerts about a certificate: bad_certificate (42) to unknown_ca (48), access_denied (49),
/// decrypt_error (51: a wrong signature, as from another authority with the same name),
/// certificate_required (116). QUIC carries an alert as 0x100 + its number.
fn is_certificate_alert(code: TransportErrorCode) -> bool {
    matches!(u64::from(code).checked_sub(0x100), Some(42..=49 | 51 | 116))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("QuicError", py.get_type::<QuicError>())?;
    module.add("ConnectError", py.get_type::<ConnectError>())?;
    module.add("VerificationError", py.get_type::<VerificationError>())?;
    module.add("ConnectionLost", py.get_type::<ConnectionLost>())?;
    module.add("StreamError", py.get_type::<StreamError>())?;
    module.add("Cancelled", py.get_type::<Cancelled>())?;
    module.add("EndpointClosed", py.get_type::<EndpointClosed>())?;
    module.add("ForkedError", py.get_type::<ForkedError>())
}
