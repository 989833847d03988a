"""Which part of an array travels: a ratio, and how many elements that makes.

The largest elements travel, each with its index.

Some elements travel, drawn anew for each call: the same on all ranks, so that only their values do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.compression.base import Compressor, Piece, Terms, work_dtype
from nexar.errors import UsageError


def checked_ratio(name: str, ratio: object) -> float:
    """A ratio above 0, at most 1. UsageError for anything else; `name`: of what it was given to."""
    number = math.nan if isinstance(ratio, bool) or not isinstance(ratio, Real) else float(ratio)
    if not 0 < number <= 1:
        raise UsageError(f"{name}({ratio!r}) sends no part of an array; give a ratio above 0, at most 1: 0.01 is 1 %")
    return number


def elements_kept(count: int, ratio: float) -> int:
    """How many of `count` elements travel: at least one, if there is any."""
    return min(count, max(1, math.ceil(count * ratio)))


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
        object.__setattr__(self, "ratio", checked_ratio("TopK", self.ratio))

    @property
    def name(self) -> str:
        """With its ratio."""
        return f"TopK({self.ratio!r})"

    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        """A value of the caller's dtype and an index each."""
        return elements_kept(count, self.ratio) * (dtype.itemsize + _index_dtype(count).itemsize)

    def compress(self, array: NDArray[Any], terms: Terms) -> Piece:
        """Values, then indices, which ascend."""
        indices = largest(array, elements_kept(terms.count, self.ratio))
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
        return 2 * count * work_dtype(dtype).itemsize + elements_kept(count, self.ratio) * 16 + 9 * min(count, _BLOCK)

    def _read(self, piece: Piece, terms: Terms) -> tuple[NDArray[Any], NDArray[Any]]:
        edge = elements_kept(terms.count, self.ratio) * terms.dtype.itemsize
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


_INDICES = "indices"


@dataclass(frozen=True)
class RandomK(Compressor):
    """All ranks send the same elements, drawn for each call, without their indices.

    Without a residual the result is rescaled by `count / k` (1/ratio, where that many are sent), which makes it
    unbiased: its mean over calls is what all_reduce gives. With a residual it is not rescaled; what was not drawn
    waits there. NaN and infinity are seen when they are drawn.
    """

    ratio: float
    """Above 0, at most 1: of `count` elements k = max(1, ceil(count * ratio)) are sent."""

    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", checked_ratio("RandomK", self.ratio))

    @property
    def name(self) -> str:
        """With its ratio."""
        return f"RandomK({self.ratio!r})"

    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        """A value of the caller's dtype each."""
        return elements_kept(count, self.ratio) * dtype.itemsize

    def compress(self, array: NDArray[Any], terms: Terms) -> Piece:
        """Values, in the order of their indices."""
        return array[self._indices(terms)].astype(terms.dtype).view(np.uint8)

    def decompress(self, piece: Piece, terms: Terms) -> NDArray[Any]:
        """Zeros but for what was drawn. Rescaled here and not before it travels, where half types would overflow."""
        indices = self._indices(terms)
        values = piece.copy().view(terms.dtype).astype(terms.work)
        if not terms.feedback and len(values):
            values *= terms.work.type(terms.count / len(values))
        array = np.zeros(terms.count, terms.work)
        array[indices] = values
        return array

    def working_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        """What is decompressed; or the places that are marked while they are drawn, and the indices."""
        return count * work_dtype(dtype).itemsize + count + elements_kept(count, self.ratio) * 32

    def _indices(self, terms: Terms) -> NDArray[np.intp]:
        if _INDICES not in terms.kept:
            terms.kept[_INDICES] = drawn(terms.seed, terms.count, elements_kept(terms.count, self.ratio))
        found: NDArray[np.intp] = terms.kept[_INDICES]
        return found


def drawn(seed: int, count: int, wanted: int) -> NDArray[np.intp]:
    """`wanted` indices below `count`, ascending; each set of so many is as likely as any other."""
    # Which ones must not depend on the version of NumPy that a rank has. The raw numbers of a bit generator never
    # change; what its `choice` makes of them may.
    marked = np.zeros(count, np.bool_)
    few = min(wanted, count - wanted)  # of those that are drawn, or else of those that are not
    raw = np.random.PCG64(seed)
    missing = few
    while missing:
        # Numbers are drawn until `few` different ones have come. So many at once as are missing never bring too many.
        # The remainder prefers some by less than count / 2⁶⁴.
        marked[raw.random_raw(missing) % np.uint64(count)] = True
        missing = few - int(np.count_nonzero(marked))
    return np.flatnonzero(marked if few == wanted else ~marked)
