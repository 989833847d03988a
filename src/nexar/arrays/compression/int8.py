"""Every element as a whole number from -127 to 127, in blocks that have a scale each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.compression.blocks import Blocks, checked_block
from nexar.arrays.compression.compressor import Piece


@dataclass(frozen=True)
class Int8(Blocks):
    """One byte for each element, and a scale for each block. An element is off by at most 1/254 of the largest one of
    its block. A block with NaN or infinity in it comes out as NaN.
    """

    block: int = 256
    """Elements that share a scale."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", checked_block("Int8", self.block))

    @property
    def name(self) -> str:
        """With its block."""
        return f"Int8(block={self.block})"

    @property
    def largest(self) -> float:
        """So that the numbers are as many on both sides of nought."""
        return 127.0

    def round(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """To the nearest; of two as near, to the even one."""
        np.rint(numbers, out=numbers)
        return numbers.astype(np.int8)

    def read(self, codes: Piece) -> NDArray[Any]:
        """Signed."""
        return codes.view(np.int8)
