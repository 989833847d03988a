"""Every element travels as one byte, in blocks that have a scale each."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.compression.compressor import Compressor, Piece
from nexar.arrays.compression.terms import Terms, work_dtype
from nexar.errors import UsageError
from nexar.types import whole

LONGEST: Final = 1 << 20
"""Elements of a block, at most."""


class Blocks(Compressor):
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
    if number is None or not 1 <= number <= LONGEST:
        raise UsageError(f"{name}(block={block!r}) is no length of a block; give a whole number from 1 to {LONGEST}")
    return number
