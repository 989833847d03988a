//! Forking. A child shares our sockets' open file descriptions with its parent: it must let go of
//! them and never use them. Objects remember the generation they were made in; the child's is one
//! higher, so each of their methods refuses.

use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::{descriptor, exit, trash};

static GENERATION: AtomicU32 = AtomicU32::new(0);

pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// A thread without the GIL may hold one of these two leaf locks while another forks, and in the
/// child nobody would ever release it. So the forking thread takes both first.
#[pyfunction]
fn before_fork() {
    std::mem::forget(descriptor::TABLE.lock());
    std::mem::forget(trash::BIN.lock());
}

#[pyfunction]
fn after_fork_in_parent() {
    // SAFETY: locked by `before_fork` on this thread.
    unsafe {
        trash::BIN.force_unlock();
        descriptor::TABLE.force_unlock();
    }
}

/// Closes our descriptors here. The parent's stay open: nothing is shut down, and the endpoint
/// locks, which may be held by threads that do not exist here, are not touched.
#[pyfunction]
fn after_fork_in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    // SAFETY: locked by `before_fork` on the thread this one is the copy of.
    unsafe {
        trash::BIN.force_unlock();
        descriptor::TABLE.force_unlock();
    }
    for fd in descriptor::TABLE.lock().drain(..) {
        // SAFETY: it was open at the time of the fork, and nothing ran in between.
        unsafe { libc::close(fd) };
    }
    exit::forget();
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let hooks = PyDict::new(py);
    hooks.set_item("before", wrap_pyfunction!(before_fork, module)?)?;
    hooks.set_item(
        "after_in_parent",
        wrap_pyfunction!(after_fork_in_parent, module)?,
    )?;
    hooks.set_item(
        "after_in_child",
        wrap_pyfunction!(after_fork_in_child, module)?,
    )?;
    py.import("os")?
        .call_method("register_at_fork", (), Some(&hooks))?;
    Ok(())
}
