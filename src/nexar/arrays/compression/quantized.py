"""Every element travels as one byte, in blocks that have a scale each.

Every element as a float of eight bits, in blocks that have a scale each.

Every element as a whole number from -127 to 127, in blocks that have a scale each.

Everything travels, as it is.
"""

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
"""Elements of a block, at most."""


class BlockQuantizer(Compressor):
    """The element of a block that is furthest from nought becomes the largest number that a byte can mean, and the
    others in proportion. A block with NaN or infinity in it comes out as NaN, whole: it is seen.

    A piece is the scales, then a byte for each element.
    """

    block: int

    @property
    @abstractmethod
    def largest(self) -> float:
        """That a byte can mean."""

    @abstractmethod
    def round(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Numbers from -largest to largest as bytes of the type that means them. May overwrite them."""

    @abstractmethod
    def read(self, codes: Piece) -> NDArray[Any]:
        """The bytes, as that type."""

    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        """A byte for each element and a scale, as wide as the work dtype, for each block."""
        return count + -(-count // self.block) * work_dtype(dtype).itemsize

    def compress(self, array: NDArray[Any], terms: Terms) -> Piece:
        """Rounded to the nearest."""
        with np.errstate(all="ignore"):
            rows = self._rows(array)
            furthest = np.maximum(rows.max(axis=1, initial=0), -rows.min(axis=1, initial=0))
            sound = np.isfinite(furthest)
            scales = np.minimum(furthest / terms.work.type(self.largest), self._largest_scale(terms))
            scales[~sound] = np.nan
            # A scale of nought has only numbers below it that are too small to matter: they become nought as well.
            numbers = rows / np.where(sound & (scales > 0), scales, np.inf)[:, None].astype(terms.work)
            numbers[~sound] = 0
            np.clip(numbers, -self.largest, self.largest, out=numbers)  # a scale that is subnormal is not exact
            codes = self.round(numbers).reshape(-1)[: len(array)]
        return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)])

    def decompress(self, piece: Piece, terms: Terms) -> NDArray[Any]:
        """Each byte times its scale."""
        blocks = -(-terms.count // self.block)
        edge = blocks * terms.work.itemsize
        scales = piece[:edge].copy().view(terms.work)
        rows = np.zeros((blocks, self.block), terms.work)
        rows.reshape(-1)[: terms.count] = self.read(piece[edge:])
        with np.errstate(all="ignore"):
            rows *= scales[:, None]
        return rows.reshape(-1)[: terms.count]

    def working_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        """The quotients and bytes of them, the array once more if it has to be padded, and scales on their way."""
        wide, blocks = work_dtype(dtype).itemsize, -(-count // self.block)
        copies = 2 if count % self.block else 1
        return blocks * self.block * (copies * wide + 1) + blocks * 4 * wide

    def _largest_scale(self, terms: Terms) -> Any:
        """So that the largest number of all, rounded up as a quotient, does not come back as infinity."""
        return np.nextafter(np.finfo(terms.work).max / terms.work.type(self.largest), terms.work.type(0))

    def _rows(self, array: NDArray[Any]) -> NDArray[Any]:
        """A row for each block; the last one is filled up with zeros."""
        rest = -len(array) % self.block
        padded = np.concatenate([array, np.zeros(rest, array.dtype)]) if rest else array
        return padded.reshape(-1, self.block)


def checked_block(name: str, block: object) -> int:
    """The length of a block. UsageError for what is none; `name`: of what it was given to."""
    number = whole(block)
    if number is None or not 1 <= number <= LONGEST_BLOCK:
        raise UsageError(
            f"{name}(block={block!r}) is no length of a block; give a whole number from 1 to {LONGEST_BLOCK}"
        )
    return number


FORMATS: Final = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}
"""By the bits of exponent and mantissa."""
_LARGEST: Final = {"e4m3": 448.0, "e5m2": 57_344.0}


@dataclass(frozen=True)
class FP8(BlockQuantizer):
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


@dataclass(frozen=True)
class Int8(BlockQuantizer):
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
