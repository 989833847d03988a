"""Arithmetic that neither warns nor raises where IEEE 754 has an answer."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, Final

import numpy as np

# A sum that overflows is infinite, and everywhere so. Were the caller's np.seterr(over="raise") or a warnings filter to
# apply, one rank would leave a collective in which the others wait for it. NumPy 2 keeps its error state in a context
# variable, and a call within a copy of a context of ours costs 0.1 µs where np.errstate costs 1; NumPy 1 keeps it per
# thread, where a change would outlive the call. A copy, because a context can be entered only once at a time, and
# several threads (and signal handlers) reduce.


def _silent_context() -> contextvars.Context | None:
    context = contextvars.Context()
    before = np.geterr()
    context.run(np.seterr, all="ignore")
    if np.geterr() == before:
        return context
    np.seterr(**before)
    return None


_CONTEXT: Final = _silent_context()


def quiet(function: Callable[..., object]) -> Callable[..., None]:
    """`function` of positional arguments with NumPy's floating-point errors ignored; its result is dropped."""
    if _CONTEXT is None:
        return _with_errstate(function)
    copy = _CONTEXT.copy

    def call(*arguments: object) -> None:
        copy().run(function, *arguments)

    return call


def quiet_ufunc(ufunc: np.ufunc) -> Callable[[Any, Any, Any], None]:
    """`(out, left, right)`: one call of a binary ufunc into `out`, with floating-point errors ignored."""
    if _CONTEXT is None:
        return _with_errstate(lambda out, left, right: ufunc(left, right, out=out))
    copy = _CONTEXT.copy

    def call(out: Any, left: Any, right: Any) -> None:
        copy().run(ufunc, left, right, out=out)

    return call


def _with_errstate(function: Callable[..., object]) -> Callable[..., None]:
    def call(*arguments: object) -> None:
        with np.errstate(all="ignore"):
            function(*arguments)

    return call
