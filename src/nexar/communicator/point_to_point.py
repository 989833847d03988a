"""Point-to-point operations of arrays, bytes, buffers and objects.

Each operation is a generator (multipart.Run), which the calling thread (`run_to_end`) or the driver advances. It checks
arguments before it waits. If it fails or is closed, it releases the caller's memory and gives back its messages. If it
succeeds, it adds its receives to `taken`, so that they can be undone.

Adjacent small buffers are copied into one piece: a message each would cost more. A piece within one receive buffer is
received in place; others are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.dtypes import code_of, dtype_of
from nexar.arrays.operand import adapt, staged_array_of
from nexar.arrays.views import allocate, as_bytes, code_and_shape, copy, from_bytes
from nexar.communicator.multipart import Run, T, new_memory, receive_parts, send_parts, sender_of, undo, wait_or_undo
from nexar.communicator.serialization import ObjectError, decode_object, encode_object
from nexar.errors import PeerMisbehaved, UsageError
from nexar.group import Group
from nexar.links.messages import (
    BUFFERS,
    FORMS,
    OBJECT,
    OTHER_FORMS,
    PICKLE,
    BuffersReceive,
    ObjectReceive,
    Probe,
    Receive,
    out_of_memory,
    room_for,
    row_of,
)
from nexar.links.operation import FINISHED
from nexar.links.sending import MessageHeader
from nexar.types import ANY_TAG, Rank, whole
from nexar.wire.frame import Space

_SMALL_BYTES: Final = 16 << 10
_RUN_BYTES: Final = 256 << 10


def pieces_of(buffers: Sequence[object]) -> list[memoryview]:
    """Return the pieces to send. UsageError for non-contiguous memory."""
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


class BufferSlice(NamedTuple):
    """A part of a receive buffer."""

    buffer: int
    start: int
    stop: int


def cut_pieces(sizes: Sequence[int], lengths: Sequence[int]) -> list[list[BufferSlice]]:
    """Map each piece to buffers of these lengths; the totals must be equal."""
    cuts: list[list[BufferSlice]] = []
    buffer = start = 0
    for size in sizes:
        slices: list[BufferSlice] = []
        while size:
            if start == lengths[buffer]:
                buffer, start = buffer + 1, 0
                continue
            stop = min(lengths[buffer], start + size)
            slices.append(BufferSlice(buffer, start, stop))
            size -= stop - start  # noqa: PLW2901 - the rest of this piece
            start = stop
        cuts.append(slices)
    return cuts


class BufferScatter:
    """Receive buffers, filled from pieces."""

    def __init__(self, buffers: Sequence[object]) -> None:
        """UsageError for a read-only buffer."""
        self._rows = [room_for(buffer) for buffer in buffers]
        self.total = sum(len(row) for row in self._rows)
        self._cuts: list[list[BufferSlice]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def room(self, sizes: tuple[int, ...]) -> list[memoryview]:
        self._cuts = self._cut(sizes)
        return [
            self._row(slices[0]) if len(slices) == 1 else allocate(size)
            for size, slices in zip(sizes, self._cuts, strict=True)
        ]

    def settle(self, pieces: Sequence[memoryview]) -> None:
        direct = bool(self._cuts)
        cuts = self._cuts or self._cut([len(piece) for piece in pieces])
        for piece, slices in zip(pieces, cuts, strict=True):
            if direct and len(slices) == 1:
                continue  # received in place
            at = 0
            for part in slices:
                row = self._row(part)
                copy(piece[at : at + len(row)], row)
                at += len(row)

    def _cut(self, sizes: Sequence[int]) -> list[list[BufferSlice]]:
        return cut_pieces(sizes, [len(row) for row in self._rows])

    def _row(self, part: BufferSlice) -> memoryview:
        return self._rows[part.buffer][part.start : part.stop]


_MEMORY: Final = ("__array_interface__", "__array__", "__dlpack__")  # besides buffers


class Source(NamedTuple):
    """Where a message came from."""

    rank: Rank
    tag: int | None
    """None: sent without a tag."""


class SendPayload(NamedTuple):
    """A message to post."""

    data: memoryview
    shape: tuple[int, ...]
    about: MessageHeader


def send_payload(array: object, tag: int | None) -> SendPayload:
    """Return the message; it holds a copy of a non-contiguous array. UsageError if `array` is not an array."""
    held = as_array(array)
    if not held.flags.c_contiguous:
        held = np.ascontiguousarray(held)
    code, shape = _describe(held)
    space, number = space_and_tag(tag)
    return SendPayload(as_bytes(held), shape, MessageHeader(space=space, tag=number, dtype=code))


class ReceiveTarget(NamedTuple):
    """Where a message is received."""

    # contiguous; None: new memory
    memory: memoryview | None
    # of the dtype
    code: int
    # copies `memory` to the caller's array if it is not that array's
    commit: Callable[[], None]


def receive_target(into: object) -> ReceiveTarget:
    """UsageError if `into` is read-only or has no memory. None: new memory."""
    if into is None:
        return ReceiveTarget(None, 0, _nothing)
    if not _has_memory(into) and staged_array_of(into) is None:
        hint = f"; for the message of a rank, write source={into!r}" if whole(into) is not None else ""
        raise UsageError(
            f"nothing can be received into {type(into).__name__}; receive without a buffer, or into an array{hint}"
        )
    _refuse_masked(into)
    operand = adapt(into, writable=True, read=False)
    return ReceiveTarget(as_bytes(operand.array), code_of(operand.array.dtype), operand.commit)


def _nothing() -> None: ...


def _has_memory(into: object) -> bool:
    """False for lists and numbers: NumPy would receive into a copy."""
    if isinstance(into, np.generic):
        return False
    try:
        memoryview(into)  # type: ignore[arg-type]  # this is the check
    except (TypeError, ValueError):  # ValueError: NumPy exports no buffer for dtypes such as bfloat16
        return any(hasattr(into, name) for name in _MEMORY)
    return True


def received_array(receive: Receive, source: Rank) -> NDArray[Any]:
    """Return the array of a receive without a buffer. PeerMisbehaved if the message is invalid."""
    assert receive.into is not None
    try:
        return from_bytes(receive.into, receive.frame.dtype, receive.shape)
    except ValueError as error:
        raise PeerMisbehaved(rank=source, what=f"it sent an invalid array: {error}") from error


def space_and_tag(tag: object) -> tuple[int, int]:
    """Return a send's space and tag. UsageError for an invalid tag."""
    if tag is None:
        return Space.UNTAGGED, 0
    number = whole(tag)
    if number is None or not 0 <= number < 1 << 64:
        raise UsageError(f"{tag!r} is not a tag; tags are whole numbers from 0 to 2**64 - 1")
    return Space.TAGGED, number


def space_and_wanted_tag(tag: object) -> tuple[int, int]:
    """Like `space_and_tag`, for a receive: the tag may be ANY_TAG."""
    return (Space.TAGGED, ANY_TAG) if whole(tag) == ANY_TAG else space_and_tag(tag)


def as_array(array: object) -> NDArray[Any]:
    """Return a NumPy array, in the same memory if possible. UsageError if `array` is not an array."""
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
    if isinstance(array, np.ndarray) and isinstance(
        array, np.ma.MaskedArray
    ):  # in this order: np.ma is loaded on access
        raise UsageError("a masked array is two arrays; use its .data and its .mask, each by itself, or send .filled()")


def _describe(array: NDArray[Any]) -> tuple[int, tuple[int, ...]]:
    try:
        return code_and_shape(array)
    except TypeError as error:
        raise UsageError(str(error)) from error


def run_to_end(group: Group, run: Run[T], deadline: float) -> T:
    """Run an operation in this thread."""
    try:
        while True:
            group.wait(next(run), deadline)
    except StopIteration as end:
        result: T = end.value
        return result
    except BaseException:
        run.close()
        raise


# ---------------------------------------------------------------- arrays


def send(group: Group, array: object, dest: Rank, tag: int | None, deadline: float) -> Run[None]:
    """Done when the array may be changed."""
    message = send_payload(array, tag)
    sent = group.post_send(dest, message.data, deadline, shape=message.shape, about=message.about)
    if sent is not FINISHED:  # small messages finish at once
        yield from wait_or_undo((sent,))


def recv(
    group: Group, into: Any, source: Rank, tag: int | None, *, return_source: bool, taken: list[Receive] | None = None
) -> Run[Any]:
    """Return `into` or a new array."""
    target = receive_target(into)
    receive = _post_receive(group, source, tag, target.memory, target.code, retractable=taken is not None)
    if not receive.done or receive.error is not None:
        yield from wait_or_undo((receive,))
    if into is None:
        result: Any = received_array(receive, sender_of(group, receive))
    else:
        target.commit()
        result = into
    if taken is not None:
        taken.append(receive)
    return _with_source(group, receive, result, return_source=return_source)


def sendrecv(
    group: Group,
    array: object,
    dest: Rank,
    into: Any,
    source: Rank,
    *,
    sendtag: int | None,
    recvtag: int | None,
    deadline: float,
    return_source: bool,
    taken: list[Receive] | None = None,
) -> Run[Any]:
    """Send and receive at once. Sends a copy if `into` overlaps `array`."""
    message, target = send_payload(array, sendtag), receive_target(into)
    data = message.data
    if target.memory is not None and np.may_share_memory(_as_row(data), _as_row(target.memory)):
        data = memoryview(bytes(data))
    group.check(dest)
    receive = _post_receive(group, source, recvtag, target.memory, target.code, retractable=taken is not None)
    try:
        sent = group.post_send(dest, data, deadline, shape=message.shape, about=message.about)
    except BaseException:
        receive.undo()
        raise
    yield from wait_or_undo((receive, sent))
    if into is None:
        result: Any = received_array(receive, sender_of(group, receive))
    else:
        target.commit()
        result = into
    if taken is not None:
        taken.append(receive)
    return _with_source(group, receive, result, return_source=return_source)


# ---------------------------------------------------------------- probe


class MessageInfo(NamedTuple):
    """A message that arrived and was not received yet."""

    source: Rank
    tag: int | None
    """None: sent without a tag."""
    kind: str
    """`array`, `bytes`, `an object`, `a pickled object`, `a list of buffers`."""
    dtype: np.dtype[Any] | None
    """None unless it is an array."""
    shape: tuple[int, ...]
    size_bytes: int


def probe(group: Group, source: Rank, tag: int | None) -> Run[MessageInfo]:
    """Done when such a receive would find a message. The message stays."""
    space, wanted = space_and_wanted_tag(tag)
    seen = group.post_receive(source, None, space=space, tag=wanted, ask=Probe)
    yield from wait_or_undo((seen,))
    frame = seen.frame
    dtype = dtype_of(frame.dtype)
    other = frame.dtype >= FORMS
    kind = OTHER_FORMS[frame.dtype][0] if frame.dtype in OTHER_FORMS else "bytes" if dtype is None else "array"
    place = _source_of(group, seen)
    return MessageInfo(place.rank, place.tag, kind, dtype, seen.shape, frame.count if other else frame.length)


# ---------------------------------------------------------------- bytes and buffers


def send_bytes(group: Group, data: object, dest: Rank, tag: int | None, deadline: float) -> Run[None]:
    """Send a contiguous buffer."""
    row = row_of(data, "a send needs contiguous memory")
    space, number = space_and_tag(tag)
    yield from wait_or_undo((group.post_send(dest, row, deadline, about=MessageHeader(space=space, tag=number)),))


def recv_bytes(
    group: Group, into: Any, source: Rank, tag: int | None, *, return_source: bool, taken: list[Receive] | None = None
) -> Run[Any]:
    """Return `into` or new bytes."""
    memory = None if into is None else room_for(into)
    receive = _post_receive(group, source, tag, memory, 0, retractable=taken is not None)
    yield from wait_or_undo((receive,))
    result = _bytes_of(receive) if into is None else into
    if taken is not None:
        taken.append(receive)
    return _with_source(group, receive, result, return_source=return_source)


def _bytes_of(receive: Receive) -> bytes:
    assert receive.into is not None
    try:
        return bytes(receive.into)
    except MemoryError:
        receive.undo()
        raise out_of_memory(receive, len(receive.into)) from None


def send_iov(group: Group, buffers: Sequence[object], dest: Rank, tag: int | None, deadline: float) -> Run[None]:
    """Send several buffers as one message."""
    pieces = pieces_of(buffers)
    space, number = space_and_tag(tag)
    yield from send_parts(
        group, group.check(dest), pieces, MessageHeader(space=space, tag=number, dtype=BUFFERS), deadline
    )


def recv_iov(
    group: Group,
    buffers: Sequence[object],
    source: Rank,
    tag: int | None,
    *,
    return_source: bool,
    taken: list[Receive] | None = None,
) -> Run[Any]:
    """Return the filled buffers."""
    scatter = BufferScatter(buffers)
    space, wanted = space_and_wanted_tag(tag)

    def ask(owner: Any, key: Any, _into: object, _dtype: int) -> Receive:
        return BuffersReceive(owner, key, scatter.total, len(scatter))

    first = group.post_receive(source, None, space=space, tag=wanted, ask=ask, retractable=taken is not None)
    pieces = yield from receive_parts(group, first, scatter.room, taken)
    scatter.settle(pieces)
    return _with_source(group, first, buffers, return_source=return_source)


# ---------------------------------------------------------------- objects


def send_object(
    group: Group, value: object, dest: Rank, tag: int | None, *, pickle: bool, deadline: float
) -> Run[None]:
    """Send a value. Its large arrays are not copied."""
    space, number = space_and_tag(tag)
    dest = group.check(dest)
    about = MessageHeader(space=space, tag=number, dtype=PICKLE if pickle else OBJECT)
    yield from send_parts(group, dest, encode_object(value, pickle=pickle), about, deadline)


def recv_object(
    group: Group,
    source: Rank,
    tag: int | None,
    *,
    pickle: bool,
    return_source: bool,
    taken: list[Receive] | None = None,
) -> Run[Any]:
    """Return the value."""
    space, wanted = space_and_wanted_tag(tag)
    form = PICKLE if pickle else OBJECT
    first = group.post_receive(
        source, None, space=space, tag=wanted, dtype=form, ask=ObjectReceive, retractable=taken is not None
    )
    taken = [] if taken is None else taken
    parts = yield from receive_parts(group, first, new_memory, taken)
    try:
        value = decode_object(parts, pickle=pickle)
    except ObjectError as error:
        raise PeerMisbehaved(rank=sender_of(group, first), what=f"it sent something that is {error}") from error
    except MemoryError:
        _give_back_parts(taken)
        raise out_of_memory(first, first.frame.count) from None
    except BaseException:  # an interrupt: the value is lost
        _give_back_parts(taken)
        raise
    return _with_source(group, first, value, return_source=return_source)


def _give_back_parts(taken: Sequence[Receive]) -> None:
    """Gives the first part back last. Nothing else uses the pieces' memory, so it is not copied."""
    first, *pieces = taken
    for piece in pieces:
        piece.caller_buffer = False
    undo((*pieces, first))


# ---------------------------------------------------------------- shared


def _post_receive(
    group: Group, source: Rank, tag: int | None, memory: memoryview | None, code: int, *, retractable: bool
) -> Receive:
    space, wanted = space_and_wanted_tag(tag)
    return group.post_receive(source, memory, space=space, tag=wanted, dtype=code, retractable=retractable)


def _with_source(group: Group, receive: Receive, result: Any, *, return_source: bool) -> Any:
    return (result, _source_of(group, receive)) if return_source else result


def _source_of(group: Group, receive: Receive) -> Source:
    frame = receive.frame
    return Source(sender_of(group, receive), frame.tag if frame.space == Space.TAGGED else None)


_as_row = partial(np.frombuffer, dtype=np.uint8)
