//! The memory of a Python object, borrowed while an operation needs it.

use pyo3::ffi;
use pyo3::prelude::*;

use crate::runtime::decref;

/// An exported, contiguous buffer. While it is held the object cannot be resized or freed.
///
/// It may be dropped without the GIL; the export is then released by `decref`.
pub struct Borrowed {
    view: Option<Box<ffi::Py_buffer>>,
}

// SAFETY: the memory stays put while exported; the operation's cell serialises access to it.
unsafe impl Send for Borrowed {}
unsafe impl Sync for Borrowed {}

impl Borrowed {
    pub fn readable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::export(object, ffi::PyBUF_SIMPLE)
    }

    pub fn writable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::export(object, ffi::PyBUF_WRITABLE)
    }

    /// Takes over an exported view. The caller does not release it.
    pub fn adopt(view: ffi::Py_buffer) -> Self {
        Borrowed {
            view: Some(Box::new(view)),
        }
    }

    fn export(object: &Bound<'_, PyAny>, flags: std::os::raw::c_int) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: a live object and a view that outlives the call.
        if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &mut *view, flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        Ok(Borrowed { view: Some(view) })
    }

    fn parts(&self) -> (*mut u8, usize) {
        match &self.view {
            Some(view) if view.len > 0 => (view.buf.cast(), view.len as usize),
            _ => (std::ptr::NonNull::dangling().as_ptr(), 0),
        }
    }

    pub fn len(&self) -> usize {
        self.parts().1
    }

    pub fn bytes(&self) -> &[u8] {
        let (start, length) = self.parts();
        // SAFETY: exported memory. If Python code changes it meanwhile, the changed bytes are sent.
        unsafe { std::slice::from_raw_parts(start, length) }
    }

    /// The memory as a raw slice. It may be written only if the buffer was borrowed as writable.
    pub fn memory(&self) -> *mut [u8] {
        let (start, length) = self.parts();
        std::ptr::slice_from_raw_parts_mut(start, length)
    }

    /// Copy `data` to `offset`; the caller has checked that it fits.
    pub fn fill(&self, offset: usize, data: &[u8]) {
        let (start, length) = self.parts();
        assert!(offset + data.len() <= length);
        // SAFETY: inside the exported, writable memory. A raw copy: no Rust reference to memory
        // that Python may read at the same time is ever formed.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), start.add(offset), data.len()) };
    }

    /// Releases the export now. The caller holds no lock of ours.
    pub fn release(mut self, _py: Python<'_>) {
        if let Some(mut view) = self.view.take() {
            // SAFETY: acquired above, released once, GIL held.
            unsafe { ffi::PyBuffer_Release(&mut *view) };
        }
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if let Some(view) = self.view.take() {
            decref::defer(decref::Deferred::Buffer(view));
        }
    }
}
