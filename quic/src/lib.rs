//! QUIC for Python, driven by the thread that waits. `nexar_quic.pyi` is the contract; `crew.rs`
//! and `shared.rs` say who drives and who holds which lock.

use pyo3::prelude::*;

mod address;
mod background;
mod buffer;
mod channel;
mod completions;
mod connection;
mod credentials;
mod crew;
mod descriptor;
mod endpoint;
mod errors;
mod event;
mod exit;
mod farewell;
mod fork;
mod governor;
mod grip;
mod handshake_budget;
mod handshakes;
mod hub;
mod identity;
mod op;
mod operation;
mod poll;
mod pool;
mod queue;
mod session;
mod session_streams;
mod settings;
mod shared;
mod socket;
mod state;
mod state_ops;
mod stream;
mod timers;
mod trash;
mod trust;
mod verifier;
mod wait;
mod waiter;
mod window;

/// QUIC for Python, driven by the thread that waits.
#[pymodule]
fn nexar_quic(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<credentials::Credentials>()?;
    module.add_class::<trust::Trust>()?;
    module.add_class::<settings::Settings>()?;
    module.add_class::<endpoint::Endpoint>()?;
    module.add_class::<completions::Completions>()?;
    module.add_class::<operation::Operation>()?;
    module.add_class::<connection::Connection>()?;
    module.add_class::<stream::Stream>()?;
    module.add_function(wrap_pyfunction!(trust::spki_fingerprint, module)?)?;
    errors::register(module)?;
    fork::register()?;
    exit::register(module)
}
