"""Messages of several pieces of memory.

The first part has the caller's tag. It holds the sizes and, for a small message, the bytes. Otherwise each piece
follows uncopied as its own message, under a number from the first part that no receive for the caller's tag matches.

Invariant: after a first part the sender sends every piece, or an empty one that means "no more". The receiver takes
every piece, gives all back (if cancelled) or drains the rest (if failed). So no piece is left over, and a cancelled
receive loses nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

from nexar.arrays.views import allocate, copy
from nexar.errors import NexarError, PeerMisbehaved
from nexar.group import Group
from nexar.links.messages import PartReceive, Receive
from nexar.links.operation import Operation
from nexar.links.sending import MessageHeader
from nexar.types import Rank
from nexar.wire.frame import Space

T = TypeVar("T")
# An operation in progress. It continues when the operations it yields are done. Close it if one of them fails: it then
# releases everything.
Run: TypeAlias = Generator[Sequence[Operation], None, T]

# Up to this total the pieces are copied into the first part: that costs less than a message each.
WHOLE_BYTES: Final = 32 << 10
_HEAD: Final = struct.Struct("<QQ")  # number of sizes, number of the pieces
_INLINE: Final = (1 << 64) - 1  # instead of a number: the bytes follow
_ALIGNMENT: Final = 64
_NOTHING: Final = memoryview(b"")


class PieceTable(NamedTuple):
    """Contents of a first part."""

    sizes: tuple[int, ...]
    # of the following pieces; None: they are in `inline`
    number: int | None
    inline: tuple[memoryview, ...]


def flatten(pieces: Sequence[memoryview]) -> memoryview:
    """Return one buffer with all pieces, each aligned."""
    sizes = [len(piece) for piece in pieces]
    starts, end = _starts(sizes)
    row = allocate(end)
    head = _head(sizes, _INLINE)
    row[: len(head)] = head
    for start, piece in zip(starts, pieces, strict=True):
        copy(piece, row[start : start + len(piece)])
    return row


def unflatten(row: memoryview) -> tuple[memoryview, ...]:
    """Return the pieces of a `flatten` buffer, in its memory. ValueError for other bytes."""
    table = read_table(row)
    if table.number is not None:
        raise ValueError("a table without its pieces")
    return table.inline


def read_table(row: memoryview) -> PieceTable:
    """Parse a first part. ValueError for other bytes."""
    if len(row) < _HEAD.size:
        raise ValueError(f"a table of {len(row)} bytes")
    count, number = _HEAD.unpack_from(row)
    if count > (len(row) - _HEAD.size) // 8:
        raise ValueError(f"a table of {count} sizes in {len(row)} bytes")
    sizes = struct.unpack_from(f"<{count}Q", row, _HEAD.size)
    if number != _INLINE:
        return PieceTable(sizes, number, ())
    starts, end = _starts(sizes)
    if end != len(row):
        raise ValueError(f"pieces of {end} bytes in {len(row)}")
    return PieceTable(sizes, None, tuple(row[at : at + size] for at, size in zip(starts, sizes, strict=True)))


def _head(sizes: Sequence[int], number: int) -> bytes:
    return _HEAD.pack(len(sizes), number) + struct.pack(f"<{len(sizes)}Q", *sizes)


def _starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    end = _HEAD.size + 8 * len(sizes)
    starts = []
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end


# ---------------------------------------------------------------- sending and receiving


def send_parts(
    group: Group, dest: Rank, pieces: Sequence[memoryview], about: MessageHeader, deadline: float
) -> Run[None]:
    """Send the pieces as one message. `about`: header of the first part."""
    sizes = [len(piece) for piece in pieces]
    total = sum(sizes)
    about = about._replace(elements=total)
    if total <= WHOLE_BYTES:
        yield from wait_or_undo((group.post_send(dest, flatten(pieces), deadline, about=about),))
        return
    number = next(group.parted)
    first = group.post_send(dest, memoryview(_head(sizes, number)), deadline, about=about)
    if not first.done:  # a rendezvous: no piece may arrive before the first part
        yield from wait_or_undo((first,))
    yield from _send_pieces(group, dest, [piece for piece in pieces if len(piece)], number, deadline)


def _send_pieces(group: Group, dest: Rank, pieces: Sequence[memoryview], number: int, deadline: float) -> Run[None]:
    about = MessageHeader(space=Space.PART, tag=number)
    posted: list[Operation] = []
    try:
        for piece in pieces:
            posted.append(group.post_send(dest, piece, deadline, about=about))  # noqa: PERF401 - on failure the earlier ones are cancelled
        yield posted
    except BaseException:
        _cancel(posted)
        _send_end(group, dest, about, deadline)
        raise


def _send_end(group: Group, dest: Rank, about: MessageHeader, deadline: float) -> None:
    try:
        group.post_send(dest, _NOTHING, deadline, about=about)
    except NexarError:
        return  # there is no link, which also ends the receiver's wait


PieceMemory: TypeAlias = Callable[[tuple[int, ...]], Sequence[memoryview]]


def receive_parts(
    group: Group, first: Receive, allocate_pieces: PieceMemory, taken: list[Receive] | None = None
) -> Run[Sequence[memoryview]]:
    """Return the pieces, in the first part or in `allocate_pieces(sizes)`. Adds the receives to `taken`."""
    yield from wait_or_undo((first,))
    taken = [] if taken is None else taken
    taken.append(first)
    source = sender_of(group, first)
    table = _table_of(first, source)
    if table.number is None:
        return table.inline
    try:
        memory = allocate_pieces(table.sizes)
    except BaseException:
        first.undo()
        raise
    pieces = [each for each in memory if len(each)]
    taken += yield from _receive_pieces(group, source, first, pieces, table.number)
    return memory


def _receive_pieces(
    group: Group, source: Rank, first: Receive, pieces: Sequence[memoryview], number: int
) -> Run[list[PartReceive]]:
    posted: list[PartReceive] = []
    try:
        for piece in pieces:
            part = group.post_receive(source, piece, space=Space.PART, tag=number, ask=PartReceive)
            assert isinstance(part, PartReceive)
            posted.append(part)
        yield posted
    except BaseException:
        if len(posted) == len(pieces) and not any(part.failed for part in posted):
            undo((*posted, first))
        else:
            _cancel(posted)
            missing = sum(1 for each in posted if each.error is not None) + len(pieces) - len(posted)
            group.drain(source, tag=number, parts=missing)
        raise
    return posted


def _table_of(first: Receive, source: Rank) -> PieceTable:
    assert first.into is not None
    try:
        table = read_table(first.into)
        if sum(table.sizes) != first.frame.count:
            raise ValueError(f"pieces of {sum(table.sizes)} bytes, announced as {first.frame.count}")
    except ValueError as error:
        raise PeerMisbehaved(rank=source, what=f"it sent {error} as the first part of a message") from error
    return table


def new_memory(sizes: tuple[int, ...]) -> list[memoryview]:
    """Raises MemoryError: the sender chose the sizes."""
    try:
        return [allocate(size) for size in sizes]
    except (MemoryError, ValueError) as error:
        raise MemoryError(f"a message of {sum(sizes)} bytes does not fit into memory; it is kept") from error


def sender_of(group: Group, receive: Receive) -> Rank:
    """Source rank of a finished receive."""
    node = receive.frame.source
    return group.rank_of(node) if node else group.rank  # a message to itself has no source node


def wait_or_undo(operations: Sequence[Operation]) -> Run[None]:
    """On failure undo all, which gives back their messages."""
    try:
        yield operations
    except BaseException:
        undo(operations)
        raise


def undo(operations: Sequence[Operation]) -> None:
    """Undo every operation."""
    for operation in operations:
        operation.undo()


def _cancel(operations: Sequence[Operation]) -> None:
    for operation in operations:
        operation.cancel()
