"""Every element as a float of eight bits, in blocks that have a scale each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nexar.arrays.compression.blocks import Blocks, checked_block
from nexar.arrays.compression.compressor import Piece
from nexar.errors import UsageError

FORMATS: Final = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}
"""By the bits of exponent and mantissa."""
_LARGEST: Final = {"e4m3": 448.0, "e5m2": 57_344.0}


@dataclass(frozen=True)
class FP8(Blocks):
    """One byte for each element, and a scale for each block. An element is off by at most 1/16 of itself (e4m3), or 1/8
    (e5m2), as long as it is not below 1/28,672 of the largest one of its block (e4m3; e5m2: 1/939,524,096). A block
    with NaN or infinity in it comes out as NaN.
    """

    format: str = "e4m3"
    """`e4m3`: more exact. `e5m2`: a wider range within a block."""
    block: int = 256
    """Elements that share a scale."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UsageError(f"FP8(format={self.format!r}) does not exist; give one of: {', '.join(FORMATS)}")
        object.__setattr__(self, "block", checked_block("FP8", self.block))

    @property
    def name(self) -> str:
        """With its format and block."""
        return f"FP8({self.format}, block={self.block})"

    @property
    def largest(self) -> float:
        """448 or 57,344."""
        return _LARGEST[self.format]

    def round(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """To the nearest; of two as near, to the even one."""
        return numbers.astype(FORMATS[self.format])

    def read(self, codes: Piece) -> NDArray[Any]:
        """As floats."""
        return codes.view(FORMATS[self.format])
