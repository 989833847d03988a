"""What a compressor is told of the call that it serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

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
