"""Bodies of remote calls and their answers.

A body is a head, the sizes of its pieces, a text (the function's name, or an error) and the pieces of an encoded value.
Several pieces are aligned, so that a large array can be used in place.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from nexar.arrays.views import allocate, copy

MAX_BODY_BYTES: Final = 256 << 20  # of a call or an answer
MAX_TEXT_BYTES: Final = 64 << 10
MAX_IDENTIFIER: Final = 65535  # the largest number of a function that is called by number

_HEAD: Final = struct.Struct("<BBxxIIId")  # what, pickled | number, bytes of text, pieces | seconds
_ALIGNMENT: Final = 64


class BodyKind(IntEnum):
    """Numbers are the wire format: never reuse one."""

    CALL = 1  # call the function that the text names
    CALL_BY_NUMBER = 2  # call the function with this number
    WITHDRAW = 3  # the caller cancels the call and wants no answer
    RETURNED = 16  # the pieces are the function's result
    RAISED = 17  # the text is the traceback
    UNKNOWN = 18  # there is no such function; the text lists the existing ones, one per line
    OVERLOADED = 19  # `number` calls already run, which is the limit
    CANCELLED = 20  # the text is the reason
    EXPIRED = 21  # the deadline passed before the function began, or ended


_CALLS: Final = frozenset((BodyKind.CALL, BodyKind.CALL_BY_NUMBER, BodyKind.WITHDRAW))


class Body(NamedTuple):
    """A decoded call or answer."""

    what: BodyKind
    text: str = ""
    number: int = 0
    seconds: float = 0.0
    """How long the caller waits, from sending."""
    pickled: bool = False
    pieces: Sequence[memoryview] = ()

    @property
    def is_call(self) -> bool:
        """True also for a cancellation."""
        return self.what in _CALLS

    @property
    def function(self) -> str | int:
        return self.number if self.what == BodyKind.CALL_BY_NUMBER else self.text


def call(
    function: str | int, seconds: float, pieces: Sequence[memoryview] = (), *, pickled: bool = False
) -> memoryview:
    """Return the body of a call."""
    if isinstance(function, int):
        return encode(Body(BodyKind.CALL_BY_NUMBER, "", function, seconds, pickled, pieces))
    return encode(Body(BodyKind.CALL, function, 0, seconds, pickled, pieces))


def encode(body: Body) -> memoryview:
    """Return the body. Raise ValueError above MAX_BODY_BYTES."""
    text = body.text.encode(errors="replace")[:MAX_TEXT_BYTES]
    sizes = [len(piece) for piece in body.pieces]
    starts, end = _places(len(text), sizes)
    if end > MAX_BODY_BYTES:
        raise ValueError(f"a body of {end} bytes; allowed are {MAX_BODY_BYTES >> 20} MiB")
    head = _HEAD.pack(body.what, body.pickled, body.number, len(text), len(sizes), body.seconds)
    front = head + struct.pack(f"<{len(sizes)}Q", *sizes) + text
    if len(sizes) <= 1:
        return memoryview(front + bytes(body.pieces[0]) if sizes else front)
    row = allocate(end)
    row[: len(front)] = front
    filled = len(front)
    for start, piece in zip(starts, body.pieces, strict=True):
        row[filled:start] = bytes(start - filled)  # the padding must not reveal old memory
        filled = start + len(piece)
        copy(piece, row[start:filled])
    return row


def decode(row: memoryview) -> Body:
    """Return the body, with pieces in the memory of `row`. Raise ValueError."""
    if len(row) < _HEAD.size:
        raise ValueError(f"a body of {len(row)} bytes is too short")
    what, pickled, number, text_bytes, count, seconds = _HEAD.unpack_from(row)
    if count > (len(row) - _HEAD.size) // 8 or text_bytes > MAX_TEXT_BYTES:
        raise ValueError(f"a body of {len(row)} bytes that announces {count} pieces and a text of {text_bytes} bytes")
    sizes = struct.unpack_from(f"<{count}Q", row, _HEAD.size)
    starts, end = _places(text_bytes, sizes)
    if end != len(row):
        raise ValueError(f"a body of {len(row)} bytes that announces {end}")
    begin = _HEAD.size + 8 * count
    text = str(row[begin : begin + text_bytes], "utf-8", errors="replace")
    pieces = tuple(row[start : start + size] for start, size in zip(starts, sizes, strict=True))
    if not seconds >= 0.0:
        raise ValueError(f"a call that waits {seconds} seconds")
    return Body(BodyKind(what), text, number, seconds, bool(pickled), pieces)


def _places(text_bytes: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    end = _HEAD.size + 8 * len(sizes) + text_bytes
    alignment = _ALIGNMENT if len(sizes) > 1 else 1
    starts = []
    for size in sizes:
        start = -(-end // alignment) * alignment
        starts.append(start)
        end = start + size
    return starts, end
