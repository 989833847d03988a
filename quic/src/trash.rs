//! References to Python objects that had to be let go by a thread without the GIL, or under an
//! endpoint's lock.
//!
//! Releasing a reference may run arbitrary Python code, which may call into the same endpoint. So
//! it happens only with the GIL held and no lock of ours: such references are put here, and the
//! next call from Python that enters this module empties the bin.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pyo3::ffi;
use pyo3::prelude::*;

pub enum Item {
    Buffer(Box<ffi::Py_buffer>),
}

// SAFETY: a Py_buffer is inert until it is released, which happens with the GIL held.
unsafe impl Send for Item {}

/// Leaf lock, held for a few instructions.
pub static BIN: Mutex<Vec<Item>> = Mutex::new(Vec::new());
static FULL: AtomicBool = AtomicBool::new(false);

pub fn put(item: Item) {
    BIN.lock().push(item);
    FULL.store(true, Ordering::Release);
}

/// The argument is the proof that the GIL is held; the caller holds no lock of ours.
pub fn empty(_py: Python<'_>) {
    if !FULL.load(Ordering::Acquire) {
        return;
    }
    let items = {
        let mut bin = BIN.lock();
        FULL.store(false, Ordering::Relaxed);
        std::mem::take(&mut *bin)
    };
    for item in items {
        match item {
            // SAFETY: acquired by PyObject_GetBuffer, released once, GIL held.
            Item::Buffer(mut view) => unsafe { ffi::PyBuffer_Release(&mut *view) },
        }
    }
}
