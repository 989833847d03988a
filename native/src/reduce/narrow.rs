//! Narrow floats as bits: exact widening to f32, and rounding of f32 to nearest even.
//!
//! Both directions are integer arithmetic and selections without branches, so a loop over them becomes vector
//! instructions. The f32 operands are never subnormal, which some processors compute slowly.

/// A narrow float format.
pub trait Narrow {
    type Bits: Copy;
    fn widen(bits: Self::Bits) -> f32;
    fn round(value: f32) -> Self::Bits;
}

/// A format with the sign in the highest bit, then the exponent with a bias, then the mantissa.
struct Layout {
    width: u32,
    mantissa: u32,
    bias: u32,
    /// The bits of the smallest magnitude that is not finite.
    nonfinite: u32,
    /// The bits that a NaN gets. Equal to `nonfinite` in a format without infinities.
    nan: u32,
}

const F32_BIAS: u32 = 127;
const F32_MANTISSA: u32 = 23;
const F32_INFINITY: u32 = 0x7f80_0000;
const F32_NAN: u32 = 0x7fc0_0000;

impl Layout {
    /// From the last place of the format to that of f32.
    const fn shift(&self) -> u32 {
        F32_MANTISSA - self.mantissa
    }

    const fn sign(&self) -> u32 {
        1 << (self.width - 1)
    }

    /// The exponents of both formats differ by this, as bits of f32.
    const fn rebias(&self) -> u32 {
        (F32_BIAS - self.bias) << F32_MANTISSA
    }

    /// The smallest normal number, as bits of f32.
    const fn smallest_normal(&self) -> u32 {
        (F32_BIAS - self.bias + 1) << F32_MANTISSA
    }

    #[inline(always)]
    fn widen(&self, bits: u32) -> f32 {
        let sign = (bits & self.sign()) << (32 - self.width);
        let magnitude = bits & (self.sign() - 1);
        let shifted = (magnitude << self.shift()) + self.rebias();
        // A subnormal m · 2ᵉ is (2ᵉ' + m · 2ᵉ) - 2ᵉ', with the smallest normal number 2ᵉ': exact, without subnormal f32.
        let smallest = self.smallest_normal();
        let subnormal =
            (f32::from_bits(shifted + (1 << F32_MANTISSA)) - f32::from_bits(smallest)).to_bits();
        let finite = if magnitude < (1 << self.mantissa) {
            subnormal
        } else {
            shifted
        };
        let nonfinite = if self.nan != self.nonfinite && magnitude == self.nonfinite {
            F32_INFINITY
        } else {
            F32_NAN
        };
        let wide = if magnitude < self.nonfinite {
            finite
        } else {
            nonfinite
        };
        f32::from_bits(wide | sign)
    }

    #[inline(always)]
    fn round(&self, value: f32) -> u32 {
        let bits = value.to_bits();
        let sign = (bits >> (32 - self.width)) & self.sign();
        let magnitude = bits & 0x7fff_ffff;
        // Adding half of the last remaining place, less one if the number is even, and cutting off rounds to nearest
        // even. A carry moves correctly into the exponent.
        let even = (magnitude >> self.shift()) & 1;
        let rounded = magnitude
            .wrapping_sub(self.rebias())
            .wrapping_add((1 << (self.shift() - 1)) - 1 + even)
            >> self.shift();
        let limited = rounded.min(self.nonfinite);
        // In f32 the last place of `anchor` is the smallest subnormal number: the addition rounds to nearest even.
        let anchor = f32::from_bits((F32_BIAS + 1 + self.shift() - self.bias) << F32_MANTISSA);
        let subnormal = (f32::from_bits(magnitude) + anchor)
            .to_bits()
            .wrapping_sub(anchor.to_bits());
        let number = if magnitude < self.smallest_normal() {
            subnormal
        } else {
            limited
        };
        let found = if magnitude > F32_INFINITY {
            self.nan
        } else {
            number
        };
        found | sign
    }
}

macro_rules! narrow {
    ($name:ident, $bits:ty, $layout:expr) => {
        pub struct $name;

        impl Narrow for $name {
            type Bits = $bits;

            #[inline(always)]
            fn widen(bits: $bits) -> f32 {
                const LAYOUT: Layout = $layout;
                LAYOUT.widen(bits as u32)
            }

            #[inline(always)]
            fn round(value: f32) -> $bits {
                const LAYOUT: Layout = $layout;
                LAYOUT.round(value) as $bits
            }
        }
    };
}

narrow!(
    F16,
    u16,
    Layout {
        width: 16,
        mantissa: 10,
        bias: 15,
        nonfinite: 0x7c00,
        nan: 0x7e00
    }
);
narrow!(
    F8e5m2,
    u8,
    Layout {
        width: 8,
        mantissa: 2,
        bias: 15,
        nonfinite: 0x7c,
        nan: 0x7e
    }
);
narrow!(
    F8e4m3fn,
    u8,
    Layout {
        width: 8,
        mantissa: 3,
        bias: 7,
        nonfinite: 0x7f,
        nan: 0x7f
    }
);

/// The upper half of an f32: nothing is rebiased, and subnormal numbers and infinities agree.
pub struct Bf16;

impl Narrow for Bf16 {
    type Bits = u16;

    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        f32::from_bits((bits as u32) << 16)
    }

    #[inline(always)]
    fn round(value: f32) -> u16 {
        let bits = value.to_bits();
        let even = (bits >> 16) & 1;
        let rounded = bits.wrapping_add(0x7fff + even) >> 16;
        let nan = (bits >> 16) | 0x40;
        let found = if bits & 0x7fff_ffff > F32_INFINITY {
            nan
        } else {
            rounded
        };
        found as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a magnitude by the definition of the format; None if it is not finite.
    fn defined(magnitude: u32, mantissa: u32, bias: i32, nonfinite: u32) -> Option<f64> {
        let exponent = (magnitude >> mantissa) as i32;
        let fraction = (magnitude & ((1 << mantissa) - 1)) as f64 / (1u64 << mantissa) as f64;
        (magnitude < nonfinite).then(|| match exponent {
            0 => fraction * 2f64.powi(1 - bias),
            _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
        })
    }

    /// Checks every number, and rounding at, just below and just above every midpoint.
    fn check<N: Narrow>(width: u32, mantissa: u32, bias: i32, nonfinite: u32)
    where
        u32: TryInto<N::Bits> + From<N::Bits>,
    {
        let bits = |code: u32| {
            code.try_into()
                .unwrap_or_else(|_| unreachable!("fits the width"))
        };
        let sign = 1u32 << (width - 1);
        for magnitude in 0..nonfinite {
            let value = defined(magnitude, mantissa, bias, nonfinite).unwrap();
            let widened = N::widen(bits(magnitude));
            assert_eq!(widened as f64, value, "{magnitude:#x}");
            assert_eq!(
                N::widen(bits(magnitude | sign)).to_bits(),
                (-widened).to_bits()
            );
            assert_eq!(u32::from(N::round(widened)), magnitude);
            assert_eq!(u32::from(N::round(-widened)), magnitude | sign);
            if magnitude + 1 < nonfinite {
                let next = defined(magnitude + 1, mantissa, bias, nonfinite).unwrap();
                check_midpoint::<N>(magnitude, ((value + next) / 2.0) as f32);
            }
        }
    }

    fn check_midpoint<N: Narrow>(below: u32, midpoint: f32)
    where
        u32: From<N::Bits>,
    {
        let even = below + (below & 1);
        assert_eq!(u32::from(N::round(midpoint)), even, "{midpoint:e}");
        let (lower, higher) = (midpoint.to_bits() - 1, midpoint.to_bits() + 1);
        assert_eq!(u32::from(N::round(f32::from_bits(lower))), below);
        assert_eq!(u32::from(N::round(f32::from_bits(higher))), below + 1);
    }

    #[test]
    fn every_number_widens_and_rounds_as_defined() {
        check::<F16>(16, 10, 15, 0x7c00);
        check::<F8e5m2>(8, 2, 15, 0x7c);
        check::<F8e4m3fn>(8, 3, 7, 0x7f);
    }

    #[test]
    fn bfloat16_is_the_upper_half_of_f32() {
        for high in 0..0x7f80u32 {
            let value = f32::from_bits(high << 16);
            assert_eq!(Bf16::widen(high as u16).to_bits(), value.to_bits());
            assert_eq!(Bf16::round(value) as u32, high);
            assert_eq!(
                Bf16::round(f32::from_bits((high << 16) + 0x8000)) as u32,
                high + (high & 1)
            );
            assert_eq!(
                Bf16::round(f32::from_bits((high << 16) + 0x8001)) as u32,
                high + 1
            );
            assert_eq!(
                Bf16::round(f32::from_bits((high << 16) + 0x7fff)) as u32,
                high
            );
        }
        assert!(Bf16::widen(Bf16::round(f32::from_bits(0x7f80_0001))).is_nan());
        assert!(Bf16::widen(Bf16::round(f32::from_bits(0xffff_ffff))).is_nan());
        assert_eq!(Bf16::round(f32::NEG_INFINITY), 0xff80);
        assert_eq!(Bf16::round(f32::MAX), 0x7f80);
    }

    #[test]
    fn infinities_and_nan() {
        assert_eq!(F16::widen(0x7c00), f32::INFINITY);
        assert_eq!(F16::widen(0xfc00), f32::NEG_INFINITY);
        assert!(F16::widen(0x7c01).is_nan() && F16::widen(0xffff).is_nan());
        assert_eq!(F16::round(f32::INFINITY), 0x7c00);
        assert_eq!(F16::round(65519.996), 0x7bff);
        assert_eq!(F16::round(65520.0), 0x7c00);
        assert_eq!(F16::round(f32::MAX), 0x7c00);
        assert_eq!(F16::round(-f32::MAX), 0xfc00);
        assert!(F16::widen(F16::round(f32::NAN)).is_nan());
        assert_eq!(F8e5m2::widen(0x7c), f32::INFINITY);
        assert_eq!(F8e5m2::round(61439.99), 0x7b);
        assert_eq!(F8e5m2::round(61440.0), 0x7c);
        assert!(F8e5m2::widen(F8e5m2::round(-f32::NAN)).is_nan());
    }

    #[test]
    fn a_format_without_infinity_overflows_to_nan() {
        assert!(F8e4m3fn::widen(0x7f).is_nan() && F8e4m3fn::widen(0xff).is_nan());
        assert_eq!(F8e4m3fn::round(464.0), 0x7e);
        for value in [464.1, 480.0, 1e6, f32::MAX, f32::INFINITY, f32::NAN] {
            assert_eq!(F8e4m3fn::round(value), 0x7f);
            assert_eq!(F8e4m3fn::round(-value) & 0x7f, 0x7f);
        }
    }

    #[test]
    fn the_smallest_numbers_round_to_zero_with_their_sign() {
        assert_eq!(F16::round(f32::from_bits(1)), 0);
        assert_eq!(F16::round(-f32::from_bits(1)), 0x8000);
        assert_eq!(F16::round(2f32.powi(-25)), 0);
        assert_eq!(F16::round(2f32.powi(-25) * 1.0001), 1);
        assert_eq!(F8e4m3fn::round(-2f32.powi(-10)), 0x80);
        assert_eq!(F8e5m2::round(2f32.powi(-17)), 0);
    }
}
