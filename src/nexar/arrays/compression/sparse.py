"""Sparse compressors: TopK and RandomK."""

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
    """Returns a ratio in (0, 1], or raises UsageError."""
    number = math.nan if isinstance(ratio, bool) or not isinstance(ratio, Real) else float(ratio)
    if not 0 < number <= 1:
        raise UsageError(f"{name}({ratio!r}) is not a ratio; give a number above 0 and at most 1: 0.01 is 1 %")
    return number


def elements_kept(count: int, ratio: float) -> int:
    """Returns how many elements are sent."""
    return min(count, max(1, math.ceil(count * ratio)))


_BLOCK: Final = 1 << 20  # elements compared together where only the first few matter
_BITS: Final[dict[int, np.dtype[Any]]] = {4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


@dataclass(frozen=True)
class TopK(Compressor):
    """Each rank sends its elements of largest magnitude (of equal ones, the lower index) with their indices. Use it
    with a residual: otherwise elements that are never among the largest are never sent.

    NaN ranks above infinity, and infinity above all numbers: both are sent.
    """

    ratio: float
    """In (0, 1]: max(1, ceil(count * ratio)) elements are sent."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", checked_ratio("TopK", self.ratio))

    @property
    def name(self) -> str:
        return f"TopK({self.ratio!r})"

    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        return elements_kept(count, self.ratio) * (dtype.itemsize + _index_dtype(count).itemsize)

    def compress(self, array: NDArray[Any], terms: Terms) -> Piece:
        indices = largest(array, elements_kept(terms.count, self.ratio))
        values = array[indices].astype(terms.dtype)
        places = indices.astype(_index_dtype(terms.count))
        return np.concatenate([values.view(np.uint8), places.view(np.uint8)])

    def decompress(self, piece: Piece, terms: Terms) -> NDArray[Any]:
        array = np.zeros(terms.count, terms.work)
        indices, values = self._read(piece, terms)
        array[indices] = values
        return array

    def add(self, piece: Piece, total: NDArray[Any], terms: Terms) -> None:
        indices, values = self._read(piece, terms)
        total[indices] += values  # indices are unique

    def working_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        return 2 * count * work_dtype(dtype).itemsize + elements_kept(count, self.ratio) * 16 + 9 * min(count, _BLOCK)

    def _read(self, piece: Piece, terms: Terms) -> tuple[NDArray[Any], NDArray[Any]]:
        edge = elements_kept(terms.count, self.ratio) * terms.dtype.itemsize
        values = piece[:edge].copy().view(terms.dtype)  # copied because a piece may be unaligned
        indices = piece[edge:].copy().view(_index_dtype(terms.count))
        if len(indices) and (indices[-1] >= terms.count or (indices[1:] <= indices[:-1]).any()):
            raise ValueError(f"its indices are not ascending and below {terms.count}")
        return indices, values.astype(terms.work)


def largest(array: NDArray[Any], count: int) -> NDArray[np.intp]:
    """Returns ascending indices; of equal magnitudes, the lower one. Linear time."""
    # Without their sign, floats are ordered as their bits as integers: zeros, numbers, infinity, NaN. Unlike floats,
    # integers have a total order.
    magnitudes = np.abs(array).view(_BITS[array.itemsize])
    if count >= len(array):
        return np.arange(len(array))
    least = np.partition(magnitudes, len(array) - count)[len(array) - count]
    chosen_ones = magnitudes > least
    chosen_ones[_first(magnitudes, least, count - int(np.count_nonzero(chosen_ones)))] = True
    return np.flatnonzero(chosen_ones)


def _first(magnitudes: NDArray[Any], value: Any, count: int) -> NDArray[np.intp]:
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
    """All ranks send the same elements, drawn for each call, without indices.

    Without a residual the result is rescaled by `count / k`: its mean over calls is the result of all_reduce. With a
    residual it is not; elements that were not drawn stay there. NaN and infinity are noticed when drawn.
    """

    ratio: float
    """In (0, 1]: k = max(1, ceil(count * ratio)) elements are sent."""

    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", checked_ratio("RandomK", self.ratio))

    @property
    def name(self) -> str:
        return f"RandomK({self.ratio!r})"

    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        return elements_kept(count, self.ratio) * dtype.itemsize

    def compress(self, array: NDArray[Any], terms: Terms) -> Piece:
        return array[self._indices(terms)].astype(terms.dtype).view(np.uint8)

    def decompress(self, piece: Piece, terms: Terms) -> NDArray[Any]:
        """Rescales here, because half types would overflow before."""
        indices = self._indices(terms)
        values = piece.copy().view(terms.dtype).astype(terms.work)
        if not terms.feedback and len(values):
            values *= terms.work.type(terms.count / len(values))
        array = np.zeros(terms.count, terms.work)
        array[indices] = values
        return array

    def working_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        return count * work_dtype(dtype).itemsize + count + elements_kept(count, self.ratio) * 32

    def _indices(self, terms: Terms) -> NDArray[np.intp]:
        if _INDICES not in terms.kept:
            terms.kept[_INDICES] = draw_indices(terms.seed, terms.count, elements_kept(terms.count, self.ratio))
        found: NDArray[np.intp] = terms.kept[_INDICES]
        return found


def draw_indices(seed: int, count: int, wanted: int) -> NDArray[np.intp]:
    """Returns ascending indices; each subset is equally likely."""
    # The choice must not depend on the NumPy version. The raw output of a bit generator never changes; its `choice`
    # may.
    marked = np.zeros(count, np.bool_)
    few = min(wanted, count - wanted)  # draw the smaller set: the chosen or the others
    raw = np.random.PCG64(seed)
    missing = few
    while missing:
        # Draw until `few` different numbers have come. Drawing as many as are missing never gives too many. The modulo
        # bias is less than count / 2⁶⁴.
        marked[raw.random_raw(missing) % np.uint64(count)] = True
        missing = few - int(np.count_nonzero(marked))
    return np.flatnonzero(marked if few == wanted else ~marked)
