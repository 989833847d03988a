//! The native part of nexar: one extension module with a submodule for each area.
//!
//! `runtime` is what all areas share: errors, borrowed buffers, descriptors, fork and exit. `tls` holds
//! credentials and the verification of certificates. `bulk`, `exit_watch`, `quic`, `reduce` and `shm` are submodules of
//! `nexar_native`.

use pyo3::prelude::*;

mod bulk;
mod exit_watch;
mod quic;
mod reduce;
mod shm;

mod runtime {
    pub mod buffer;
    pub mod decref;
    pub mod descriptors;
    pub mod errors;
    pub mod process;
    pub mod signals;
}

mod tls {
    pub mod identity;
    pub mod trust;
}

/// The native code of `nexar_native`, whose `__init__.py` registers the submodules.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("quic", quic::module(module.py())?)?;
    module.add("bulk", bulk::module(module.py())?)?;
    module.add("exit_watch", exit_watch::module(module.py())?)?;
    module.add("reduce", reduce::module(module.py())?)?;
    module.add("shm", shm::module(module.py())?)?;
    runtime::process::register_fork_handlers()?;
    runtime::process::register_atexit(module)
}
