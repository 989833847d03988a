//! QUIC with mutual TLS. The thread that waits drives the endpoint.
//!
//! `python/nexar_native/quic.pyi` is the contract. `driver.rs` says which thread drives, `endpoint_shared.rs`
//! which locks there are and in which order they are taken.

use pyo3::prelude::*;

use crate::runtime::errors;
use crate::tls::identity::Credentials;
use crate::tls::trust::{spki_fingerprint, Trust};

mod background;
mod completions;
mod congestion;
mod connection;
mod connection_config;
mod driver;
mod endpoint;
mod endpoint_shared;
mod handles;
mod handshake_budget;
mod handshakes;
mod operation;
mod session;
mod session_streams;
mod settings;
mod socket;
mod state;
mod state_ops;
mod stream;
mod stream_state;
mod wait;

pub use settings::within;
pub use socket::parse_address;

/// The Python module `nexar_native.quic`.
pub fn module(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    let module = PyModule::new(py, "nexar_native.quic")?;
    module.setattr(
        "__doc__",
        "QUIC with mutual TLS. The thread that waits drives the endpoint.",
    )?;
    module.add_class::<Credentials>()?;
    module.add_class::<Trust>()?;
    module.add_class::<settings::Settings>()?;
    module.add_class::<endpoint::Endpoint>()?;
    module.add_class::<completions::Completions>()?;
    module.add_class::<operation::Operation>()?;
    module.add_class::<connection::Connection>()?;
    module.add_class::<stream::Stream>()?;
    module.add_function(wrap_pyfunction!(spki_fingerprint, &module)?)?;
    errors::register(&module)?;
    Ok(module)
}
