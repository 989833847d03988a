"""The compressor interface, and residuals: unsent data is added to the next call."""

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
    """Returns float64 for float64, else float32."""
    return _DOUBLE if dtype == _DOUBLE else _SINGLE


@dataclass(frozen=True, eq=False)
class Terms:
    """Parameters of one call, equal on all ranks except `kept`."""

    count: int
    dtype: np.dtype[Any]
    """The caller's dtype; the result is rounded to it."""
    seed: int
    """A number below 2⁶⁴, equal on all ranks and different for each call."""
    feedback: bool
    """True if the caller has a residual, so that unsent data is not lost."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Cache of the compressor for this call, local to this rank."""

    @property
    def work(self) -> np.dtype[Any]:
        return work_dtype(self.dtype)


Piece = NDArray[np.uint8]
"""A compressed array: flat bytes."""


class Compressor(ABC):
    """Converts arrays to pieces and back. Subclass it for custom compression.

    All pieces are sent to all ranks, and each rank sums the decompressed arrays in rank order. So all ranks have the
    same bits if `decompress` depends only on piece and terms. Several threads may use one compressor, so it has no
    mutable state. The new residual is array + residual - decompress(own piece).

    An error that it raises ends the call on this rank; the others raise Cancelled, and nothing is written.
    """

    linear: ClassVar[bool] = False
    """True if pieces are elements of the caller's dtype and the sum of pieces is the piece of the sum. Then they are
    all-reduced instead of gathered, which costs less in larger worlds.
    """

    @property
    def name(self) -> str:
        """Identifies the compressor and its parameters; override it if there are any. Ranks with different names raise
        CollectiveMismatch.
        """
        return type(self).__qualname__

    @abstractmethod
    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        """Returns the bytes of a piece, which must depend only on the arguments; pad if necessary."""

    @abstractmethod
    def compress(self, array: NDArray[Any], terms: Terms) -> Piece:
        """Returns the piece, a new flat array of `size_bytes`. `array` is flat, of dtype `terms.work`, and must not be
        modified.
        """

    @abstractmethod
    def decompress(self, piece: Piece, terms: Terms) -> NDArray[Any]:
        """Returns a new flat array of `terms.count` elements and dtype `terms.work`. `piece` may be unaligned and must
        not be modified. Raise ValueError if it is invalid: the error then names the sender.
        """

    def add(self, piece: Piece, total: NDArray[Any], terms: Terms) -> None:
        """Add the decompressed piece to `total`. Override it if that is cheaper than decompressing."""
        np.add(total, decompressed(self, piece, terms), out=total)

    def working_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        """Returns the peak memory of the other methods, without arguments and piece, for
        `compressed_allreduce_max_bytes`.
        """
        return 3 * count * work_dtype(dtype).itemsize


def decompressed(compressor: Compressor, piece: Piece, terms: Terms) -> NDArray[Any]:
    """Raises UsageError for a wrong shape or dtype, which NumPy would convert silently."""
    with np.errstate(all="ignore"):
        array: Any = compressor.decompress(piece, terms)
    if not isinstance(array, np.ndarray) or array.dtype != terms.work or array.shape != (terms.count,):
        raise UsageError(
            f"{compressor.name} decompressed a piece to {described(array)}, not to {terms.work}[{terms.count}]; "
            "convert it"
        )
    return array


def described(value: object) -> str:
    """Returns `float32[3]`, or a type's name."""
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__qualname__


def add_residual(array: NDArray[Any], residual: NDArray[Any] | None, terms: Terms) -> NDArray[Any]:
    """Returns the array to compress in the work dtype, maybe the caller's own."""
    if residual is None:
        return array.astype(terms.work, copy=False)
    with np.errstate(all="ignore"):
        total: NDArray[Any] = np.add(array, residual, dtype=terms.work, casting="unsafe")
    return total


def new_residual(wanted: NDArray[Any], sent: NDArray[Any]) -> NDArray[Any]:
    """Returns the residual in the memory of `wanted`: 0 where NaN or infinity was sent, which would never leave it."""
    with np.errstate(all="ignore"):
        np.subtract(wanted, sent, out=wanted)
    wanted[~np.isfinite(sent)] = 0
    return wanted
