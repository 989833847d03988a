//! The arithmetic of two elements, for each operation and element type.
//!
//! Every result has the bits that NumPy computes on the same processor architecture; of a NaN, the payload may differ.
//! No product is contracted with a sum (`mul_add`), because a result must not depend on the processor.

use std::marker::PhantomData;

/// `left ⊕ right`. `Reversed` is `right ⊕ left`: the operation itself if both have the same bits.
pub trait Binary {
    type Element: Copy;
    type Reversed: Binary<Element = Self::Element>;
    fn of(left: Self::Element, right: Self::Element) -> Self::Element;
}

/// Numbers that are added and multiplied. Integers wrap.
pub trait Arithmetic: Copy {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
}

/// Numbers with an order. A NaN wins from either side.
pub trait Ordered: Copy {
    fn lesser(self, other: Self) -> Self;
    fn greater(self, other: Self) -> Self;
}

/// Numbers that are true unless zero. NaN is true.
pub trait Truth: Copy {
    fn is_true(self) -> bool;
    fn from_bool(truth: bool) -> Self;
}

macro_rules! integers {
    ($($number:ty)*) => {$(
        impl Arithmetic for $number {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
        }
        impl Ordered for $number {
            #[inline(always)]
            fn lesser(self, other: Self) -> Self {
                self.min(other)
            }
            #[inline(always)]
            fn greater(self, other: Self) -> Self {
                self.max(other)
            }
        }
        impl Truth for $number {
            #[inline(always)]
            fn is_true(self) -> bool {
                self != 0
            }
            #[inline(always)]
            fn from_bool(truth: bool) -> Self {
                truth as $number
            }
        }
    )*};
}

integers!(i8 i16 i32 i64 u8 u16 u32 u64);

/// Of zeros with different signs, NumPy's SSE and AVX code returns the second operand.
#[cfg(not(target_arch = "aarch64"))]
macro_rules! choose {
    ($left:expr, $right:expr, $before:tt, $zeros:tt) => {
        if $left $before $right || $left.is_nan() { $left } else { $right }
    };
}

/// The instructions `fmin` and `fmax`, which NumPy uses, order -0 before 0. Equal numbers differ in their sign at most.
#[cfg(target_arch = "aarch64")]
macro_rules! choose {
    ($left:expr, $right:expr, $before:tt, $zeros:tt) => {
        if $left $before $right || $left.is_nan() {
            $left
        } else if $left == $right {
            Self::from_bits($left.to_bits() $zeros $right.to_bits())
        } else {
            $right
        }
    };
}

macro_rules! floats {
    ($($number:ty)*) => {$(
        impl Arithmetic for $number {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self * other
            }
        }
        impl Ordered for $number {
            #[inline(always)]
            fn lesser(self, other: Self) -> Self {
                choose!(self, other, <, |)
            }
            #[inline(always)]
            fn greater(self, other: Self) -> Self {
                choose!(self, other, >, &)
            }
        }
        impl Truth for $number {
            #[inline(always)]
            fn is_true(self) -> bool {
                self != 0.0
            }
            #[inline(always)]
            fn from_bool(truth: bool) -> Self {
                if truth { 1.0 } else { 0.0 }
            }
        }
        impl Arithmetic for [$number; 2] {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                [self[0] + other[0], self[1] + other[1]]
            }
            #[inline(always)]
            fn product(self, other: Self) -> Self {
                let ([a, b], [c, d]) = (self, other);
                [a * c - b * d, a * d + b * c]
            }
        }
        impl Truth for [$number; 2] {
            #[inline(always)]
            fn is_true(self) -> bool {
                (self[0] != 0.0) | (self[1] != 0.0)
            }
            #[inline(always)]
            fn from_bool(truth: bool) -> Self {
                [<$number>::from_bool(truth), 0.0]
            }
        }
    )*};
}

floats!(f32 f64);

macro_rules! operation {
    ($name:ident, $bound:path, $left:ident, $right:ident, $result:expr) => {
        pub struct $name<E>(PhantomData<E>);

        impl<E: $bound> Binary for $name<E> {
            type Element = E;
            type Reversed = Self;

            #[inline(always)]
            fn of($left: E, $right: E) -> E {
                $result
            }
        }
    };
}

operation!(Sum, Arithmetic, left, right, left.sum(right));
operation!(Product, Arithmetic, left, right, left.product(right));
operation!(
    And,
    Truth,
    left,
    right,
    E::from_bool(left.is_true() & right.is_true())
);
operation!(
    Or,
    Truth,
    left,
    right,
    E::from_bool(left.is_true() | right.is_true())
);
operation!(
    Xor,
    Truth,
    left,
    right,
    E::from_bool(left.is_true() ^ right.is_true())
);

macro_rules! order {
    ($name:ident, $method:ident) => {
        pub struct $name<E>(PhantomData<E>);

        impl<E: Ordered> Binary for $name<E> {
            type Element = E;
            type Reversed = Flipped<Self>;

            #[inline(always)]
            fn of(left: E, right: E) -> E {
                left.$method(right)
            }
        }
    };
}

order!(Minimum, lesser);
order!(Maximum, greater);

/// The operation with its operands exchanged.
pub struct Flipped<B>(PhantomData<B>);

impl<B: Binary> Binary for Flipped<B> {
    type Element = B::Element;
    type Reversed = B;

    #[inline(always)]
    fn of(left: B::Element, right: B::Element) -> B::Element {
        B::of(right, left)
    }
}

macro_rules! bitwise {
    ($($name:ident $operator:tt)*) => {$(
        pub struct $name;

        impl Binary for $name {
            type Element = u8;
            type Reversed = Self;

            #[inline(always)]
            fn of(left: u8, right: u8) -> u8 {
                left $operator right
            }
        }
    )*};
}

bitwise!(BitAnd & BitOr | BitXor ^);

/// Division of a total by the number of ranks.
pub trait Quotient: Copy {
    type Divisor: Copy;
    fn divisor(count: u64) -> Self::Divisor;
    fn divide(self, divisor: Self::Divisor) -> Self;
}

macro_rules! quotients {
    ($($number:ty)*) => {$(
        impl Quotient for $number {
            type Divisor = $number;
            #[inline(always)]
            fn divisor(count: u64) -> $number {
                count as f64 as $number
            }
            #[inline(always)]
            fn divide(self, divisor: $number) -> $number {
                self / divisor
            }
        }
        /// As NumPy divides complex numbers, by Smith's method, with a divisor whose imaginary part is 0.
        impl Quotient for [$number; 2] {
            type Divisor = $number;
            #[inline(always)]
            fn divisor(count: u64) -> $number {
                1.0 / (count as f64 as $number)
            }
            #[inline(always)]
            fn divide(self, reciprocal: $number) -> Self {
                // The products with 0 matter: they make NaN of an infinity, and 0 of -0.
                let [real, imaginary] = self;
                [(real + imaginary * 0.0) * reciprocal, (imaginary - real * 0.0) * reciprocal]
            }
        }
    )*};
}

quotients!(f32 f64);

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(numbers: [f64; 2]) -> [u64; 2] {
        numbers.map(f64::to_bits)
    }

    #[test]
    fn a_nan_wins_from_either_side() {
        for (left, right) in [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::NAN, f32::NAN)] {
            assert!(left.lesser(right).is_nan());
            assert!(left.greater(right).is_nan());
        }
    }

    #[test]
    #[cfg(not(target_arch = "aarch64"))]
    fn of_two_zeros_the_second_is_taken() {
        assert_eq!(0f32.lesser(-0.0).to_bits(), (-0f32).to_bits());
        assert_eq!((-0f32).lesser(0.0).to_bits(), 0);
        assert_eq!(0f64.greater(-0.0).to_bits(), (-0f64).to_bits());
        assert_eq!((-0f64).greater(0.0).to_bits(), 0);
    }

    #[test]
    #[cfg(target_arch = "aarch64")]
    fn a_negative_zero_is_before_a_positive_one() {
        for (left, right) in [(0f32, -0f32), (-0f32, 0f32)] {
            assert_eq!(left.lesser(right).to_bits(), (-0f32).to_bits());
            assert_eq!(left.greater(right).to_bits(), 0);
        }
    }

    #[test]
    fn integers_wrap() {
        assert_eq!(i8::MAX.sum(1), i8::MIN);
        assert_eq!(200u8.product(2), 144);
        assert_eq!(i64::MIN.product(-1), i64::MIN);
    }

    #[test]
    fn logic_gives_zero_and_one() {
        assert_eq!(And::<i32>::of(5, -3), 1);
        assert_eq!(Xor::<u8>::of(7, 9), 0);
        assert_eq!(Or::<f32>::of(-0.0, 0.0), 0.0);
        assert_eq!(And::<f64>::of(f64::NAN, 2.0), 1.0);
        assert_eq!(Or::<[f64; 2]>::of([0.0, 2.0], [0.0, 0.0]), [1.0, 0.0]);
    }

    #[test]
    fn a_complex_product_is_not_contracted() {
        let (a, b, c, d) = (1.0 + f64::EPSILON, 3.0, 1.0 - f64::EPSILON, 7.0);
        let expected = [a * c - b * d, a * d + b * c];
        assert_eq!(bits([a, b].product([c, d])), bits(expected));
    }

    #[test]
    fn a_complex_quotient_has_numpys_zeros_and_nan() {
        let third = <[f64; 2]>::divisor(3);
        assert_eq!(bits([-0.0, 6.0].divide(third)), bits([0.0, 2.0]));
        assert!([1.0, f64::INFINITY].divide(third)[0].is_nan());
    }
}
