"""Some elements travel, drawn anew for each call: the same on all ranks, so that only their values do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.compression.compressor import Compressor, Piece
from nexar.arrays.compression.ratio import checked, chosen
from nexar.arrays.compression.terms import Terms, work_dtype

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
        object.__setattr__(self, "ratio", checked("RandomK", self.ratio))

    @property
    def name(self) -> str:
        """With its ratio."""
        return f"RandomK({self.ratio!r})"

    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        """A value of the caller's dtype each."""
        return chosen(count, self.ratio) * dtype.itemsize

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
        return count * work_dtype(dtype).itemsize + count + chosen(count, self.ratio) * 32

    def _indices(self, terms: Terms) -> NDArray[np.intp]:
        if _INDICES not in terms.kept:
            terms.kept[_INDICES] = drawn(terms.seed, terms.count, chosen(terms.count, self.ratio))
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
