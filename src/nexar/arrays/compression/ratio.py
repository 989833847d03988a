"""Which part of an array travels: a ratio, and how many elements that makes."""

from __future__ import annotations

import math
from numbers import Real

from nexar.errors import UsageError


def checked(name: str, ratio: object) -> float:
    """A ratio above 0, at most 1. UsageError for anything else; `name`: of what it was given to."""
    number = math.nan if isinstance(ratio, bool) or not isinstance(ratio, Real) else float(ratio)
    if not 0 < number <= 1:
        raise UsageError(f"{name}({ratio!r}) sends no part of an array; give a ratio above 0, at most 1: 0.01 is 1 %")
    return number


def chosen(count: int, ratio: float) -> int:
    """How many of `count` elements travel: at least one, if there is any."""
    return min(count, max(1, math.ceil(count * ratio)))
