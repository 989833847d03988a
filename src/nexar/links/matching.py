"""Matching: pairs posted receives with messages, for one generation of one communicator.

A message goes to the oldest receive that asks for its (source, space, tag), wildcards included; a receive takes the
oldest message that it asks for. So order within a conversation holds. If a message does not fit, it stays queued and
the receive raises.

Invariant: no receive waits for a message that is here. Every return to a queue ends with `_rematch`.

A receive posted in time gets the payload directly. Other messages are moved outside the lock, which may take long.
"""

from __future__ import annotations

import threading
from copy import copy as duplicate
from dataclasses import replace
from typing import Final
from weakref import WeakValueDictionary

from nexar.arrays.views import allocate, copy
from nexar.errors import Cancelled, NexarError, Revoked, UsageError
from nexar.links.flow_control import UnexpectedBuffers
from nexar.links.messages import (
    ANY,
    NOTHING_TAKEN,
    FifoByKey,
    Key,
    Message,
    MessageState,
    NewestTaken,
    Origin,
    PostedReceives,
    Receive,
    ReceiveKind,
    key_of,
    make_room,
    move_message,
    out_of_memory,
    room_for,
)
from nexar.links.mismatch_detector import MismatchDetector
from nexar.links.operation import DeferredIO
from nexar.transport.base import Redirected
from nexar.types import AwaitedPeer
from nexar.wire.frame import Frame, Space

_COLLECTIVE: Final = int(Space.COLLECTIVE)
_CLOSED: Final = int(Space.CLOSED)
_MESSAGES: Final = frozenset((int(Space.TAGGED), int(Space.UNTAGGED), int(Space.PART)))
_TAGS: Final = 1 << 64
_COLLECTIVE_TAGS: Final = 1 << 96  # a collective's tag is its sequence and step


class Matching:
    """Posted receives and unexpected messages. Call under the lock, except the receiving side."""

    def __init__(
        self,
        communicator: int,
        generation: int,
        lock: threading.Lock,
        unexpected_buffers: UnexpectedBuffers,
        deferred_io: DeferredIO,
        *,
        members: frozenset[int] | None = None,
    ) -> None:
        """`members`: participating nodes; None for every node with a link."""
        self.communicator = communicator
        self.generation = generation
        self.members = members
        self.lock = lock
        self._unexpected_buffers = unexpected_buffers
        self._deferred_io = deferred_io
        self._order = 0  # of arrivals and postings
        self._posted = PostedReceives()
        self._waiting: FifoByKey[Message] = FifoByKey()  # unexpected messages
        # Only conversations with a retractable receive: an entry disappears with the last of them.
        self._newest_taken: WeakValueDictionary[Key, NewestTaken] = WeakValueDictionary()
        self._tracks_taken = False  # such conversations may exist: every taken message must be recorded
        self._lost: dict[int, NexarError] = {}  # sources that will send no more, and why
        self._left: set[int] = set()  # sources that closed the communicator: they send no more messages
        self._closed: NexarError | None = None
        self._any_source_gone = False  # a source is lost or has left, or the generation is closed
        self.peers: dict[int, AwaitedPeer] = {}  # by source, for error messages
        self.mismatch_detector = MismatchDetector(self._discard)  # of collectives

    # -- receiving side: any thread, without the lock --------------------------------------------------------

    def post(
        self,
        into: memoryview | None,
        *,
        source: int,
        space: int,
        tag: int,
        dtype: int = 0,
        ask: ReceiveKind = Receive,
        retractable: bool = False,
    ) -> Receive:
        """Post a receive of class `ask`. `into` None allocates memory. Raise if no message can come: the source is lost
        or has left, or the generation is closed.
        """
        if into is not None and (into.__class__ is not memoryview or into.readonly or into.format != "B"):
            into = room_for(into)
        if not ANY <= tag < (_TAGS if space != _COLLECTIVE else _COLLECTIVE_TAGS):
            raise UsageError(f"receive: tag {tag} is out of range; tags are 0 to 2**64 - 1, or ANY_TAG")
        receive = ask(self, (source, space, tag), into, dtype)
        if retractable:
            receive.newest_taken = NOTHING_TAKEN
        moves = False
        with self.lock:
            self._order += 1
            receive.order = self._order
            message = self._find_message(receive) if self._waiting.oldest else None
            if message is None:
                if self._any_source_gone:
                    self._raise_if_unsatisfiable(receive)
                self._posted.add(receive)
            elif receive.accepts(message.frame):
                moves = self._pair(receive, message)
            else:
                receive.finish(receive.mismatch(message))
        if message is not None:
            if moves:
                self._move_in(receive, message)
            self._deferred_io.flush()
        return receive

    def probe(self, *, source: int, space: int, tag: int) -> Message | None:
        """Return the message that such a receive would take now."""
        with self.lock:
            return self._find_message(Receive(self, (source, space, tag), None, 0))

    def cancel(self, receive: Receive) -> None:
        while not self._cancelled(receive):
            continue
        self._deferred_io.flush()

    def _cancelled(self, receive: Receive, *, in_order: bool = False) -> bool:
        """Return False to try again, after a move has ended. `in_order` leaves an overtaken receive alone."""
        with self.lock:
            message = receive.message
            if receive.done or (in_order and self._is_overtaken(receive)):
                return True
            if message is None:
                self._posted.remove(receive)
                receive.finish(Cancelled(operation=receive.name))
                return True
            if message.state is MessageState.MOVING:
                message.settled = message.settled or threading.Event()
                settled = message.settled
            else:
                settled = None
                following = self._next_for(message)
                room = None if following is not None else self._begin_move_out(receive, message)
        if settled is not None:
            settled.wait()
            return False
        if following is not None:
            self._move_over(receive, message, following)
        elif room is not None:
            self._move_out(receive, message, room)
        return True

    def give_back(self, receive: Receive, *, in_order: bool = False) -> bool:
        """Implements Receive.undo and, `in_order`, Receive.retract. The message returns to its position."""
        while not self._cancelled(receive, in_order=in_order):
            continue
        into = receive.into
        if _has_its_message(receive) and into is not None:
            data = _copied(into) if receive.caller_buffer else into
            with self.lock:
                if _has_its_message(receive) and not (in_order and self._is_overtaken(receive)):
                    self._restore(receive, data)
        self._deferred_io.flush()
        return receive.error is not None

    def _restore(self, receive: Receive, data: memoryview) -> None:
        receive.error = Cancelled(operation=receive.name)
        if self._closed is not None:
            return
        key = receive.key
        origin = _LocalOrigin(self.peers[key[0]].rank if key[0] in self.peers else None)
        message = Message(origin, key, receive.frame, receive.shape, receive.order)
        message.credited = True
        self._unexpected_buffers.keep_back(message, data)
        self._waiting.put(key, message)
        self._rematch(key)

    def _is_overtaken(self, receive: Receive) -> bool:
        """Whether a later message of its conversation was taken."""
        newest, message = receive.newest_taken, receive.message
        if newest is None:
            return False
        return newest.order > message.order if message else _has_its_message(receive) and newest.order > receive.order

    def _note_taken(self, receive: Receive, key: Key, order: int) -> None:
        newest = self._newest_taken.get(key)
        if receive.newest_taken is not None:
            if newest is None:
                newest = self._newest_taken[key] = NewestTaken()
            receive.newest_taken = newest
            self._tracks_taken = True
        elif newest is None:
            self._tracks_taken = len(self._newest_taken) > 0
            return
        newest.order = max(newest.order, order)

    def awaited(self, source: int, missing: str) -> AwaitedPeer:
        known = self.peers.get(source, AwaitedPeer(node=None if source == ANY else source))
        return replace(known, missing=missing)

    # -- sending side: called by links -----------------------------------------------------------------------

    def arrive(self, origin: Origin, source: int, frame: Frame, shape: tuple[int, ...], data: memoryview) -> bool:
        """Return True if the message is consumed; otherwise `consumed` returns its credit later."""
        space = frame.space
        key = (source, space, frame.tag) if space != _COLLECTIVE else key_of(source, frame)
        receive = self._posted.claim(key, frame)
        if receive is not None:
            into = receive.into
            if into is None:
                receive.into = memoryview(bytearray(data))  # small, and here already
            else:
                into[:] = data
            receive.frame = frame
            receive.shape = shape
            if space != _COLLECTIVE:  # may be given back
                receive.order = self._order = self._order + 1
                if self._tracks_taken or receive.newest_taken is not None:
                    self._note_taken(receive, key, receive.order)
            receive.finish()
            return True
        if space == _CLOSED:
            self._leave(source)
            return True
        message = self._register(origin, key, frame, shape)
        self._unexpected_buffers.keep(message, data)
        self._rematch(key)
        return False

    def announce(self, origin: Origin, source: int, frame: Frame, shape: tuple[int, ...]) -> Message:
        """Take an envelope. Grant its payload now, or when a receive or memory is available."""
        key = key_of(source, frame)
        message = self._register(origin, key, frame, shape)
        self._rematch(key)
        if message.state is MessageState.ENVELOPE:
            self._unexpected_buffers.admit(message)
        return message

    def payload_complete(self, message: Message) -> None:
        if message.state is MessageState.DIRECT and message.receive is not None:
            self._complete(message.receive, message)
        elif message.state is MessageState.BUFFERING:
            message.state = MessageState.COMPLETE
        else:
            message.arrived = True

    def withdraw(self, message: Message) -> None:
        if message.state is MessageState.MOVING:
            message.withdrawn = True
            return
        receive = message.receive
        self._drop(message)
        if receive is not None:
            self._wait_again(receive)

    def abandon(self, message: Message, error: NexarError) -> None:
        """Drop an unfinished message whose rest will never come; its receive raises `error`."""
        if message.state is MessageState.MOVING:
            message.error = error
            return
        receive = message.receive
        self._drop(message)
        if receive is not None:
            receive.message = None
            receive.finish(error)

    def lose(self, source: int, error: NexarError) -> None:
        """Fail the receives from a lost source. Its whole messages stay receivable."""
        if not self.admits(source):
            return
        self._lost[source] = error
        self._any_source_gone = True
        for receive in [r for r in self._posted.everything() if r.key[0] in (ANY, source)]:
            self._posted.remove(receive)
            receive.finish(error)

    def _leave(self, source: int) -> None:
        """Fail receives that a source will not satisfy: it closed the communicator. Its messages stay receivable."""
        self._left.add(source)
        self._any_source_gone = True
        for receive in self._posted.everything():
            if self._is_unsatisfiable(receive):
                self._posted.remove(receive)
                receive.finish(self._unsatisfiable_error(receive))

    def _is_unsatisfiable(self, receive: Receive) -> bool:
        """Whether every node that could send its message has left."""
        source, space, _ = receive.key
        if space not in _MESSAGES:
            return False
        return source in self._left or (
            source == ANY and self.members is not None and len(self._left) >= len(self.members) - 1
        )

    def _unsatisfiable_error(self, receive: Receive) -> NexarError:
        known = self.peers.get(receive.key[0])
        rank = None if known is None else known.rank
        who = "all other ranks have" if rank is None else f"rank {rank} has"
        reason = f"{who} closed it, so no message comes for {receive.name}"
        return Revoked(communicator=str(self.communicator), reason=reason, rank=rank, closed=True)

    def close(self, error: NexarError) -> None:
        """Fail the posted receives and drop the queued messages."""
        self._closed = error
        self._any_source_gone = True
        for receive in self._posted.everything():
            self._posted.remove(receive)
            receive.finish(error)
        for message in self._waiting.everything():
            self._drop(message)

    def admits(self, source: int) -> bool:
        return self.members is None or source in self.members

    def lost(self, source: int) -> NexarError | None:
        """Return why nothing more can be exchanged with this source, or None. For ANY, the loss of any source."""
        if source == ANY and self._closed is None:
            return next(iter(self._lost.values()), None)
        return self._closed or self._lost.get(source)

    # -- pairing -----------------------------------------------------------------------------------------------

    def _register(self, origin: Origin, key: Key, frame: Frame, shape: tuple[int, ...]) -> Message:
        self._order += 1
        message = Message(origin, key, frame, shape, self._order)
        self._waiting.put(key, message)
        return message

    def _rematch(self, key: Key) -> None:
        """Pair waiting messages with posted receives. Moves are deferred: this may run on another caller's thread."""
        while (message := self._waiting.first(key)) is not None:
            receive = self._posted.find(key)
            if receive is None:
                return
            self._posted.remove(receive)
            if not receive.accepts(message.frame):
                receive.finish(receive.mismatch(message))
            elif self._pair(receive, message):
                self._deferred_io.add(self._move_in, receive, message)

    def _pair(self, receive: Receive, message: Message) -> bool:
        """Return True if the caller must move the message in."""
        announced = message.state is MessageState.ENVELOPE
        if announced and receive.into is None and not make_room(receive, message):
            return False
        self._waiting.remove(message.key, message)
        if not message.credited:
            message.credited = True
            message.origin.consumed(message)
        message.receive = receive
        receive.message = message
        if self._tracks_taken or receive.newest_taken is not None:
            self._note_taken(receive, message.key, message.order)
        if not announced:
            message.arrived = message.state is MessageState.COMPLETE
            message.state = MessageState.MOVING
            return True
        assert receive.into is not None
        message.state = MessageState.DIRECT
        message.data = receive.into
        self._unexpected_buffers.free(message)
        message.origin.grant(message, receive.into)
        return False

    def _find_message(self, receive: Receive) -> Message | None:
        if not receive.wild:
            return self._waiting.first(receive.key)
        candidates = [message for key, message in self._waiting.heads() if receive.wants(key)]
        return min(candidates, key=lambda message: message.order, default=None)

    def _raise_if_unsatisfiable(self, receive: Receive) -> None:
        error = self.lost(receive.key[0])
        if error is not None:
            raise duplicate(error)
        if self._is_unsatisfiable(receive):
            raise self._unsatisfiable_error(receive)

    def _wait_again(self, receive: Receive) -> None:
        """Queue again at the old position, unless no message can come."""
        receive.message = None
        if not receive.caller_buffer:
            receive.into = None
        error = self.lost(receive.key[0])
        if error is None and self._is_unsatisfiable(receive):
            error = self._unsatisfiable_error(receive)
        if error is not None:
            receive.finish(error)
            return
        self._posted.add(receive)
        for key, _ in self._waiting.heads():
            if receive.wants(key):
                self._rematch(key)

    def _complete(self, receive: Receive, message: Message) -> None:
        receive.frame = message.frame
        receive.shape = message.shape
        receive.key = message.key
        receive.order = message.order
        receive.message = None
        message.state = MessageState.FINISHED
        message.receive = message.data = None
        receive.finish()

    def _drop(self, message: Message) -> None:
        """Drop a message. The carrier releases its memory before it is freed."""
        if message.state in (MessageState.BUFFERING, MessageState.DIRECT):
            message.origin.redirect(message, None)
        if message.state is not MessageState.DIRECT:
            self._waiting.remove(message.key, message)
        if not message.credited:
            message.credited = True
            message.origin.consumed(message)
        message.state = MessageState.FINISHED
        message.receive = message.data = None
        self._unexpected_buffers.free(message)

    def _discard(self, sequence: int, reason: str) -> None:
        """Drop a collective's messages, and refuse its payloads, so that no sender waits."""
        for message in self._waiting.everything():
            if message.key[1] == _COLLECTIVE and message.frame.sequence == sequence:
                if message.state is not MessageState.COMPLETE:
                    message.origin.refuse(message, reason)
                self._drop(message)

    # -- moving: without the lock, except where a move begins and ends ------------------------------------------

    def _move_in(self, receive: Receive, message: Message) -> None:
        whole = False
        fault: MemoryError | None = None
        try:
            if receive.into is None:
                receive.into = allocate(message.frame.length)
            whole = move_message(message, receive.into)
        except (MemoryError, ValueError):
            fault = out_of_memory(receive, message.frame.length)
        with self.lock:
            if fault is not None:
                self._return_unmoved(receive, message, fault)
            else:
                self._unexpected_buffers.free(message)
                self._end_move_in(receive, message, whole=whole)
            message.end_move()

    def _end_move_in(self, receive: Receive, message: Message, *, whole: bool) -> None:
        if whole or message.arrived:
            self._complete(receive, message)
        elif message.error is not None or message.withdrawn:
            message.origin.redirect(message, None)  # the carrier may live on: the rest must not be written here
            message.state = MessageState.FINISHED
            message.receive = message.data = None
            receive.message = None
            if message.error is not None:
                receive.finish(message.error)
            else:
                self._wait_again(receive)
        else:
            message.state = MessageState.DIRECT
            message.data = receive.into

    def _return_unmoved(self, receive: Receive, message: Message, fault: MemoryError) -> None:
        receive.message = None
        receive.finish(fault)
        message.receive = None
        self._requeue(message, whole=message.arrived)

    def _next_for(self, message: Message) -> Receive | None:
        """Pair the message of a cancelled receive with the next receive at once: during a move, a later message could
        reach that receive.
        """
        while (receive := self._posted.find(message.key)) is not None:
            self._posted.remove(receive)
            if not receive.accepts(message.frame):
                receive.finish(receive.mismatch(message))
            elif receive.into is not None or make_room(receive, message):
                receive.message = message
                message.receive = receive
                message.state = MessageState.MOVING
                self._note_taken(receive, message.key, message.order)
                return receive
        return None

    def _move_over(self, receive: Receive, message: Message, following: Receive) -> None:
        assert following.into is not None
        whole = move_message(message, following.into)
        with self.lock:
            receive.message = None
            receive.finish(Cancelled(operation=receive.name))
            self._end_move_in(following, message, whole=whole)
            message.end_move()

    def _begin_move_out(self, receive: Receive, message: Message) -> memoryview | None:
        """Return memory for the arriving message of a cancelled receive. Without memory, refuse it; return None."""
        try:
            room = self._unexpected_buffers.take_over(message)
        except MemoryError:
            message.origin.refuse(message, f"{receive.name} was cancelled, and there is no memory to keep the message")
        else:
            message.state = MessageState.MOVING
            return room
        message.state = MessageState.FINISHED
        message.receive = message.data = receive.message = None
        receive.finish(Cancelled(operation=receive.name))
        return None

    def _move_out(self, receive: Receive, message: Message, room: memoryview) -> None:
        whole = move_message(message, room)
        with self.lock:
            receive.message = message.receive = None
            receive.finish(Cancelled(operation=receive.name))
            message.data = room
            self._requeue(message, whole=whole or message.arrived)
            message.end_move()

    def _requeue(self, message: Message, *, whole: bool) -> None:
        message.arrived = False
        message.state = MessageState.COMPLETE if whole else MessageState.BUFFERING
        self._waiting.put(message.key, message)
        if not whole and (message.error is not None or message.withdrawn or self._closed is not None):
            self._drop(message)
        else:
            self._rematch(message.key)


class _LocalOrigin:
    """The `Origin` of a message that was given back. The message is complete, and its sender knows."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank

    def grant(self, message: Message, into: memoryview) -> None: ...

    def redirect(self, message: Message, into: memoryview | None) -> Redirected:
        return Redirected.COMPLETE

    def refuse(self, message: Message, reason: str) -> None: ...

    def consumed(self, message: Message) -> None: ...


def _has_its_message(receive: Receive) -> bool:
    return receive.done and receive.error is None


def _copied(data: memoryview) -> memoryview:
    own = allocate(len(data))
    copy(data, own)
    return own
