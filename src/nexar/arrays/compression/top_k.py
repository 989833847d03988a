"""The largest elements travel, each with its index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.compression.compressor import Compressor, Piece
from nexar.arrays.compression.ratio import checked, chosen
from nexar.arrays.compression.terms import Terms, work_dtype

_BLOCK: Final = 1 << 20  # elements that are looked at together, where only the first few matter
_BITS: Final[dict[int, np.dtype[Any]]] = {4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


@dataclass(frozen=True)
class TopK(Compressor):
    """Each rank sends the elements of its array that are furthest from nought, with their indices; ranks may send
    different ones. Of equal ones the lower index comes first. Best with a residual: without one, what is never among
    the largest is never learnt.

    NaN counts as larger than infinity, and infinity than all numbers, so that both are sent and seen.
    """

    ratio: float
    """Above 0, at most 1: of `count` elements max(1, ceil(count * ratio)) are sent."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", checked("TopK", self.ratio))

    @property
    def name(self) -> str:
        """With its ratio."""
        return f"TopK({self.ratio!r})"

    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        """A value of the caller's dtype and an index each."""
        return chosen(count, self.ratio) * (dtype.itemsize + _index_dtype(count).itemsize)

    def compress(self, array: NDArray[Any], terms: Terms) -> Piece:
        """Values, then indices, which ascend."""
        indices = largest(array, chosen(terms.count, self.ratio))
        values = array[indices].astype(terms.dtype)
        places = indices.astype(_index_dtype(terms.count))
        return np.concatenate([values.view(np.uint8), places.view(np.uint8)])

    def decompress(self, piece: Piece, terms: Terms) -> NDArray[Any]:
        """Zeros but for what was sent."""
        array = np.zeros(terms.count, terms.work)
        indices, values = self._read(piece, terms)
        array[indices] = values
        return array

    def add(self, piece: Piece, total: NDArray[Any], terms: Terms) -> None:
        """Only what was sent."""
        indices, values = self._read(piece, terms)
        total[indices] += values  # no index comes twice

    def working_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        """Magnitudes, and a copy that is partitioned; or zeros, to decompress."""
        return 2 * count * work_dtype(dtype).itemsize + chosen(count, self.ratio) * 16 + 9 * min(count, _BLOCK)

    def _read(self, piece: Piece, terms: Terms) -> tuple[NDArray[Any], NDArray[Any]]:
        edge = chosen(terms.count, self.ratio) * terms.dtype.itemsize
        values = piece[:edge].copy().view(terms.dtype)  # copied, because a piece need not lie where words may
        indices = piece[edge:].copy().view(_index_dtype(terms.count))
        if len(indices) and (indices[-1] >= terms.count or (indices[1:] <= indices[:-1]).any()):
            raise ValueError(f"its indices do not ascend below {terms.count}")
        return indices, values.astype(terms.work)


def largest(array: NDArray[Any], count: int) -> NDArray[np.intp]:
    """The indices, ascending, of the `count` elements of largest magnitude; of equal ones those of lower index.

    float32 or float64; at least one, if there is any. The time grows as the length does: nothing is sorted.
    """
    # Without their sign, floats are ordered as the integers that their bits are: zeros first, then all numbers, then
    # infinity, then NaN. Integers have no element that compares as nothing else does.
    magnitudes = np.abs(array).view(_BITS[array.itemsize])
    if count >= len(array):
        return np.arange(len(array))
    least = np.partition(magnitudes, len(array) - count)[len(array) - count]
    chosen_ones = magnitudes > least
    chosen_ones[_first(magnitudes, least, count - int(np.count_nonzero(chosen_ones)))] = True
    return np.flatnonzero(chosen_ones)


def _first(magnitudes: NDArray[Any], value: Any, count: int) -> NDArray[np.intp]:
    """Where the first `count` of those are that have this value: block by block, since all may have it."""
    found = [np.empty(0, np.intp)]
    for start in range(0, len(magnitudes), _BLOCK):
        if count <= 0:
            break
        found.append(start + np.flatnonzero(magnitudes[start : start + _BLOCK] == value)[:count])
        count -= len(found[-1])
    return np.concatenate(found)


def _index_dtype(count: int) -> np.dtype[Any]:
    return _BITS[4 if count <= 1 << 32 else 8]
