//! One loop per operation, compiled for each instruction set.
//!
//! Everything here is `unsafe` with one contract. The pointers are valid for `count` elements (a kernel: for `bytes`)
//! of reads, and those to be written for writes; none needs alignment. Memory that is written may overlap memory that
//! is read only if both begin at the same address. Another thread or process that writes the memory meanwhile makes
//! the results arbitrary numbers and nothing else: no address and no branch but a selection depends on an element.
//! No Rust reference to the memory is formed.

use std::marker::PhantomData;

use super::elements::{Binary, Quotient};
use super::narrow::{Narrow, F16};

pub type Map<const N: usize> = unsafe fn(out: *mut u8, inputs: [*const u8; N], bytes: usize);
pub type Assign<const N: usize> = unsafe fn(total: *mut u8, operands: [*const u8; N], bytes: usize);
pub type Divide = unsafe fn(total: *mut u8, bytes: usize, divisor: u64);
pub type Convert = unsafe fn(out: *mut u8, input: *const u8, count: usize);

/// The loops of one operation and element type. A loop over several inputs reads each byte of the total less often.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// out = in0 ⊕ in1
    pub map: Map<2>,
    /// out = ((in0 ⊕ in1) ⊕ in2) ⊕ in3
    pub map_four: Map<4>,
    /// total = total ⊕ operand
    pub assign: Assign<1>,
    /// total = ((total ⊕ operand0) ⊕ operand1) ⊕ operand2
    pub assign_three: Assign<3>,
    /// total = operand ⊕ total
    pub assign_reversed: Assign<1>,
}

/// The loops that convert one narrow float type.
#[derive(Clone, Copy)]
pub struct Conversion {
    pub widen: Convert,
    pub round: Convert,
}

/// One instruction set: its functions call the loops below and are compiled for it.
pub trait Isa {
    fn kernel<B: Binary>() -> Kernel;
    /// The kernel of an operation that is not bound by memory: of blocks that are in the cache, or of elements for which
    /// narrower vectors need several instructions.
    fn costly_kernel<B: Binary>() -> Kernel {
        Self::kernel::<B>()
    }
    fn divide<Q: Quotient>() -> Divide;
    fn conversion<N: Narrow>() -> Conversion;
    /// The conversion of f16, for which some processors have instructions.
    fn half() -> Conversion {
        Self::conversion::<F16>()
    }
}

/// An instruction set of which every kernel is the costly one.
pub struct Costly<I>(PhantomData<I>);

impl<I: Isa> Isa for Costly<I> {
    fn kernel<B: Binary>() -> Kernel {
        I::costly_kernel::<B>()
    }
    fn divide<Q: Quotient>() -> Divide {
        I::divide::<Q>()
    }
    fn conversion<N: Narrow>() -> Conversion {
        I::conversion::<N>()
    }
}

#[inline(always)]
unsafe fn map<B: Binary, const N: usize>(out: *mut u8, inputs: [*const u8; N], bytes: usize) {
    let out = out.cast::<B::Element>();
    let inputs = inputs.map(|input| input.cast::<B::Element>());
    for i in 0..bytes / size_of::<B::Element>() {
        // SAFETY: see the module; i is below the number of elements.
        unsafe {
            let mut total = inputs[0].add(i).read_unaligned();
            for input in &inputs[1..] {
                total = B::of(total, input.add(i).read_unaligned());
            }
            out.add(i).write_unaligned(total);
        }
    }
}

/// Separate from `map`: the compiler knows that the total is read where it is written, so it need not assume that an
/// element depends on the one before.
#[inline(always)]
unsafe fn assign<B: Binary, const N: usize>(
    total: *mut u8,
    operands: [*const u8; N],
    bytes: usize,
) {
    let place = total.cast::<B::Element>();
    let operands = operands.map(|operand| operand.cast::<B::Element>());
    for i in 0..bytes / size_of::<B::Element>() {
        // SAFETY: see the module; i is below the number of elements.
        unsafe {
            let mut total = place.add(i).read_unaligned();
            for operand in &operands {
                total = B::of(total, operand.add(i).read_unaligned());
            }
            place.add(i).write_unaligned(total);
        }
    }
}

#[inline(always)]
unsafe fn divide<Q: Quotient>(total: *mut u8, bytes: usize, divisor: u64) {
    let total = total.cast::<Q>();
    let divisor = Q::divisor(divisor);
    for i in 0..bytes / size_of::<Q>() {
        // SAFETY: see the module; i is below the number of elements.
        unsafe {
            total
                .add(i)
                .write_unaligned(total.add(i).read_unaligned().divide(divisor))
        };
    }
}

#[inline(always)]
unsafe fn widen<N: Narrow>(out: *mut u8, input: *const u8, count: usize) {
    let (out, input) = (out.cast::<f32>(), input.cast::<N::Bits>());
    for i in 0..count {
        // SAFETY: see the module; i is below the number of elements.
        unsafe {
            out.add(i)
                .write_unaligned(N::widen(input.add(i).read_unaligned()))
        };
    }
}

#[inline(always)]
unsafe fn round<N: Narrow>(out: *mut u8, input: *const u8, count: usize) {
    let (out, input) = (out.cast::<N::Bits>(), input.cast::<f32>());
    for i in 0..count {
        // SAFETY: see the module; i is below the number of elements.
        unsafe {
            out.add(i)
                .write_unaligned(N::round(input.add(i).read_unaligned()))
        };
    }
}

macro_rules! instruction_set {
    ($(#[$condition:meta])* $name:ident, $features:meta, $kernel:ident, $description:literal $(, $half:expr)?) => {
        #[doc = $description]
        $(#[$condition])*
        pub struct $name;

        // SAFETY of the calls: the caller keeps the contract of the module; `Isa` is selected where it is supported.
        $(#[$condition])*
        impl $name {
            fn loops<B: Binary>() -> Kernel {
                Kernel {
                    map: Self::map::<B, 2>,
                    map_four: Self::map::<B, 4>,
                    assign: Self::assign::<B, 1>,
                    assign_three: Self::assign::<B, 3>,
                    assign_reversed: Self::assign::<B::Reversed, 1>,
                }
            }
            #[$features]
            unsafe fn map<B: Binary, const N: usize>(
                out: *mut u8,
                inputs: [*const u8; N],
                bytes: usize,
            ) {
                unsafe { map::<B, N>(out, inputs, bytes) }
            }
            #[$features]
            unsafe fn assign<B: Binary, const N: usize>(
                total: *mut u8,
                operands: [*const u8; N],
                bytes: usize,
            ) {
                unsafe { assign::<B, N>(total, operands, bytes) }
            }
            #[$features]
            unsafe fn divide<Q: Quotient>(total: *mut u8, bytes: usize, divisor: u64) {
                unsafe { divide::<Q>(total, bytes, divisor) }
            }
            #[$features]
            unsafe fn widen<N: Narrow>(out: *mut u8, input: *const u8, count: usize) {
                unsafe { widen::<N>(out, input, count) }
            }
            #[$features]
            unsafe fn round<N: Narrow>(out: *mut u8, input: *const u8, count: usize) {
                unsafe { round::<N>(out, input, count) }
            }
        }

        $(#[$condition])*
        impl Isa for $name {
            fn kernel<B: Binary>() -> Kernel {
                $kernel::loops::<B>()
            }
            fn costly_kernel<B: Binary>() -> Kernel {
                $name::loops::<B>()
            }
            fn divide<Q: Quotient>() -> Divide {
                Self::divide::<Q>
            }
            fn conversion<N: Narrow>() -> Conversion {
                Conversion {
                    widen: Self::widen::<N>,
                    round: Self::round::<N>,
                }
            }
            $(fn half() -> Conversion {
                $half
            })?
        }
    };
}

instruction_set!(
    Baseline,
    inline(never),
    Baseline,
    "What every processor of the architecture has: SSE2 on x86-64, NEON on aarch64."
);
instruction_set!(
    #[cfg(target_arch = "x86_64")]
    Avx2,
    target_feature(enable = "avx2,f16c,bmi1,bmi2"),
    Avx2,
    "256-bit vectors.",
    f16c::CONVERSION
);
instruction_set!(
    #[cfg(all(target_arch = "x86_64", has_avx512))]
    Avx512,
    target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,bmi1,bmi2"),
    Avx2,
    "512-bit vectors, for narrow floats and 64-bit integers. Other kernels are bound by memory, and up to 7 % slower with
    512 bits than with 256, because more accesses cross a cache line.",
    f16c::CONVERSION
);

/// Conversion of f16 by the instructions of F16C.
#[cfg(target_arch = "x86_64")]
mod f16c {
    use std::arch::x86_64::{
        __m128i, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_loadu_ps, _mm256_storeu_ps,
        _mm_loadu_si128, _mm_storeu_si128, _MM_FROUND_TO_NEAREST_INT,
    };

    use super::{Conversion, F16};

    pub const CONVERSION: Conversion = Conversion { widen, round };
    const LANES: usize = 8;

    /// # Safety
    /// The contract of the kernels, and the processor has AVX and F16C.
    #[target_feature(enable = "avx,f16c")]
    unsafe fn widen(out: *mut u8, input: *const u8, count: usize) {
        let whole = count / LANES * LANES;
        // SAFETY: all pointers stay within `count` elements of 4 and of 2 bytes.
        unsafe {
            for i in (0..whole).step_by(LANES) {
                let half = _mm_loadu_si128(input.add(2 * i).cast::<__m128i>());
                _mm256_storeu_ps(out.add(4 * i).cast(), _mm256_cvtph_ps(half));
            }
            super::widen::<F16>(out.add(4 * whole), input.add(2 * whole), count - whole);
        }
    }

    /// # Safety
    /// The contract of the kernels, and the processor has AVX and F16C.
    #[target_feature(enable = "avx,f16c")]
    unsafe fn round(out: *mut u8, input: *const u8, count: usize) {
        let whole = count / LANES * LANES;
        // SAFETY: all pointers stay within `count` elements of 2 and of 4 bytes.
        unsafe {
            for i in (0..whole).step_by(LANES) {
                let wide = _mm256_loadu_ps(input.add(4 * i).cast());
                let half = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(wide);
                _mm_storeu_si128(out.add(2 * i).cast::<__m128i>(), half);
            }
            super::round::<F16>(out.add(2 * whole), input.add(4 * whole), count - whole);
        }
    }
}
