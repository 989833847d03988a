"""Compressors with one byte per element and one scale per block; NoCompression."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nexar.arrays.compression.base import Compressor, Piece, Terms, work_dtype
from nexar.errors import UsageError
from nexar.types import whole

LONGEST_BLOCK: Final = 1 << 20
"""Maximum elements of a block."""


class BlockQuantizer(Compressor):
    """Scales each block to its largest magnitude. A piece is the scales, then one byte per element. NaN and infinity
    make their block NaN.
    """

    block: int

    @property
    @abstractmethod
    def largest(self) -> float: ...

    @abstractmethod
    def round(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """May overwrite `numbers`."""

    @abstractmethod
    def read(self, codes: Piece) -> NDArray[Any]: ...

    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        return count + -(-count // self.block) * work_dtype(dtype).itemsize

    def compress(self, array: NDArray[Any], terms: Terms) -> Piece:
        with np.errstate(all="ignore"):
            rows = self._rows(array)
            furthest = np.maximum(rows.max(axis=1, initial=0), -rows.min(axis=1, initial=0))
            sound = np.isfinite(furthest)
            scales = np.minimum(furthest / terms.work.type(self.largest), self._largest_scale(terms))
            scales[~sound] = np.nan
            # A block with scale 0 has only numbers that are too small to matter: they become 0.
            numbers = rows / np.where(sound & (scales > 0), scales, np.inf)[:, None].astype(terms.work)
            numbers[~sound] = 0
            np.clip(numbers, -self.largest, self.largest, out=numbers)  # a subnormal scale is not exact
            codes = self.round(numbers).reshape(-1)[: len(array)]
        return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)])

    def decompress(self, piece: Piece, terms: Terms) -> NDArray[Any]:
        blocks = -(-terms.count // self.block)
        edge = blocks * terms.work.itemsize
        scales = piece[:edge].copy().view(terms.work)
        rows = np.zeros((blocks, self.block), terms.work)
        rows.reshape(-1)[: terms.count] = self.read(piece[edge:])
        with np.errstate(all="ignore"):
            rows *= scales[:, None]
        return rows.reshape(-1)[: terms.count]

    def working_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        wide, blocks = work_dtype(dtype).itemsize, -(-count // self.block)
        copies = 2 if count % self.block else 1
        return blocks * self.block * (copies * wide + 1) + blocks * 4 * wide

    def _largest_scale(self, terms: Terms) -> Any:
        """The largest number must not be rounded up to infinity."""
        return np.nextafter(np.finfo(terms.work).max / terms.work.type(self.largest), terms.work.type(0))

    def _rows(self, array: NDArray[Any]) -> NDArray[Any]:
        rest = -len(array) % self.block
        padded = np.concatenate([array, np.zeros(rest, array.dtype)]) if rest else array
        return padded.reshape(-1, self.block)


def checked_block(name: str, block: object) -> int:
    """Returns the block length, or raises UsageError."""
    number = whole(block)
    if number is None or not 1 <= number <= LONGEST_BLOCK:
        raise UsageError(
            f"{name}(block={block!r}) is not a block length; give a whole number from 1 to {LONGEST_BLOCK}"
        )
    return number


FORMATS: Final = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}
"""By the bits of exponent and mantissa."""
_LARGEST: Final = {"e4m3": 448.0, "e5m2": 57_344.0}


@dataclass(frozen=True)
class FP8(BlockQuantizer):
    """One byte per element, and one scale per block. The error of an element is at most 1/16 of itself (e4m3) or 1/8
    (e5m2), unless it is below 1/28,672 of the largest element of its block (e5m2: 1/939,524,096). NaN and infinity make
    their block NaN.
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
        return f"FP8({self.format}, block={self.block})"

    @property
    def largest(self) -> float:
        return _LARGEST[self.format]

    def round(self, numbers: NDArray[Any]) -> NDArray[Any]:
        return numbers.astype(FORMATS[self.format])

    def read(self, codes: Piece) -> NDArray[Any]:
        return codes.view(FORMATS[self.format])


@dataclass(frozen=True)
class Int8(BlockQuantizer):
    """One byte per element, and one scale per block. The error of an element is at most 1/254 of the largest element of
    its block. NaN and infinity make their block NaN.
    """

    block: int = 256
    """Elements that share a scale."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", checked_block("Int8", self.block))

    @property
    def name(self) -> str:
        return f"Int8(block={self.block})"

    @property
    def largest(self) -> float:
        return 127.0

    def round(self, numbers: NDArray[Any]) -> NDArray[Any]:
        np.rint(numbers, out=numbers)
        return numbers.astype(np.int8)

    def read(self, codes: Piece) -> NDArray[Any]:
        return codes.view(np.int8)


@dataclass(frozen=True)
class NoCompression(Compressor):
    """The whole array, as all_reduce with `deterministic=True` sends it, for comparison. A residual keeps only the
    rounding error of a narrower dtype.
    """

    linear: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "NoCompression()"

    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        return count * dtype.itemsize

    def compress(self, array: NDArray[Any], terms: Terms) -> Piece:
        return array.astype(terms.dtype).view(np.uint8)

    def decompress(self, piece: Piece, terms: Terms) -> NDArray[Any]:
        return piece.copy().view(terms.dtype).astype(terms.work, copy=False)

    def working_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        return count * (dtype.itemsize + work_dtype(dtype).itemsize)
