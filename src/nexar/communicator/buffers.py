"""A list of buffers as pieces of a message, and pieces as buffers that may be cut differently.

A run of small buffers is one piece, copied together: a message each would cost more than the copy. A large buffer is a
piece of its own. A piece that lies within one of the receiver's buffers flows straight into it; only one that reaches
over an edge is received beside them and then copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from nexar.arrays.view import allocate, copy
from nexar.links.message import room_for, row_of

_SMALL_BYTES: Final = 16 << 10
_RUN_BYTES: Final = 256 << 10


def gathered(buffers: Sequence[object]) -> list[memoryview]:
    """The pieces to send. UsageError for what holds no contiguous memory."""
    pieces: list[memoryview] = []
    run: list[memoryview] = []
    length = 0
    for row in [row_of(buffer, "a send needs contiguous memory") for buffer in buffers]:
        small = len(row) <= _SMALL_BYTES
        if run and (not small or length + len(row) > _RUN_BYTES):
            pieces.append(_joined(run))
            run, length = [], 0
        if small:
            run.append(row)
            length += len(row)
        else:
            pieces.append(row)
    return [*pieces, _joined(run)] if run else pieces


def _joined(rows: list[memoryview]) -> memoryview:
    return rows[0] if len(rows) == 1 else memoryview(b"".join(rows))


class Stretch(NamedTuple):
    """Bytes of a receiver's buffer."""

    buffer: int
    start: int
    stop: int


def cut(sizes: Sequence[int], lengths: Sequence[int]) -> list[list[Stretch]]:
    """Where each piece lies in buffers of these lengths, which are as long in all."""
    cuts: list[list[Stretch]] = []
    buffer = start = 0
    for size in sizes:
        stretches: list[Stretch] = []
        while size:
            if start == lengths[buffer]:
                buffer, start = buffer + 1, 0
                continue
            stop = min(lengths[buffer], start + size)
            stretches.append(Stretch(buffer, start, stop))
            size -= stop - start  # noqa: PLW2901 - what is left of this piece
            start = stop
        cuts.append(stretches)
    return cuts


class Scatter:
    """Buffers of a receiver, filled from pieces."""

    def __init__(self, buffers: Sequence[object]) -> None:
        """UsageError for what cannot be filled."""
        self._rows = [room_for(buffer) for buffer in buffers]
        self.total = sum(len(row) for row in self._rows)
        self._cuts: list[list[Stretch]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def room(self, sizes: tuple[int, ...]) -> list[memoryview]:
        """The memory for each piece."""
        self._cuts = self._cut(sizes)
        return [
            self._row(stretches[0]) if len(stretches) == 1 else allocate(size)
            for size, stretches in zip(sizes, self._cuts, strict=True)
        ]

    def settle(self, pieces: Sequence[memoryview]) -> None:
        """Bring what was received beside the buffers into them. The pieces are all of the message."""
        direct = bool(self._cuts)
        cuts = self._cuts or self._cut([len(piece) for piece in pieces])
        for piece, stretches in zip(pieces, cuts, strict=True):
            if direct and len(stretches) == 1:
                continue  # it is there
            at = 0
            for stretch in stretches:
                row = self._row(stretch)
                copy(piece[at : at + len(row)], row)
                at += len(row)

    def _cut(self, sizes: Sequence[int]) -> list[list[Stretch]]:
        return cut(sizes, [len(row) for row in self._rows])

    def _row(self, stretch: Stretch) -> memoryview:
        return self._rows[stretch.buffer][stretch.start : stretch.stop]
