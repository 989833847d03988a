//! Collectives of the processes of one host through shared memory.
//!
//! `python/nexar_native/shm.pyi` is the contract. From below: `region` is the memory, `calls` what ranks publish about
//! their calls, `sync` the rounds, `collectives` what happens in each round, `engine` runs one operation after the
//! other, `queue` decides which thread does, and `group` is what Python sees. `call_table` has the numbers and
//! statistics of the calls.

mod array;
mod call_table;
mod calls;
mod clock;
mod collectives;
mod engine;
mod group;
mod queue;
mod region;
mod sleepers;
mod sync;

use pyo3::prelude::*;

use collectives::Kind;
use group::{Group, Pending, STATUSES};
use region::{Region, MAX_RANKS};

/// The Python module `nexar_native.shm`.
pub fn module(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    let module = PyModule::new(py, "nexar_native.shm")?;
    let text = "Collectives of the processes of one host through shared memory.";
    module.setattr("__doc__", text)?;
    module.add("MAX_RANKS", MAX_RANKS)?;
    for (name, number) in STATUSES {
        module.add(name, number)?;
    }
    for (name, kind) in Kind::ALL {
        module.add(name, kind as u8)?;
    }
    module.add_class::<Region>()?;
    module.add_class::<Group>()?;
    module.add_class::<Pending>()?;
    Ok(module)
}
