"""Everything travels, as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.compression.compressor import Compressor, Piece
from nexar.arrays.compression.terms import Terms, work_dtype


@dataclass(frozen=True)
class NoCompression(Compressor):
    """The whole array, without indices: what all_reduce with `deterministic=True` sends. To compare others with; a
    residual is left with what rounding to a narrower dtype takes, if anything.
    """

    linear: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """It has nothing to set."""
        return "NoCompression()"

    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        """Of the array."""
        return count * dtype.itemsize

    def compress(self, array: NDArray[Any], terms: Terms) -> Piece:
        """A copy."""
        return array.astype(terms.dtype).view(np.uint8)

    def decompress(self, piece: Piece, terms: Terms) -> NDArray[Any]:
        """A copy."""
        return piece.copy().view(terms.dtype).astype(terms.work, copy=False)

    def working_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        """The copies."""
        return count * (dtype.itemsize + work_dtype(dtype).itemsize)
