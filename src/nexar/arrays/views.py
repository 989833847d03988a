"""NumPy arrays and buffers as contiguous bytes, and back.

How a row of elements is cut: into shares for ranks, and into segments for a pipeline.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import RAW, code_of, dtype_of

_FORMATS: Final = frozenset("?bBhHiIlLqQfd")  # that a memoryview can be cast from, which is three times as quick
_COPY_WITHOUT_GIL_BYTES: Final = 64 << 10  # below this a plain slice assignment is quicker than NumPy's set-up


def as_bytes(array: NDArray[Any]) -> memoryview:
    """The memory of a C-contiguous array, writable if the array is. ValueError for any other layout."""
    if not array.flags.c_contiguous:
        raise ValueError("the array is not C-contiguous; pass numpy.ascontiguousarray(array)")
    if not array.size:
        return memoryview(bytearray())
    if array.dtype.char in _FORMATS:
        return array.data.cast("B")
    return array.reshape(-1).view(np.uint8).data  # of types that the buffer protocol has no word for


def code_and_shape(array: NDArray[Any]) -> tuple[int, tuple[int, ...]]:
    """What a frame says of an array."""
    return code_of(array.dtype), array.shape


def from_bytes(data: memoryview, code: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """The array that lies in `data`, sharing its memory; plain bytes (RAW) give uint8.

    ValueError if the sizes do not agree.
    """
    dtype = dtype_of(code)
    if dtype is None:
        if code != RAW:
            raise ValueError(f"unknown dtype number {code}")
        return np.frombuffer(data, np.uint8)
    return np.frombuffer(data, np.uint8).view(dtype).reshape(shape)


def as_row(data: object) -> memoryview:
    """Whatever holds contiguous memory, as a row of bytes. TypeError or ValueError for anything else."""
    if isinstance(data, np.ndarray):
        return as_bytes(data)
    return memoryview(data).cast("B") if len(data) else memoryview(b"")  # type: ignore[arg-type]


def allocate(size_bytes: int) -> memoryview:
    """Fresh memory.

    Pages are the system's until they are written, so a large claim costs nothing before bytes arrive. MemoryError or
    ValueError if even the address space is refused.
    """
    return np.empty(size_bytes, np.uint8).data if size_bytes else memoryview(bytearray())


def placeholder(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A read-only array of that shape that takes the memory of one element. Its values mean nothing."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def copy(source: memoryview, into: memoryview) -> None:
    """Copy bytes of equal length; large ones without holding the GIL, so that other threads go on."""
    if len(source) < _COPY_WITHOUT_GIL_BYTES:
        into[:] = source
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


class Span(NamedTuple):
    """The elements `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def count(self) -> int:  # type: ignore[override]  # a span has no use for a tuple's count()
        """How many elements."""
        return self.stop - self.start


def split(count: int, parts: int) -> tuple[Span, ...]:
    """`parts` spans that tile `count` elements in order, as np.array_split cuts them.

    The first `count % parts` of them have one element more; with fewer elements than parts the rest are empty.
    ValueError for a negative count and for less than one part.
    """
    if count < 0 or parts < 1:
        raise ValueError(f"{count} elements cannot be cut into {parts} parts")
    size, longer = divmod(count, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return tuple(map(Span, starts[:-1], starts[1:]))


def segments(span: Span, limit: int) -> tuple[Span, ...]:
    """Tiles of `span` in order, each of `limit` elements but the last, which has what is left; none of an empty span.

    ValueError for a limit below one.
    """
    if limit < 1:
        raise ValueError(f"segments of {limit} elements never reach the end")
    return tuple(Span(start, min(start + limit, span.stop)) for start in range(span.start, span.stop, limit))
