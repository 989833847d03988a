"""What a compressor is told of the call that it serves.

What makes an array smaller, so that less of it travels: the contract.

What is not sent in one call is sent in a later one: x + residual goes in, and what did not travel stays behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from nexar.errors import UsageError

_SINGLE: Final = np.dtype(np.float32)
_DOUBLE: Final = np.dtype(np.float64)


def work_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """In which arrays of this dtype are compressed and summed: float64 for itself, float32 for all narrower types."""
    return _DOUBLE if dtype == _DOUBLE else _SINGLE


@dataclass(frozen=True, eq=False)
class Terms:
    """One call of all_reduce_compressed, the same on all ranks but for `kept`."""

    count: int
    """Elements of the array."""
    dtype: np.dtype[Any]
    """The caller's: what the result is rounded to, and a good choice for values that travel."""
    seed: int
    """A number below 2⁶⁴, the same on all ranks, and another one for each call."""
    feedback: bool
    """The caller has a residual: what is not sent now is not lost."""
    kept: dict[str, Any] = field(default_factory=dict)
    """For the compressor, to remember what it would have to work out again in the same call. This rank's own."""

    @property
    def work(self) -> np.dtype[Any]:
        """The dtype of the array that is compressed, and of what is made of pieces: see work_dtype."""
        return work_dtype(self.dtype)


Piece = NDArray[np.uint8]
"""What one rank's array was made: a flat row of bytes."""


class Compressor(ABC):
    """Makes a piece of a rank's array, and an array of a piece. Subclass it for a way of your own.

    Every rank compresses its array, all pieces go to all ranks, and each rank adds up what they mean, in rank order: so
    all ranks have the same bits if `decompress` gives the same for the same piece and terms. A compressor has no state
    that a call changes: several threads may use one, and a call that failed leaves no trace. What it may lose, the
    residual keeps: the caller's array, plus the residual, minus what `decompress` makes of the own piece.

    An error that it raises ends the call on this rank with it, on the others with Cancelled, and nothing was written.
    """

    linear: ClassVar[bool] = False
    """A piece is a row of elements of the caller's dtype, and the sum of pieces, element by element, is the piece of
    the sum. Then the pieces are all-reduced instead of gathered, which costs less in larger worlds."""

    @property
    def name(self) -> str:
        """Says which one it is, with all that ranks must have alike; those whose names differ raise
        CollectiveMismatch. Override it if there is anything to set.
        """
        return type(self).__qualname__

    @abstractmethod
    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        """Of a piece of `count` elements. It depends on nothing else, so that all ranks expect the same; what varies
        has to be padded.
        """

    @abstractmethod
    def compress(self, array: NDArray[Any], terms: Terms) -> Piece:
        """The piece: a new flat array of `size_bytes`. `array` is flat, of dtype `terms.work`, and must not be changed:
        it may be the caller's own memory.
        """

    @abstractmethod
    def decompress(self, piece: Piece, terms: Terms) -> NDArray[Any]:
        """A new flat array of `terms.count` elements and dtype `terms.work`. `piece` may lie anywhere in memory, and
        must not be changed. ValueError if it cannot be one: that is what its sender is blamed for.
        """

    def add(self, piece: Piece, total: NDArray[Any], terms: Terms) -> None:
        """Add what the piece means to `total`. Override it where that is less work than to decompress it whole."""
        np.add(total, decompressed(self, piece, terms), out=total)

    def working_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        """The most memory that `compress`, `decompress` or `add` takes, beside what it is given and the piece that it
        makes. What `compressed_allreduce_max_bytes` is compared with has this in it.
        """
        return 3 * count * work_dtype(dtype).itemsize


def decompressed(compressor: Compressor, piece: Piece, terms: Terms) -> NDArray[Any]:
    """What the piece means. UsageError if the compressor made something else of it than it has to: NumPy would stretch
    a shorter array and convert another dtype, and nobody would see that the sum is wrong.
    """
    with np.errstate(all="ignore"):
        array: Any = compressor.decompress(piece, terms)
    if not isinstance(array, np.ndarray) or array.dtype != terms.work or array.shape != (terms.count,):
        raise UsageError(
            f"{compressor.name} made {described(array)} of a piece, where it has to be {terms.work}[{terms.count}]; "
            "convert it"
        )
    return array


def described(value: object) -> str:
    """What a compressor returned, as errors say it: `float32[3]`, or the type of what is no array."""
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__qualname__


def add_residual(array: NDArray[Any], residual: NDArray[Any] | None, terms: Terms) -> NDArray[Any]:
    """What is to be compressed, in the work dtype: a new array if there is a residual, else perhaps the caller's."""
    if residual is None:
        return array.astype(terms.work, copy=False)
    with np.errstate(all="ignore"):
        total: NDArray[Any] = np.add(array, residual, dtype=terms.work, casting="unsafe")
    return total


def new_residual(wanted: NDArray[Any], sent: NDArray[Any]) -> NDArray[Any]:
    """The next residual, in the memory of `wanted`. Where NaN or infinity was sent, nothing is left: all ranks have
    seen it, and a residual that kept it would never be of use again.
    """
    with np.errstate(all="ignore"):
        np.subtract(wanted, sent, out=wanted)
    wanted[~np.isfinite(sent)] = 0
    return wanted
