//! References to Python objects that are dropped without the GIL or under an endpoint's lock.
//!
//! Releasing a reference may run arbitrary Python code, which may call into the same endpoint. So
//! it happens only with the GIL and without any lock of ours: such references are stored here, and
//! the next call from Python into this module releases them.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pyo3::ffi;
use pyo3::prelude::*;

pub enum Deferred {
    Buffer(Box<ffi::Py_buffer>),
}

// SAFETY: a Py_buffer is inert until it is released, which happens with the GIL held.
unsafe impl Send for Deferred {}

/// Leaf lock, held for a few instructions.
pub static DEFERRED: Mutex<Vec<Deferred>> = Mutex::new(Vec::new());
static ANY_DEFERRED: AtomicBool = AtomicBool::new(false);

pub fn defer(item: Deferred) {
    DEFERRED.lock().push(item);
    ANY_DEFERRED.store(true, Ordering::Release);
}

/// Releases what was deferred. `_py` proves that the GIL is held. The caller holds no lock of ours.
pub fn release_deferred(_py: Python<'_>) {
    if !ANY_DEFERRED.load(Ordering::Acquire) {
        return;
    }
    let items = {
        let mut deferred = DEFERRED.lock();
        ANY_DEFERRED.store(false, Ordering::Relaxed);
        std::mem::take(&mut *deferred)
    };
    for item in items {
        match item {
            // SAFETY: acquired by PyObject_GetBuffer, released once, GIL held.
            Deferred::Buffer(mut view) => unsafe { ffi::PyBuffer_Release(&mut *view) },
        }
    }
}
