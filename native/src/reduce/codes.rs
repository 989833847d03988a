//! The wire numbers of operations and element types, and the pairs that are defined.
//!
//! A test of the Python package compares these tables with its own.

/// A named reduction. The numbers are those of the wire: never reuse one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    Sum = 1,
    Prod = 2,
    Min = 3,
    Max = 4,
    Avg = 5,
    Band = 6,
    Bor = 7,
    Bxor = 8,
    Land = 9,
    Lor = 10,
    Lxor = 11,
}

/// An element type. The numbers are those of the wire: never reuse one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DType {
    Bool = 1,
    I8 = 2,
    I16 = 3,
    I32 = 4,
    I64 = 5,
    U8 = 6,
    U16 = 7,
    U32 = 8,
    U64 = 9,
    F16 = 10,
    F32 = 11,
    F64 = 12,
    C64 = 13,
    C128 = 14,
    Bf16 = 15,
    F8e4m3fn = 16,
    F8e5m2 = 17,
}

/// What a number of this type is. Narrow floats are computed in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Bool,
    Integer,
    Float,
    Narrow,
    Complex,
}

impl Op {
    pub const ALL: [Op; 11] = [
        Op::Sum,
        Op::Prod,
        Op::Min,
        Op::Max,
        Op::Avg,
        Op::Band,
        Op::Bor,
        Op::Bxor,
        Op::Land,
        Op::Lor,
        Op::Lxor,
    ];

    /// Whether the result is 0 or 1 of the type, also with one input.
    pub fn is_logical(self) -> bool {
        matches!(self, Op::Land | Op::Lor | Op::Lxor)
    }
}

impl DType {
    pub const ALL: [DType; 17] = [
        DType::Bool,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::U16,
        DType::U32,
        DType::U64,
        DType::F16,
        DType::F32,
        DType::F64,
        DType::C64,
        DType::C128,
        DType::Bf16,
        DType::F8e4m3fn,
        DType::F8e5m2,
    ];

    pub fn itemsize(self) -> usize {
        match self {
            DType::Bool | DType::I8 | DType::U8 | DType::F8e4m3fn | DType::F8e5m2 => 1,
            DType::I16 | DType::U16 | DType::F16 | DType::Bf16 => 2,
            DType::I32 | DType::U32 | DType::F32 => 4,
            DType::I64 | DType::U64 | DType::F64 | DType::C64 => 8,
            DType::C128 => 16,
        }
    }

    pub fn kind(self) -> Kind {
        match self {
            DType::Bool => Kind::Bool,
            DType::F32 | DType::F64 => Kind::Float,
            DType::C64 | DType::C128 => Kind::Complex,
            DType::F16 | DType::Bf16 | DType::F8e4m3fn | DType::F8e5m2 => Kind::Narrow,
            _ => Kind::Integer,
        }
    }
}

/// The code of a reduction by its name.
pub fn op_named(name: &str) -> Option<u8> {
    let op = match name {
        "sum" => Op::Sum,
        "prod" => Op::Prod,
        "min" => Op::Min,
        "max" => Op::Max,
        "avg" => Op::Avg,
        "band" => Op::Band,
        "bor" => Op::Bor,
        "bxor" => Op::Bxor,
        "land" => Op::Land,
        "lor" => Op::Lor,
        "lxor" => Op::Lxor,
        _ => return None,
    };
    Some(op as u8)
}

/// The size of an element; None for an unknown code.
pub fn itemsize(code: u8) -> Option<usize> {
    let index = (code as usize).checked_sub(1)?;
    DType::ALL.get(index).map(|dtype| dtype.itemsize())
}

/// Whether the reduction is defined: integers have no average, floats no bit operations, complex numbers no order.
pub fn is_defined(op: Op, dtype: DType) -> bool {
    match op {
        Op::Sum | Op::Prod | Op::Land | Op::Lor | Op::Lxor => true,
        Op::Min | Op::Max => dtype.kind() != Kind::Complex,
        Op::Avg => matches!(dtype.kind(), Kind::Float | Kind::Narrow | Kind::Complex),
        Op::Band | Op::Bor | Op::Bxor => matches!(dtype.kind(), Kind::Bool | Kind::Integer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_are_in_the_order_of_the_codes() {
        assert!(Op::ALL.map(|op| op as u8).into_iter().eq(1..=11));
        assert!(DType::ALL.map(|dtype| dtype as u8).into_iter().eq(1..=17));
    }

    #[test]
    fn only_known_codes_have_a_size() {
        assert_eq!(
            [0, 1, 5, 14, 17, 18, 255].map(itemsize),
            [None, Some(1), Some(8), Some(16), Some(1), None, None]
        );
    }

    #[test]
    fn the_number_of_defined_pairs() {
        let defined = |dtype| {
            Op::ALL
                .into_iter()
                .filter(|op| is_defined(*op, dtype))
                .count()
        };
        assert_eq!(DType::ALL.into_iter().map(defined).sum::<usize>(), 150);
    }
}
