//! Element-wise reductions of raw memory, of any number of inputs.
//!
//! `python/nexar_native/reduce.pyi` is the contract of the Python module. Other Rust modules call `fold_slices` and
//! `combine`, which need no Python.
//!
//! Every result has the bits that NumPy computes, except for the payload of a NaN. So it does not matter which of the
//! ranks that compute the same element use this module, and none has to know.

mod codes;
mod elements;
mod fold;
mod kernels;
mod methods;
mod narrow;
mod python;

pub use codes::{itemsize, op_named};
#[allow(unused_imports)] // for the modules that reduce without Python
pub use fold::{combine, fold_slices, Invalid};
pub use methods::is_supported;
pub use python::module;
