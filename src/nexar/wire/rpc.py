"""Bodies of remote calls and of their answers: bytes ⇄ meaning.

A body is a head, the sizes of its pieces, a text (the function's name, or what went wrong), and the pieces, which are
an encoded value. More than one piece means large arrays: then each begins at an aligned place, so that it can be used
where it lies.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from nexar.arrays.views import allocate, copy

MAX_BODY_BYTES: Final = 256 << 20
"""Of a call, and of an answer."""
MAX_TEXT_BYTES: Final = 64 << 10
MAX_IDENTIFIER: Final = 65535
"""Of a function that is called by number."""

_HEAD: Final = struct.Struct("<BBxxIIId")  # what, pickled | number, bytes of text, pieces | seconds
_ALIGNMENT: Final = 64


class BodyKind(IntEnum):
    """What a body is. Numbers are the wire format: never reuse one."""

    CALL = 1  # of the function that the text names
    CALL_BY_NUMBER = 2  # of the function with this number
    WITHDRAW = 3  # the caller wants no answer to the call any more
    RETURNED = 16  # the pieces are the function's result
    RAISED = 17  # the text is the traceback
    UNKNOWN = 18  # there is no such function; the text lists those there are, a line each
    OVERLOADED = 19  # as many calls as `number` says run already
    CANCELLED = 20  # the text says why
    EXPIRED = 21  # the call's time was over before the function could begin, or end


_CALLS: Final = frozenset((BodyKind.CALL, BodyKind.CALL_BY_NUMBER, BodyKind.WITHDRAW))


class Body(NamedTuple):
    """What one side says to the other."""

    what: BodyKind
    text: str = ""
    number: int = 0
    seconds: float = 0.0
    """How long the caller waits, from when it sent this."""
    pickled: bool = False
    pieces: Sequence[memoryview] = ()

    @property
    def is_call(self) -> bool:
        """Or about one; else it is an answer."""
        return self.what in _CALLS

    @property
    def function(self) -> str | int:
        """That is called: its name, or its number."""
        return self.number if self.what == BodyKind.CALL_BY_NUMBER else self.text


def call(
    function: str | int, seconds: float, pieces: Sequence[memoryview] = (), *, pickled: bool = False
) -> memoryview:
    """The body of a call, encoded."""
    if isinstance(function, int):
        return encode(Body(BodyKind.CALL_BY_NUMBER, "", function, seconds, pickled, pieces))
    return encode(Body(BodyKind.CALL, function, 0, seconds, pickled, pieces))


def encode(body: Body) -> memoryview:
    """One row of bytes. ValueError if it is longer than a body may be."""
    text = body.text.encode(errors="replace")[:MAX_TEXT_BYTES]
    sizes = [len(piece) for piece in body.pieces]
    starts, end = _places(len(text), sizes)
    if end > MAX_BODY_BYTES:
        raise ValueError(f"{end} bytes; {MAX_BODY_BYTES >> 20} MiB are allowed")
    head = _HEAD.pack(body.what, body.pickled, body.number, len(text), len(sizes), body.seconds)
    front = head + struct.pack(f"<{len(sizes)}Q", *sizes) + text
    if len(sizes) <= 1:
        return memoryview(front + bytes(body.pieces[0]) if sizes else front)
    row = allocate(end)
    row[: len(front)] = front
    filled = len(front)
    for start, piece in zip(starts, body.pieces, strict=True):
        row[filled:start] = bytes(start - filled)  # what lay here before is nobody's business
        filled = start + len(piece)
        copy(piece, row[start:filled])
    return row


def decode(row: memoryview) -> Body:
    """The pieces share its memory. ValueError for bytes that are no body."""
    if len(row) < _HEAD.size:
        raise ValueError(f"a body of {len(row)} bytes")
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
    """Where each piece begins, and where the last one ends."""
    end = _HEAD.size + 8 * len(sizes) + text_bytes
    alignment = _ALIGNMENT if len(sizes) > 1 else 1
    starts = []
    for size in sizes:
        start = -(-end // alignment) * alignment
        starts.append(start)
        end = start + size
    return starts, end
