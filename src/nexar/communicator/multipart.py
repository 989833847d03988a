"""One message of many pieces of memory, which are never put together unless they are small.

The first part travels in the caller's conversation: a table of sizes, and if all of it is small, the bytes themselves.
Otherwise the pieces follow, each a message of its own, in a conversation that the table names; so a large piece flows
from its memory to its memory, and nobody who asks for messages of the caller's tag ever sees one.

Law: who sends the table sends every piece after it, or one without bytes, which means "no more comes". A receiver that
takes the table takes every piece, gives all of them back (if it is cancelled), or drains what is left (if the message
failed). So neither leaves anything behind at the other, and a cancelled receive loses nothing.
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
Run: TypeAlias = Generator[Sequence[Operation], None, T]
"""A verb on its way: what it yields must be done before it goes on; what it returns is the result. Close it if any of
that failed: then it lets go of everything."""

WHOLE_BYTES: Final = 32 << 10
"""Up to this much the pieces are copied into the first part: that costs less than a message each."""
_HEAD: Final = struct.Struct("<QQ")  # how many sizes follow, and the number of the pieces' conversation
_WITHIN: Final = (1 << 64) - 1  # instead of a number: the bytes follow here
_ALIGNMENT: Final = 64
_NOTHING: Final = memoryview(b"")


class PieceTable(NamedTuple):
    """What a first part says."""

    sizes: tuple[int, ...]
    number: int | None
    """Of the conversation of the pieces; None: they are `within`."""
    within: tuple[memoryview, ...]


def flatten(pieces: Sequence[memoryview]) -> memoryview:
    """All pieces in one row of bytes, each aligned."""
    sizes = [len(piece) for piece in pieces]
    starts, end = _starts(sizes)
    row = allocate(end)
    head = _head(sizes, _WITHIN)
    row[: len(head)] = head
    for start, piece in zip(starts, pieces, strict=True):
        copy(piece, row[start : start + len(piece)])
    return row


def unflatten(row: memoryview) -> tuple[memoryview, ...]:
    """The pieces of a row that `flatten` made, sharing its memory. ValueError for any other row."""
    table = read_table(row)
    if table.number is not None:
        raise ValueError("a table without its pieces")
    return table.within


def read_table(row: memoryview) -> PieceTable:
    """ValueError for bytes that are none."""
    if len(row) < _HEAD.size:
        raise ValueError(f"a table of {len(row)} bytes")
    count, number = _HEAD.unpack_from(row)
    if count > (len(row) - _HEAD.size) // 8:
        raise ValueError(f"a table of {count} sizes in {len(row)} bytes")
    sizes = struct.unpack_from(f"<{count}Q", row, _HEAD.size)
    if number != _WITHIN:
        return PieceTable(sizes, number, ())
    starts, end = _starts(sizes)
    if end != len(row):
        raise ValueError(f"pieces of {end} bytes in {len(row)}")
    return PieceTable(sizes, None, tuple(row[at : at + size] for at, size in zip(starts, sizes, strict=True)))


def _head(sizes: Sequence[int], number: int) -> bytes:
    return _HEAD.pack(len(sizes), number) + struct.pack(f"<{len(sizes)}Q", *sizes)


def _starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each piece begins in a flat row, and where the last one ends."""
    end = _HEAD.size + 8 * len(sizes)
    starts = []
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end


# ---------------------------------------------------------------- on a group


def send_parts(
    group: Group, dest: Rank, pieces: Sequence[memoryview], about: MessageHeader, deadline: float
) -> Run[None]:
    """Send them as one message. `about` is its first part's; how many bytes there are in all is added here."""
    sizes = [len(piece) for piece in pieces]
    total = sum(sizes)
    about = about._replace(elements=total)
    if total <= WHOLE_BYTES:
        yield from wait_or_undo((group.post_send(dest, flatten(pieces), deadline, about=about),))
        return
    number = next(group.parted)
    first = group.post_send(dest, memoryview(_head(sizes, number)), deadline, about=about)
    if not first.done:  # so long that it waits for its receive: a piece must not be there without it
        yield from wait_or_undo((first,))
    yield from _send_pieces(group, dest, [piece for piece in pieces if len(piece)], number, deadline)


def _send_pieces(group: Group, dest: Rank, pieces: Sequence[memoryview], number: int, deadline: float) -> Run[None]:
    about = MessageHeader(space=Space.PART, tag=number)
    posted: list[Operation] = []
    try:
        for piece in pieces:
            posted.append(group.post_send(dest, piece, deadline, about=about))  # noqa: PERF401 - those before must be known
        yield posted
    except BaseException:
        _cancel(posted)
        _tell_end(group, dest, about, deadline)
        raise


def _tell_end(group: Group, dest: Rank, about: MessageHeader, deadline: float) -> None:
    try:
        group.post_send(dest, _NOTHING, deadline, about=about)
    except NexarError:
        return  # it cannot be told, so there is no link: that ends its wait as well


PieceMemory: TypeAlias = Callable[[tuple[int, ...]], Sequence[memoryview]]


def receive_parts(
    group: Group, first: Receive, room: PieceMemory, taken: list[Receive] | None = None
) -> Run[Sequence[memoryview]]:
    """Wait for a first part that was asked for, and for its pieces. `room(sizes)` gives the memory that each goes to.
    The receives that took the parts are added to `taken`.

    Returns the pieces. When all came in the first part, they are in its memory, and `room` is not asked.
    """
    yield from wait_or_undo((first,))
    taken = [] if taken is None else taken
    taken.append(first)
    source = sender_of(group, first)
    table = _table_of(first, source)
    if table.number is None:
        return table.within
    try:
        rooms = room(table.sizes)
    except BaseException:
        first.undo()
        raise
    pieces = [each for each in rooms if len(each)]
    taken += yield from _receive_pieces(group, source, first, pieces, table.number)
    return rooms


def _receive_pieces(
    group: Group, source: Rank, first: Receive, rooms: Sequence[memoryview], number: int
) -> Run[list[PartReceive]]:
    posted: list[PartReceive] = []
    try:
        for room in rooms:
            part = group.post_receive(source, room, space=Space.PART, tag=number, ask=PartReceive)
            assert isinstance(part, PartReceive)
            posted.append(part)
        yield posted
    except BaseException:
        if len(posted) == len(rooms) and not any(part.failed for part in posted):
            undo((*posted, first))
        else:
            _cancel(posted)
            missing = sum(1 for each in posted if each.error is not None) + len(rooms) - len(posted)
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
    """New memory for each. MemoryError if there is not as much: the sizes are the sender's claim."""
    try:
        return [allocate(size) for size in sizes]
    except (MemoryError, ValueError) as error:
        raise MemoryError(f"a message of {sum(sizes)} bytes does not fit into memory; it is kept") from error


def sender_of(group: Group, receive: Receive) -> Rank:
    """Who sent what a receive that is done has got."""
    node = receive.frame.source
    return group.rank_of(node) if node else group.rank  # what I send to myself passes no wire


def wait_or_undo(operations: Sequence[Operation]) -> Run[None]:
    """Wait for these; if that ends otherwise, they are undone: what they took goes back."""
    try:
        yield operations
    except BaseException:
        undo(operations)
        raise


def undo(operations: Sequence[Operation]) -> None:
    """Undo each of them: see Operation.undo."""
    for operation in operations:
        operation.undo()


def _cancel(operations: Sequence[Operation]) -> None:
    for operation in operations:
        operation.cancel()
