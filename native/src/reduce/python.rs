//! The Python module `nexar_native.reduce`.
//!
//! `unsafe`: the memory of Python objects. Their buffers stay exported, so the memory stays valid, until the fold has
//! ended. Python code that writes it meanwhile in another thread gets arbitrary numbers, as with NumPy.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::fold::{fold_slices, Invalid};
use super::methods::methods;
use crate::runtime::buffer::Borrowed;
use crate::runtime::process;

/// Raised when results change for any input that is not NaN.
const VERSION: u32 = 1;
/// From this length the GIL is released: below, taking it again may wait longer than the fold takes.
const RELEASE_GIL_BYTES: usize = 64 << 10;

/// Whether `fold` computes this operation of this element type.
#[pyfunction]
fn supported(op: i64, dtype: i64) -> bool {
    methods().find(code(op), code(dtype)).is_some()
}

/// 0 is no code.
fn code(number: i64) -> u8 {
    u8::try_from(number).unwrap_or(0)
}

/// out = ((in0 ⊕ in1) ⊕ …) / divisor.
#[pyfunction]
#[pyo3(signature = (out, inputs, op, dtype, divisor = 1))]
fn fold(
    py: Python<'_>,
    out: &Bound<'_, PyAny>,
    inputs: &Bound<'_, PyAny>,
    op: i64,
    dtype: i64,
    divisor: u64,
) -> PyResult<()> {
    let out = Borrowed::writable(out)?;
    let mut borrowed = Vec::new();
    let exported = export(inputs, &mut borrowed);
    let done =
        exported.map(|()| fold_borrowed(py, &out, &borrowed, (code(op), code(dtype)), divisor));
    out.release(py);
    borrowed.into_iter().for_each(|input| input.release(py));
    done?.map_err(|invalid| PyValueError::new_err(invalid.message()))
}

/// Appends the buffers of all inputs. After an error those that were exported are in `borrowed`.
fn export(inputs: &Bound<'_, PyAny>, borrowed: &mut Vec<Borrowed>) -> PyResult<()> {
    for input in inputs.try_iter()? {
        borrowed.push(Borrowed::readable(&input?)?);
    }
    Ok(())
}

fn fold_borrowed(
    py: Python<'_>,
    out: &Borrowed,
    inputs: &[Borrowed],
    (op, dtype): (u8, u8),
    divisor: u64,
) -> Result<(), Invalid> {
    let work = || {
        let inputs: Vec<*const [u8]> = inputs.iter().map(|one| one.memory().cast_const()).collect();
        // SAFETY: exported memory of these lengths; `out` was exported as writable.
        unsafe { fold_slices(out.memory(), &inputs, op, dtype, divisor) }
    };
    match out.len() {
        RELEASE_GIL_BYTES.. => process::detached(py, work),
        _ => work(),
    }
}

pub fn module(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    let module = PyModule::new(py, "nexar_native.reduce")?;
    module.setattr("__doc__", "Element-wise reductions of raw memory.")?;
    methods(); // chooses the instruction set now, not in the first call
    module.add("VERSION", VERSION)?;
    module.add_function(wrap_pyfunction!(supported, &module)?)?;
    module.add_function(wrap_pyfunction!(fold, &module)?)?;
    Ok(module)
}
