"""Arrays as bytes; splitting into shares and segments."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import RAW, code_of, dtype_of

_FORMATS: Final = frozenset("?bBhHiIlLqQfd")  # castable memoryview formats; the cast is three times as fast
_COPY_WITHOUT_GIL_BYTES: Final = 64 << 10  # below this size slice assignment is faster than NumPy's setup


def as_bytes(array: NDArray[Any]) -> memoryview:
    """Returns its memory, writable if the array is. Raises ValueError unless C-contiguous."""
    if not array.flags.c_contiguous:
        raise ValueError("the array is not C-contiguous; pass numpy.ascontiguousarray(array)")
    if not array.size:
        return memoryview(bytearray())
    if array.dtype.char in _FORMATS:
        return array.data.cast("B")
    return array.reshape(-1).view(np.uint8).data  # for types that the buffer protocol lacks


def code_and_shape(array: NDArray[Any]) -> tuple[int, tuple[int, ...]]:
    """Returns an array's description in a frame."""
    return code_of(array.dtype), array.shape


def from_bytes(data: memoryview, code: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """Returns an array in the memory of `data`; RAW gives uint8. Raises ValueError if sizes disagree."""
    dtype = dtype_of(code)
    if dtype is None:
        if code != RAW:
            raise ValueError(f"unknown dtype number {code}")
        return np.frombuffer(data, np.uint8)
    return np.frombuffer(data, np.uint8).view(dtype).reshape(shape)


def as_row(data: object) -> memoryview:
    """Returns contiguous memory as bytes. Raises TypeError or ValueError."""
    if isinstance(data, np.ndarray):
        return as_bytes(data)
    return memoryview(data).cast("B") if len(data) else memoryview(b"")  # type: ignore[arg-type]


def allocate(size_bytes: int) -> memoryview:
    """Returns memory whose pages cost nothing until written. Raises MemoryError or ValueError."""
    return np.empty(size_bytes, np.uint8).data if size_bytes else memoryview(bytearray())


def placeholder(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns a read-only array with the memory of one element."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def copy(source: memoryview, into: memoryview) -> None:
    """Copy bytes of equal length; large copies release the GIL."""
    if len(source) < _COPY_WITHOUT_GIL_BYTES:
        into[:] = source
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


class Span(NamedTuple):
    """Elements `start` (inclusive) to `stop` (exclusive)."""

    start: int
    stop: int

    @property
    def count(self) -> int:  # type: ignore[override] # tuple.count() is not needed
        return self.stop - self.start


def split(count: int, parts: int) -> tuple[Span, ...]:
    """Splits like np.array_split: the first `count % parts` spans have one more. Raises ValueError."""
    if count < 0 or parts < 1:
        raise ValueError(f"cannot split {count} elements into {parts} parts")
    size, longer = divmod(count, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return tuple(map(Span, starts[:-1], starts[1:]))


def segments(span: Span, limit: int) -> tuple[Span, ...]:
    """Splits into `limit` elements; the last may have fewer. Raises ValueError."""
    if limit < 1:
        raise ValueError(f"the segment limit must be at least 1, not {limit}")
    return tuple(Span(start, min(start + limit, span.stop)) for start in range(span.start, span.stop, limit))
