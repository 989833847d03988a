"""Messages from one rank to another: each verb posts, says what it waits for, and returns its result in the end.

A verb is a generator (see parts.Run), so that a call can be waited for by the thread that made it (`run_to_end`) or be
advanced by whoever drives the node. Arguments are checked before it waits for anything. A verb that fails or is closed
has let go of all memory of the caller, and given back the messages that it had taken. A receiving verb adds its
receives to `taken` when it ends well: whoever finds that nobody will use its result undoes them. Without `taken` its
receives cannot be retracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nexar.arrays.dtypes import dtype_of
from nexar.communicator.buffers import Scatter, gathered
from nexar.communicator.messages import Source, incoming, outgoing, received, space_and_tag, space_and_wanted_tag
from nexar.communicator.objects import decode_object, encode_object
from nexar.communicator.parts import Run, T, fresh, held, receive_parts, send_parts, sender_of, undo
from nexar.communicator.values import ObjectError
from nexar.errors import PeerMisbehaved
from nexar.group import Group
from nexar.links.asking import BuffersReceive, ObjectReceive, Probe
from nexar.links.form import BUFFERS, FORMS, OBJECT, OTHER_FORMS, PICKLE
from nexar.links.message import Receive, room_for, row_of
from nexar.links.moving import no_memory
from nexar.links.operation import FINISHED
from nexar.links.sending import About
from nexar.types import Rank
from nexar.wire.frame import Space


def run_to_end(group: Group, run: Run[T], deadline: float) -> T:
    """Wait for all that a verb waits for, in this thread; its result."""
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
    """Done when the array may be changed again."""
    message = outgoing(array, tag)
    sent = group.post_send(dest, message.data, deadline, shape=message.shape, about=message.about)
    if sent is not FINISHED:  # the way of every small message is short
        yield from held((sent,))


def recv(
    group: Group, into: Any, source: Rank, tag: int | None, *, return_source: bool, taken: list[Receive] | None = None
) -> Run[Any]:
    """`into`, filled, or a new array; with where it came from if that was asked for."""
    target = incoming(into)
    receive = _ask(group, source, tag, target.memory, target.code, retractable=taken is not None)
    if not receive.done or receive.error is not None:
        yield from held((receive,))
    if into is None:
        result: Any = received(receive, sender_of(group, receive))
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
    """Both at once. `into` may be `array` itself: then a copy is sent."""
    message, target = outgoing(array, sendtag), incoming(into)
    data = message.data
    if target.memory is not None and np.may_share_memory(_as_row(data), _as_row(target.memory)):
        data = memoryview(bytes(data))
    group.check(dest)
    receive = _ask(group, source, recvtag, target.memory, target.code, retractable=taken is not None)
    try:
        sent = group.post_send(dest, data, deadline, shape=message.shape, about=message.about)
    except BaseException:
        receive.undo()
        raise
    yield from held((receive, sent))
    if into is None:
        result: Any = received(receive, sender_of(group, receive))
    else:
        target.commit()
        result = into
    if taken is not None:
        taken.append(receive)
    return _with_source(group, receive, result, return_source=return_source)


# ---------------------------------------------------------------- looking


class Probed(NamedTuple):
    """A message that is here and was not taken."""

    source: Rank
    tag: int | None
    """None: it was sent without a tag."""
    kind: str
    """`array`, `bytes`, `an object`, `a pickled object`, `a list of buffers`."""
    dtype: np.dtype[Any] | None
    """Of an array."""
    shape: tuple[int, ...]
    size_bytes: int


def probe(group: Group, source: Rank, tag: int | None) -> Run[Probed]:
    """Done when a message is here that such a receive would take. It stays."""
    space, wanted = space_and_wanted_tag(tag)
    seen = group.post_receive(source, None, space=space, tag=wanted, ask=Probe)
    yield from held((seen,))
    frame = seen.frame
    dtype = dtype_of(frame.dtype)
    other = frame.dtype >= FORMS
    kind = OTHER_FORMS[frame.dtype][0] if frame.dtype in OTHER_FORMS else "bytes" if dtype is None else "array"
    place = _source_of(group, seen)
    return Probed(place.rank, place.tag, kind, dtype, seen.shape, frame.count if other else frame.length)


# ---------------------------------------------------------------- bytes and buffers


def send_bytes(group: Group, data: object, dest: Rank, tag: int | None, deadline: float) -> Run[None]:
    """Whatever holds contiguous memory."""
    row = row_of(data, "a send needs contiguous memory")
    space, number = space_and_tag(tag)
    yield from held((group.post_send(dest, row, deadline, about=About(space=space, tag=number)),))


def recv_bytes(
    group: Group, into: Any, source: Rank, tag: int | None, *, return_source: bool, taken: list[Receive] | None = None
) -> Run[Any]:
    """`into`, filled, or new bytes."""
    memory = None if into is None else room_for(into)
    receive = _ask(group, source, tag, memory, 0, retractable=taken is not None)
    yield from held((receive,))
    result = _bytes_of(receive) if into is None else into
    if taken is not None:
        taken.append(receive)
    return _with_source(group, receive, result, return_source=return_source)


def _bytes_of(receive: Receive) -> bytes:
    """A copy of its message, which goes back if there is no memory for the copy."""
    assert receive.into is not None
    try:
        return bytes(receive.into)
    except MemoryError:
        receive.undo()
        raise no_memory(receive, len(receive.into)) from None


def send_iov(group: Group, buffers: Sequence[object], dest: Rank, tag: int | None, deadline: float) -> Run[None]:
    """One message of all their bytes."""
    pieces = gathered(buffers)
    space, number = space_and_tag(tag)
    yield from send_parts(group, group.check(dest), pieces, About(space=space, tag=number, dtype=BUFFERS), deadline)


def recv_iov(
    group: Group,
    buffers: Sequence[object],
    source: Rank,
    tag: int | None,
    *,
    return_source: bool,
    taken: list[Receive] | None = None,
) -> Run[Any]:
    """The buffers, filled one after the other."""
    scatter = Scatter(buffers)
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
    """Its large arrays are sent from where they are."""
    space, number = space_and_tag(tag)
    dest = group.check(dest)
    about = About(space=space, tag=number, dtype=PICKLE if pickle else OBJECT)
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
    """The value."""
    space, wanted = space_and_wanted_tag(tag)
    form = PICKLE if pickle else OBJECT
    first = group.post_receive(
        source, None, space=space, tag=wanted, dtype=form, ask=ObjectReceive, retractable=taken is not None
    )
    taken = [] if taken is None else taken
    parts = yield from receive_parts(group, first, fresh, taken)
    try:
        value = decode_object(parts, pickle=pickle)
    except ObjectError as error:
        raise PeerMisbehaved(rank=sender_of(group, first), what=f"it sent something that is {error}") from error
    except MemoryError:
        _give_back_parts(taken)
        raise no_memory(first, first.frame.count) from None
    except BaseException:  # an interrupt: nobody has the value
        _give_back_parts(taken)
        raise
    return _with_source(group, first, value, return_source=return_source)


def _give_back_parts(taken: Sequence[Receive]) -> None:
    """Undo the receives of a message in parts, whose first part comes first. The pieces are in memory that was made for
    them and that nobody else has, so they need no copy.
    """
    first, *pieces = taken
    for piece in pieces:
        piece.brought = False
    undo((*pieces, first))


# ---------------------------------------------------------------- what they share


def _ask(
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
