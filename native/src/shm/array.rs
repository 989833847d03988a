//! The memory of an array that takes the fast path.
//!
//! `unsafe`: the buffer protocol. A view is released exactly once: by its drop, or by the `Borrowed` that it becomes.

use std::ffi::CStr;
use std::mem::ManuallyDrop;

use pyo3::ffi;
use pyo3::prelude::*;

use crate::runtime::buffer::Borrowed;

/// A writable, contiguous buffer of known element type, exported for the duration of a call. Needs the GIL.
pub struct ArrayView {
    view: ffi::Py_buffer,
    pub dtype: u8,
}

impl ArrayView {
    /// None if the memory has another form.
    #[inline]
    pub fn of(object: &Bound<'_, PyAny>) -> Option<Self> {
        let mut view = ffi::Py_buffer::new();
        let flags = ffi::PyBUF_C_CONTIGUOUS | ffi::PyBUF_WRITABLE | ffi::PyBUF_FORMAT;
        // SAFETY: a live object, and a view that is released unless this fails.
        if unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &mut view, flags) } != 0 {
            drop(PyErr::take(object.py()));
            return None;
        }
        let mut array = ArrayView { view, dtype: 0 };
        array.dtype = array.dtype_of_format()?;
        Some(array)
    }

    /// Only native byte order: other formats have a prefix.
    fn dtype_of_format(&self) -> Option<u8> {
        if self.view.format.is_null() {
            return None;
        }
        // SAFETY: a C string that lives as long as the view.
        let format = unsafe { CStr::from_ptr(self.view.format) }.to_bytes();
        let size = self.view.itemsize;
        match (format, size) {
            (b"?", 1) => Some(1),
            (b"b" | b"h" | b"i" | b"l" | b"q", 1 | 2 | 4 | 8) => Some(2 + size.ilog2() as u8),
            (b"B" | b"H" | b"I" | b"L" | b"Q", 1 | 2 | 4 | 8) => Some(6 + size.ilog2() as u8),
            (b"e", 2) => Some(10),
            (b"f", 4) => Some(11),
            (b"d", 8) => Some(12),
            (b"Zf", 8) => Some(13),
            (b"Zd", 16) => Some(14),
            _ => None,
        }
    }

    pub fn memory(&self) -> *mut [u8] {
        std::ptr::slice_from_raw_parts_mut(self.view.buf.cast(), self.view.len as usize)
    }

    pub fn bytes(&self) -> usize {
        self.view.len as usize
    }

    pub fn count(&self) -> i64 {
        (self.view.len / self.view.itemsize) as i64
    }

    /// Keeps the export for longer than the call.
    pub fn into_borrowed(self) -> Borrowed {
        let view = ManuallyDrop::new(self);
        // SAFETY: the view is not used, nor released, here any longer.
        Borrowed::adopt(unsafe { std::ptr::read(&view.view) })
    }
}

impl Drop for ArrayView {
    fn drop(&mut self) {
        // SAFETY: exported by `of`, released once. The GIL is held, since a view does not leave its call.
        unsafe { ffi::PyBuffer_Release(&mut self.view) };
    }
}
