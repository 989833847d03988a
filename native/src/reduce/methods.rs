//! The method for each operation and element type, and the choice of the instruction set.

use std::sync::OnceLock;

use super::codes::{is_defined, DType, Kind, Op};
use super::elements::{
    And, Arithmetic, BitAnd, BitOr, BitXor, Maximum, Minimum, Or, Ordered, Product, Sum, Truth, Xor,
};
use super::kernels::{Baseline, Conversion, Costly, Divide, Isa, Kernel};
use super::narrow::{Bf16, F8e4m3fn, F8e5m2};

/// How a reduction is computed.
#[derive(Clone, Copy)]
pub struct Method {
    pub itemsize: usize,
    pub kernel: Kernel,
    /// A logical operation: x ∨ x makes 0 or 1 of a single input.
    pub truth: Option<Kernel>,
    /// Divides a total; None unless the operation is an average.
    pub divide: Option<Divide>,
    /// Narrow floats: the kernel and the division work on f32.
    pub conversion: Option<Conversion>,
}

/// The methods of one instruction set, by the codes of operation and element type.
pub struct Methods {
    methods: [[Option<Method>; DType::ALL.len()]; Op::ALL.len()],
}

impl Methods {
    fn compiled_for<I: Isa>() -> Methods {
        let of = |op| DType::ALL.map(|dtype| method::<I>(op, dtype));
        Methods {
            methods: Op::ALL.map(of),
        }
    }

    /// Returns None for unknown codes and for a reduction that is not defined.
    pub fn find(&self, op: u8, dtype: u8) -> Option<&Method> {
        let row = self.methods.get((op as usize).wrapping_sub(1))?;
        row.get((dtype as usize).wrapping_sub(1))?.as_ref()
    }
}

/// The methods for this processor. The first call chooses them.
pub fn methods() -> &'static Methods {
    static METHODS: OnceLock<Methods> = OnceLock::new();
    METHODS.get_or_init(|| {
        let mut supported = every_supported();
        supported.pop().expect("the baseline is always supported")
    })
}

/// Whether the codes are those of a reduction that is defined.
pub fn is_supported(op: u8, dtype: u8) -> bool {
    methods().find(op, dtype).is_some()
}

/// The methods of each instruction set that this processor has; the last is the fastest.
pub fn every_supported() -> Vec<Methods> {
    #[allow(unused_mut)]
    let mut found = vec![Methods::compiled_for::<Baseline>()];
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        found.push(Methods::compiled_for::<super::kernels::Avx2>());
        #[cfg(has_avx512)]
        if has_avx512() {
            found.push(Methods::compiled_for::<super::kernels::Avx512>());
        }
    }
    found
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
}

#[cfg(all(target_arch = "x86_64", has_avx512))]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

fn method<I: Isa>(op: Op, dtype: DType) -> Option<Method> {
    if !is_defined(op, dtype) {
        return None;
    }
    Some(Method {
        itemsize: dtype.itemsize(),
        kernel: kernel::<I>(op, dtype),
        truth: op.is_logical().then(|| kernel::<I>(Op::Lor, dtype)),
        divide: (op == Op::Avg).then(|| divide::<I>(dtype)),
        conversion: conversion::<I>(dtype),
    })
}

/// The kernel of a defined reduction. Operations with the same bits share one: signed and unsigned integers, complex
/// and real sums, bits of all widths.
fn kernel<I: Isa>(op: Op, dtype: DType) -> Kernel {
    match dtype {
        _ if dtype.kind() == Kind::Integer && matches!(op, Op::Band | Op::Bor | Op::Bxor) => {
            bits::<I>(op)
        }
        DType::Bool => booleans::<I>(op),
        DType::I8 | DType::I16 | DType::I32 | DType::I64 if matches!(op, Op::Min | Op::Max) => {
            signed_order::<I>(op, dtype)
        }
        DType::I8 | DType::U8 => real::<I, u8>(op),
        DType::I16 | DType::U16 => real::<I, u16>(op),
        DType::I32 | DType::U32 => real::<I, u32>(op),
        DType::I64 | DType::U64 => real::<Costly<I>, u64>(op),
        DType::F32 => real::<I, f32>(op),
        DType::F16 | DType::Bf16 | DType::F8e4m3fn | DType::F8e5m2 => real::<Costly<I>, f32>(op),
        DType::F64 => real::<I, f64>(op),
        DType::C64 => complex::<I, f32>(op),
        DType::C128 => complex::<I, f64>(op),
    }
}

fn bits<I: Isa>(op: Op) -> Kernel {
    match op {
        Op::Band => I::kernel::<BitAnd>(),
        Op::Bor => I::kernel::<BitOr>(),
        _ => I::kernel::<BitXor>(),
    }
}

/// As in NumPy the sum is "or" and the product "and". A byte other than 0 and 1 counts as true.
fn booleans<I: Isa>(op: Op) -> Kernel {
    match op {
        Op::Sum | Op::Max | Op::Bor | Op::Lor => I::kernel::<Or<u8>>(),
        Op::Bxor | Op::Lxor => I::kernel::<Xor<u8>>(),
        _ => I::kernel::<And<u8>>(),
    }
}

fn signed_order<I: Isa>(op: Op, dtype: DType) -> Kernel {
    match dtype {
        DType::I8 => order::<I, i8>(op),
        DType::I16 => order::<I, i16>(op),
        DType::I32 => order::<I, i32>(op),
        _ => order::<Costly<I>, i64>(op),
    }
}

fn order<I: Isa, E: Ordered>(op: Op) -> Kernel {
    match op {
        Op::Min => I::kernel::<Minimum<E>>(),
        _ => I::kernel::<Maximum<E>>(),
    }
}

fn real<I: Isa, E: Arithmetic + Ordered + Truth>(op: Op) -> Kernel {
    match op {
        Op::Sum | Op::Avg => I::kernel::<Sum<E>>(),
        Op::Prod => I::kernel::<Product<E>>(),
        Op::Min | Op::Max => order::<I, E>(op),
        _ => logic::<I, E>(op),
    }
}

fn complex<I: Isa, E: Arithmetic>(op: Op) -> Kernel
where
    [E; 2]: Arithmetic + Truth,
{
    match op {
        Op::Sum | Op::Avg => I::kernel::<Sum<E>>(), // part by part
        Op::Prod => I::kernel::<Product<[E; 2]>>(),
        _ => logic::<I, [E; 2]>(op),
    }
}

fn logic<I: Isa, E: Truth>(op: Op) -> Kernel {
    match op {
        Op::Land => I::kernel::<And<E>>(),
        Op::Lor => I::kernel::<Or<E>>(),
        _ => I::kernel::<Xor<E>>(),
    }
}

fn divide<I: Isa>(dtype: DType) -> Divide {
    match dtype {
        DType::F64 => I::divide::<f64>(),
        DType::C64 => I::divide::<[f32; 2]>(),
        DType::C128 => I::divide::<[f64; 2]>(),
        _ => I::divide::<f32>(),
    }
}

fn conversion<I: Isa>(dtype: DType) -> Option<Conversion> {
    match dtype {
        DType::F16 => Some(I::half()),
        DType::Bf16 => Some(I::conversion::<Bf16>()),
        DType::F8e4m3fn => Some(I::conversion::<F8e4m3fn>()),
        DType::F8e5m2 => Some(I::conversion::<F8e5m2>()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_the_defined_reductions_have_a_method() {
        for methods in every_supported() {
            for op in Op::ALL {
                for dtype in DType::ALL {
                    let found = methods.find(op as u8, dtype as u8).is_some();
                    assert_eq!(found, is_defined(op, dtype), "{op:?} {dtype:?}");
                }
            }
        }
    }

    #[test]
    fn unknown_codes_have_no_method() {
        for (op, dtype) in [(0, 1), (12, 1), (1, 0), (1, 18), (255, 255)] {
            assert!(methods().find(op, dtype).is_none());
        }
    }
}
