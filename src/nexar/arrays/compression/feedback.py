"""What is not sent in one call is sent in a later one: x + residual goes in, and what did not travel stays behind."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.compression.terms import Terms


def corrected(array: NDArray[Any], residual: NDArray[Any] | None, terms: Terms) -> NDArray[Any]:
    """What is to be compressed, in the work dtype: a new array if there is a residual, else perhaps the caller's."""
    if residual is None:
        return array.astype(terms.work, copy=False)
    with np.errstate(all="ignore"):
        total: NDArray[Any] = np.add(array, residual, dtype=terms.work, casting="unsafe")
    return total


def left_over(wanted: NDArray[Any], sent: NDArray[Any]) -> NDArray[Any]:
    """The next residual, in the memory of `wanted`. Where NaN or infinity was sent, nothing is left: all ranks have
    seen it, and a residual that kept it would never be of use again.
    """
    with np.errstate(all="ignore"):
        np.subtract(wanted, sent, out=wanted)
    wanted[~np.isfinite(sent)] = 0
    return wanted
