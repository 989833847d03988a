//! The memory of transfers: regions of Python objects that workers read, fill and reduce into without the GIL.
//!
//! `unsafe`: raw reads and writes of exported memory. A `Region` keeps its export until it is dropped, so the memory
//! stays where it is. Python code may use it at the same time, which gives arbitrary bytes, as with any buffer. The
//! gate of the transfer (`transfers.rs`) ends all accesses before a region is given back.

use pyo3::prelude::*;

use crate::reduce;
use crate::runtime::buffer::Borrowed;

/// How received elements are combined with those in the destination.
#[derive(Clone, Copy, Debug)]
pub struct Reduction {
    pub op: u8,
    pub dtype: u8,
    /// destination = received ⊕ destination, instead of destination ⊕ received.
    pub before: bool,
    pub itemsize: usize,
}

/// Exported memory of one transfer.
pub struct Region(Borrowed);

impl Region {
    pub fn readable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Borrowed::readable(object).map(Region)
    }

    pub fn writable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        Borrowed::writable(object).map(Region)
    }

    pub fn length(&self) -> u64 {
        self.0.len() as u64
    }

    /// A part of the memory. Panics if it is not inside.
    pub fn part(&self, offset: u64, length: usize) -> *mut [u8] {
        let offset = usize::try_from(offset).expect("an offset in memory");
        assert!(offset <= self.0.len() && length <= self.0.len() - offset);
        let start = self.0.memory().cast::<u8>();
        // SAFETY: inside the exported memory, by the check above.
        std::ptr::slice_from_raw_parts_mut(unsafe { start.add(offset) }, length)
    }

    /// A part of the memory, to be sent.
    pub fn bytes(&self, offset: u64, length: usize) -> &[u8] {
        let part = self.part(offset, length);
        // SAFETY: exported memory. If Python code changes it meanwhile, changed bytes are sent.
        unsafe { &*part.cast_const() }
    }

    pub fn fill(&self, offset: u64, data: &[u8]) {
        let part = self.part(offset, data.len());
        // SAFETY: inside exported, writable memory; `data` is a buffer of ours.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), part.cast(), data.len()) };
    }

    /// Combines whole elements.
    pub fn combine(&self, offset: u64, data: &[u8], reduction: Reduction) {
        let part = self.part(offset, data.len());
        let Reduction {
            op, dtype, before, ..
        } = reduction;
        // SAFETY: inside exported, writable memory, which only workers write, each another range; `data` is ours.
        let combined = unsafe { reduce::combine(part, data, op, dtype, before) };
        debug_assert!(combined.is_ok()); // checked when the transfer was expected
    }

    /// Copies a range to the same place in another region, which may overlap this one.
    pub fn copy_to(&self, other: &Region, begin: u64, end: u64) {
        let length = usize::try_from(end - begin).expect("a length in memory");
        let (from, to) = (self.part(begin, length), other.part(begin, length));
        // SAFETY: both are inside exported memory, and `other` is writable.
        unsafe { std::ptr::copy(from.cast::<u8>().cast_const(), to.cast(), length) };
    }

    /// Releases the export now. No lock of ours is held.
    pub fn release(self, py: Python<'_>) {
        self.0.release(py);
    }
}
