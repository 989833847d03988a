//! Left folds of raw memory, in blocks whose running total stays in the first-level cache.
//!
//! `unsafe`: callers pass raw memory because it belongs to Python objects, or to a region that other processes write.
//! Every pointer that is passed on is inside the memory of the caller or of this function's own blocks.

use std::mem::MaybeUninit;

use super::kernels::{Conversion, Kernel};
use super::methods::{methods, Method};

/// Bytes of a block. One of the total, one of a widened operand and the lines of the inputs fit 32 KiB.
const BLOCK: usize = 8 << 10;
/// f32 elements of a block.
const WIDE: usize = BLOCK / size_of::<f32>();

/// Why a reduction is rejected. No memory was touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalid {
    /// Unknown codes, or an operation that is not defined for the element type.
    Undefined,
    NoInput,
    /// An input is not as long as the result.
    Length,
    /// The length is not a multiple of the element size.
    Partial,
    /// 0, or not 1 although the operation is not an average.
    Divisor,
}

impl Invalid {
    pub fn message(self) -> &'static str {
        match self {
            Invalid::Undefined => "this operation is not defined for this element type",
            Invalid::NoInput => "a fold needs at least one input",
            Invalid::Length => "out and all inputs must have the same length",
            Invalid::Partial => "the length is not a multiple of the element size",
            Invalid::Divisor => "the divisor must be positive, and 1 except for an average",
        }
    }
}

/// out = ((in0 ⊕ in1) ⊕ …) / divisor. Memory that overlaps `out` is read as it was before the call.
///
/// # Safety
/// `out` is valid for writes and every input for reads of its length, without alignment. Nobody else writes the memory
/// or reads `out` during the call; if another process does so nevertheless, the results are arbitrary numbers.
pub unsafe fn fold_slices(
    out: *mut [u8],
    inputs: &[*const [u8]],
    op: u8,
    dtype: u8,
    divisor: u64,
) -> Result<(), Invalid> {
    let method = methods().find(op, dtype).ok_or(Invalid::Undefined)?;
    // SAFETY: the caller's promise is passed on.
    unsafe { fold_by(method, out, inputs, divisor) }
}

/// dest = dest ⊕ incoming; with `before`: dest = incoming ⊕ dest. An average is only summed.
///
/// # Safety
/// As of `fold_slices`, with `dest` as the result.
#[allow(dead_code)] // for the modules that receive directly into a destination
pub unsafe fn combine(
    dest: *mut [u8],
    incoming: *const [u8],
    op: u8,
    dtype: u8,
    before: bool,
) -> Result<(), Invalid> {
    let inputs = match before {
        true => [incoming, dest.cast_const()],
        false => [dest.cast_const(), incoming],
    };
    // SAFETY: the caller's promise is passed on; `dest` may be an input.
    unsafe { fold_slices(dest, &inputs, op, dtype, 1) }
}

/// # Safety
/// As of `fold_slices`; the processor supports the method.
unsafe fn fold_by(
    method: &Method,
    out: *mut [u8],
    inputs: &[*const [u8]],
    divisor: u64,
) -> Result<(), Invalid> {
    check(method, out.len(), inputs, divisor)?;
    if out.is_empty() {
        return Ok(());
    }
    // SAFETY: the caller's promise, and all lengths are equal. Inputs that overlap `out` elsewhere are copied first,
    // so the kernels see equal or separate memory only.
    unsafe {
        let copies: Vec<Vec<u8>> = inputs
            .iter()
            .filter(|input| overlaps_elsewhere(out, **input))
            .map(|input| copied(*input))
            .collect();
        if copies.is_empty() {
            return run(method, out, inputs, divisor);
        }
        let mut copies = copies.iter();
        let separate: Vec<*const [u8]> = inputs
            .iter()
            .map(|input| match overlaps_elsewhere(out, *input) {
                true => copies.next().map_or(*input, |copy| copy.as_slice()),
                false => *input,
            })
            .collect();
        run(method, out, &separate, divisor)
    }
}

fn check(
    method: &Method,
    length: usize,
    inputs: &[*const [u8]],
    divisor: u64,
) -> Result<(), Invalid> {
    let allowed = method.divide.is_some() && divisor > 0 || divisor == 1;
    match () {
        _ if inputs.is_empty() => Err(Invalid::NoInput),
        _ if inputs.iter().any(|input| input.len() != length) => Err(Invalid::Length),
        _ if length % method.itemsize != 0 => Err(Invalid::Partial),
        _ if !allowed => Err(Invalid::Divisor),
        _ => Ok(()),
    }
}

fn overlaps_elsewhere(out: *mut [u8], input: *const [u8]) -> bool {
    let distance = out.cast::<u8>().addr().abs_diff(input.cast::<u8>().addr());
    distance != 0 && distance < out.len()
}

/// # Safety
/// `input` is valid for reads.
unsafe fn copied(input: *const [u8]) -> Vec<u8> {
    let mut copy = Vec::with_capacity(input.len());
    // SAFETY: the capacity is the length, and the new memory is separate.
    unsafe {
        std::ptr::copy_nonoverlapping(input.cast(), copy.as_mut_ptr(), input.len());
        copy.set_len(input.len());
    }
    copy
}

/// # Safety
/// As of `fold_by`, with at least one input, and inputs that begin where `out` begins or are separate.
unsafe fn run(
    method: &Method,
    out: *mut [u8],
    inputs: &[*const [u8]],
    divisor: u64,
) -> Result<(), Invalid> {
    let (length, out) = (out.len(), out.cast::<u8>());
    let divide = method.divide.filter(|_| divisor != 1);
    // SAFETY: the caller's promise is passed on.
    unsafe {
        match (inputs, divide, method.truth) {
            ([only], None, None) => std::ptr::copy(only.cast(), out, length),
            _ => match method.conversion {
                Some(conversion) => fold_narrow(method, conversion, out, inputs, length, divisor),
                None => fold_plain(method, out, inputs, length, divisor),
            },
        }
    }
    Ok(())
}

/// A block in the stack frame. Its address is known to be separate from all other memory.
#[repr(align(64))]
struct Block([MaybeUninit<u8>; BLOCK]);

impl Block {
    const fn new() -> Block {
        Block([const { MaybeUninit::uninit() }; BLOCK])
    }

    fn start(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}

/// # Safety
/// As of `run`.
unsafe fn fold_plain(
    method: &Method,
    out: *mut u8,
    inputs: &[*const [u8]],
    length: usize,
    divisor: u64,
) {
    let divide = method.divide.filter(|_| divisor != 1);
    // The total is in `out`, unless an input that is read after the total is first written is there too.
    let again = |input: &*const [u8]| input.cast() == out.cast_const();
    let separate = inputs.len() > 2 && inputs[1..].iter().any(again);
    let block = if inputs.len() <= 2 && divide.is_none() {
        length
    } else {
        BLOCK
    };
    let mut spare = Block::new();
    for start in (0..length).step_by(block) {
        let bytes = block.min(length - start);
        // SAFETY: start + bytes <= length, and `spare` is only used if bytes <= BLOCK.
        unsafe {
            let place = out.add(start);
            let total = if separate { spare.start() } else { place };
            let later = begin(method, total, inputs, start, bytes);
            go_on(&method.kernel, total, later, start, bytes);
            if let Some(divide) = divide {
                divide(total, bytes, divisor);
            }
            if separate {
                std::ptr::copy_nonoverlapping(total, place, bytes);
            }
        }
    }
}

/// Folds the first inputs into `total`, or makes the total of the only one. Returns the others.
///
/// # Safety
/// As of `run`, for `bytes` from `start`.
unsafe fn begin<'a>(
    method: &Method,
    total: *mut u8,
    inputs: &'a [*const [u8]],
    start: usize,
    bytes: usize,
) -> &'a [*const [u8]] {
    let kernel = &method.kernel;
    // SAFETY: the caller's promise is passed on. Only the first two inputs may be where `total` is.
    unsafe {
        let at = |index: usize| inputs[index].cast::<u8>().add(start);
        let first_is_total = total.cast_const() == at(0);
        match (inputs, &method.truth) {
            ([_], Some(or)) => (or.map)(total, [at(0), at(0)], bytes),
            ([_], None) => std::ptr::copy(at(0), total, bytes),
            _ if first_is_total => return &inputs[1..],
            ([_, _], _) if total.cast_const() == at(1) => {
                (kernel.assign_reversed)(total, [at(0)], bytes)
            }
            ([_, _, _, _, later @ ..], _) => {
                (kernel.map_four)(total, [at(0), at(1), at(2), at(3)], bytes);
                return later;
            }
            _ => (kernel.map)(total, [at(0), at(1)], bytes),
        }
    }
    inputs.get(2..).unwrap_or_default()
}

/// total = (total ⊕ in0) ⊕ …
///
/// # Safety
/// As of `begin`.
unsafe fn go_on(
    kernel: &Kernel,
    total: *mut u8,
    inputs: &[*const [u8]],
    start: usize,
    bytes: usize,
) {
    // SAFETY: the caller's promise is passed on.
    let at = |input: &*const [u8]| unsafe { input.cast::<u8>().add(start) };
    let groups = inputs.chunks_exact(3);
    // SAFETY: the caller's promise is passed on.
    unsafe {
        for group in groups.clone() {
            (kernel.assign_three)(total, [at(&group[0]), at(&group[1]), at(&group[2])], bytes);
        }
        for input in groups.remainder() {
            (kernel.assign)(total, [at(input)], bytes);
        }
    }
}

/// Folds in f32 and rounds once.
///
/// # Safety
/// As of `run`.
unsafe fn fold_narrow(
    method: &Method,
    conversion: Conversion,
    out: *mut u8,
    inputs: &[*const [u8]],
    length: usize,
    divisor: u64,
) {
    let divide = method.divide.filter(|_| divisor != 1);
    let (mut total, mut operand) = (Block::new(), Block::new());
    let (total, operand) = (total.start(), operand.start());
    for start in (0..length).step_by(WIDE * method.itemsize) {
        let count = WIDE.min((length - start) / method.itemsize);
        let bytes = count * size_of::<f32>();
        // SAFETY: `count` elements from `start` are inside the inputs and `out`, and fill at most a block. All inputs
        // are read before `out` is written.
        unsafe {
            (conversion.widen)(total, inputs[0].cast::<u8>().add(start), count);
            if let ([_], Some(or)) = (inputs, &method.truth) {
                (or.assign)(total, [total.cast_const()], bytes);
            }
            for input in &inputs[1..] {
                (conversion.widen)(operand, input.cast::<u8>().add(start), count);
                (method.kernel.assign)(total, [operand.cast_const()], bytes);
            }
            if let Some(divide) = divide {
                divide(total, bytes, divisor);
            }
            (conversion.round)(out.add(start), total, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::codes::{is_defined, DType, Op};
    use super::super::methods::{every_supported, Methods};
    use super::*;

    /// Bytes with a period that is prime to all sizes (an xorshift sequence).
    fn bytes(count: usize, seed: u64) -> Vec<u8> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        };
        (0..count).map(|_| next()).collect()
    }

    fn folded(
        methods: &Methods,
        op: Op,
        dtype: DType,
        inputs: &[Vec<u8>],
        divisor: u64,
    ) -> Vec<u8> {
        let method = methods.find(op as u8, dtype as u8).unwrap();
        let mut out = vec![0; inputs[0].len()];
        let inputs: Vec<*const [u8]> = inputs.iter().map(|one| one.as_slice() as _).collect();
        // SAFETY: separate vectors of one length, and a method that this processor supports.
        unsafe { fold_by(method, out.as_mut_slice(), &inputs, divisor) }.unwrap();
        out
    }

    /// Replaces every NaN by one: which payload wins may depend on the instruction.
    fn without_payloads(dtype: DType, mut data: Vec<u8>) -> Vec<u8> {
        match dtype {
            DType::F32 | DType::C64 => data.chunks_exact_mut(4).for_each(|one| {
                if f32::from_ne_bytes((&*one).try_into().unwrap()).is_nan() {
                    one.copy_from_slice(&f32::NAN.to_ne_bytes());
                }
            }),
            DType::F64 | DType::C128 => data.chunks_exact_mut(8).for_each(|one| {
                if f64::from_ne_bytes((&*one).try_into().unwrap()).is_nan() {
                    one.copy_from_slice(&f64::NAN.to_ne_bytes());
                }
            }),
            DType::F16 => canonical_nan::<2>(&mut data, 0x7c00),
            DType::Bf16 => canonical_nan::<2>(&mut data, 0x7f80),
            DType::F8e5m2 => canonical_nan::<1>(&mut data, 0x7c),
            DType::F8e4m3fn => canonical_nan::<1>(&mut data, 0x7e),
            _ => (),
        }
        data
    }

    fn canonical_nan<const SIZE: usize>(data: &mut [u8], infinity: u16) {
        for one in data.chunks_exact_mut(SIZE) {
            let mut wide = [0; 2];
            wide[..SIZE].copy_from_slice(one);
            let magnitude = u16::from_le_bytes(wide) & (0xffff >> (17 - 8 * SIZE));
            if magnitude > infinity {
                one.fill(0x7f);
            }
        }
    }

    #[test]
    fn all_instruction_sets_compute_the_same_bits() {
        let all = every_supported();
        for op in Op::ALL {
            for dtype in DType::ALL
                .into_iter()
                .filter(|dtype| is_defined(op, *dtype))
            {
                for (count, size) in [(1, 2), (37, 3), (67, 1), (5000, 2), (3001, 8), (2100, 6)] {
                    let length = count * dtype.itemsize();
                    let inputs: Vec<_> = (0..size).map(|seed| bytes(length, seed + 1)).collect();
                    let divisor = if op == Op::Avg { 3 } else { 1 };
                    let of = |methods| {
                        let data = folded(methods, op, dtype, &inputs, divisor);
                        without_payloads(dtype, data)
                    };
                    let wanted = of(&all[0]);
                    for methods in &all[1..] {
                        assert_eq!(of(methods), wanted, "{op:?} {dtype:?} {count} {size}");
                    }
                }
            }
        }
    }

    fn floats(data: &[f32]) -> Vec<u8> {
        data.iter().flat_map(|one| one.to_ne_bytes()).collect()
    }

    const MIN: u8 = Op::Min as u8;
    const SUM: u8 = Op::Sum as u8;
    const FLOAT: u8 = DType::F32 as u8;

    #[test]
    fn incoming_data_is_combined_before_or_after_the_destination() {
        for (before, wanted) in [(false, 0f32), (true, -0f32)] {
            let (mut dest, incoming) = (floats(&[-0.0, 3.0]), floats(&[0.0, 2.0]));
            // SAFETY: separate vectors of one length.
            unsafe { combine(dest.as_mut_slice(), incoming.as_slice(), MIN, FLOAT, before) }
                .unwrap();
            let order_matters = cfg!(not(target_arch = "aarch64"));
            let zero = if order_matters { wanted } else { -0f32 };
            assert_eq!(dest, floats(&[zero, 2.0]));
        }
    }

    #[test]
    fn the_destination_may_be_what_comes_in() {
        let mut data = floats(&[1.0, 2.0, 3.0]);
        let dest: *mut [u8] = data.as_mut_slice();
        // SAFETY: one vector, which both pointers are of.
        unsafe { combine(dest, dest.cast_const(), SUM, FLOAT, false) }.unwrap();
        assert_eq!(data, floats(&[2.0, 4.0, 6.0]));
    }

    #[test]
    fn overlapping_memory_is_read_as_it_was() {
        for count in [10, 5000] {
            for (out, left, right) in [(1, 0, 2), (0, 2, 1), (2, 1, 0)] {
                let mut data: Vec<f32> = (0..count + 2).map(|one| one as f32).collect();
                let wanted: Vec<f32> = (0..count)
                    .map(|i| (i + left) as f32 + (i + right) as f32)
                    .collect();
                let start = data.as_mut_ptr();
                let at = |shift: usize| {
                    let part = start.wrapping_add(shift).cast::<u8>();
                    std::ptr::slice_from_raw_parts_mut(part, 4 * count)
                };
                let inputs = [at(left).cast_const(), at(right).cast_const()];
                // SAFETY: all parts are inside the vector.
                unsafe { fold_slices(at(out), &inputs, SUM, FLOAT, 1) }.unwrap();
                assert_eq!(data[out..out + count], wanted);
            }
        }
    }

    #[test]
    fn what_is_not_valid_touches_nothing() {
        let mut out = floats(&[7.0]);
        let (before, input, short) = (out.clone(), floats(&[1.0]), [0; 3]);
        let input: *const [u8] = input.as_slice();
        let avg = Op::Avg as u8;
        let mut refused = |inputs: &[*const [u8]], op, dtype, divisor| {
            // SAFETY: live vectors; lengths are checked.
            unsafe { fold_slices(out.as_mut_slice(), inputs, op, dtype, divisor) }
        };
        assert_eq!(refused(&[], SUM, FLOAT, 1), Err(Invalid::NoInput));
        assert_eq!(refused(&[input], 12, FLOAT, 1), Err(Invalid::Undefined));
        assert_eq!(refused(&[input], avg, 5, 1), Err(Invalid::Undefined));
        assert_eq!(refused(&[&short], SUM, FLOAT, 1), Err(Invalid::Length));
        assert_eq!(refused(&[input], SUM, 14, 1), Err(Invalid::Partial));
        assert_eq!(refused(&[input], SUM, FLOAT, 2), Err(Invalid::Divisor));
        assert_eq!(refused(&[input], avg, FLOAT, 0), Err(Invalid::Divisor));
        assert_eq!(out, before);
    }
}
