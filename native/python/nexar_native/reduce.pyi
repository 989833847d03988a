"""Element-wise reductions of raw memory, of any number of inputs.

Operations: 1 sum, 2 prod, 3 min, 4 max, 5 avg, 6 band, 7 bor, 8 bxor, 9 land, 10 lor, 11 lxor.
Element types: 1 bool, 2 to 5 int8 to int64, 6 to 9 uint8 to uint64, 10 float16, 11 float32, 12 float64,
13 complex64, 14 complex128, 15 bfloat16, 16 float8_e4m3fn, 17 float8_e5m2.

Results have the bits of NumPy's arithmetic, except for the payload of a NaN:

- Integers wrap. The sum of booleans is "or", their product "and".
- Floats narrower than float32 are folded in float32 and rounded once, to nearest even. A float8_e4m3fn that overflows
  is NaN.
- A NaN wins min and max.
- Logical operations give 0 and 1 of the element type.
- A complex product is (ac - bd, ad + bc), where every operation is rounded.
"""

from collections.abc import Sequence

from typing_extensions import Buffer

__all__ = ["VERSION", "fold", "supported"]

VERSION: int
"""Changes when a result changes for an input that is not NaN."""

def supported(op: int, dtype: int) -> bool:
    """Return whether `fold` computes this operation of this element type. False for unknown numbers."""

def fold(out: Buffer, inputs: Sequence[Buffer], op: int, dtype: int, divisor: int = 1) -> None:
    """out = ((in0 ⊕ in1) ⊕ …) / divisor.

    `out` may be any input, or overlap inputs. The memory needs no alignment. The GIL is released from 64 KiB on.

    Raises ValueError, before any memory changes, for an operation that is not supported, without inputs, for different
    lengths or a length that is not a multiple of the element size, and for a divisor other than 1 unless the operation
    is avg. Raises BufferError if a buffer is not contiguous, or `out` is read-only.
    """
