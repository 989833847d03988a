"""Arrays of the user as messages, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of
from nexar.arrays.operand import adapt, mirror_of
from nexar.arrays.view import as_bytes, code_and_shape, from_bytes
from nexar.errors import PeerMisbehaved, UsageError
from nexar.links.message import Receive
from nexar.links.sending import About
from nexar.types import ANY_TAG, Rank, whole
from nexar.wire.frame import Space

_MEMORY: Final = ("__array_interface__", "__array__", "__dlpack__")  # what shares its memory with NumPy, beside buffers


class Source(NamedTuple):
    """Where a message came from."""

    rank: Rank
    tag: int | None
    """None: it was sent without a tag."""


class Outgoing(NamedTuple):
    """A message that can be posted."""

    data: memoryview
    shape: tuple[int, ...]
    about: About


def outgoing(array: object, tag: int | None) -> Outgoing:
    """The message that carries this array; a copy if it is not contiguous. UsageError for what is no array."""
    held = as_array(array)
    if not held.flags.c_contiguous:
        held = np.ascontiguousarray(held)
    code, shape = _describe(held)
    space, number = space_and_tag(tag)
    return Outgoing(as_bytes(held), shape, About(space=space, tag=number, dtype=code))


class Incoming(NamedTuple):
    """Where a message is to go."""

    memory: memoryview | None
    """Contiguous; None: memory is made for what comes."""
    code: int
    """The dtype's number."""
    commit: Callable[[], None]
    """Call it when the message is here: brings it from `memory` to the caller's array, where they are not the same."""


def incoming(into: object) -> Incoming:
    """Of a receive buffer; None for "make one". UsageError for what cannot be filled."""
    if into is None:
        return Incoming(None, 0, _nothing)
    if not _has_memory(into) and mirror_of(into) is None:
        hint = f"; for the message of a rank, write source={into!r}" if whole(into) is not None else ""
        raise UsageError(
            f"nothing can be received into {type(into).__name__}; receive without a buffer, or into an array{hint}"
        )
    _refuse_masked(into)
    operand = adapt(into, writable=True, read=False)
    return Incoming(as_bytes(operand.array), code_of(operand.array.dtype), operand.commit)


def _nothing() -> None:
    """The message is where it belongs."""


def _has_memory(into: object) -> bool:
    """Whether an array made of it shares its memory. Of a list or a number NumPy makes a copy: what is received there
    would be lost without a word.
    """
    if isinstance(into, np.generic):
        return False
    try:
        memoryview(into)  # type: ignore[arg-type]  # whether it is one is the question
    except (TypeError, ValueError):  # ValueError: NumPy shows no buffer of a dtype such as bfloat16
        return any(hasattr(into, name) for name in _MEMORY)
    return True


def received(receive: Receive, source: Rank) -> NDArray[Any]:
    """The array of a receive that brought no buffer. PeerMisbehaved if what came is none."""
    assert receive.into is not None
    try:
        return from_bytes(receive.into, receive.frame.dtype, receive.shape)
    except ValueError as error:
        raise PeerMisbehaved(rank=source, what=f"it sent an array that is none: {error}") from error


def space_and_tag(tag: object) -> tuple[int, int]:
    """Of a send. UsageError for a tag that is none."""
    if tag is None:
        return Space.UNTAGGED, 0
    number = whole(tag)
    if number is None or not 0 <= number < 1 << 64:
        raise UsageError(f"{tag!r} is not a tag; tags are whole numbers from 0 to 2**64 - 1")
    return Space.TAGGED, number


def space_and_wanted_tag(tag: object) -> tuple[int, int]:
    """Of a receive, which may take any."""
    return (Space.TAGGED, ANY_TAG) if whole(tag) == ANY_TAG else space_and_tag(tag)


def as_array(array: object) -> NDArray[Any]:
    """A plain NumPy array on the same memory, where there is any. UsageError names what it is instead."""
    if type(array) is np.ndarray:
        return array
    _refuse_masked(array)
    if not isinstance(array, list | tuple):
        return adapt(array).array
    try:
        return np.asarray(array)
    except (TypeError, ValueError) as error:
        raise UsageError(f"this {type(array).__name__} is not an array: {error}") from error


def _refuse_masked(array: object) -> None:
    if isinstance(array, np.ndarray) and isinstance(array, np.ma.MaskedArray):  # in this order: np.ma loads when asked
        raise UsageError("a masked array is two arrays; use its .data and its .mask, each by itself, or send .filled()")


def _describe(array: NDArray[Any]) -> tuple[int, tuple[int, ...]]:
    try:
        return code_and_shape(array)
    except TypeError as error:
        raise UsageError(str(error)) from error
