"""Receives meet messages, for one generation of one communicator.

Law: a message goes to the oldest receive that asks for its (source, space, tag), wildcards included, and a receive
takes the oldest message that it asks for; so within one conversation order is kept, and posting before or after
arrival makes no difference. A message that does not fit its receive stays where it is, and the receive raises.

A receive posted in time gets the payload straight into its buffer. One posted late moves what has already
landed: outside the lock and in its own thread, because that may be hundreds of megabytes.
"""

from __future__ import annotations

import threading
from copy import copy as duplicate

from nexar.arrays.view import allocate, copy
from nexar.errors import Cancelled, NexarError, UsageError
from nexar.links.early import EarlyStore
from nexar.links.interrupt import uninterrupted
from nexar.links.message import ANY, Message, Origin, Receive
from nexar.links.outbox import Outbox
from nexar.links.shelf import Key, Shelf
from nexar.types import AwaitedPeer
from nexar.wire.frame import Frame, Space


class Matching:
    """Posted receives and early messages of one communicator. All but `post` and `cancel` run under the node's lock."""

    def __init__(
        self,
        communicator: int,
        generation: int,
        lock: threading.Lock,
        early: EarlyStore,
        outbox: Outbox,
        *,
        members: frozenset[int] | None = None,
    ) -> None:
        """`members`: the nodes that take part; None: whoever has a link."""
        self.communicator = communicator
        self.generation = generation
        self.members = members
        self.lock = lock
        self._early = early
        self._outbox = outbox
        self._order = 0
        self._posted: Shelf[Receive] = Shelf()  # receives of one exact conversation
        self._wild: list[Receive] = []  # receives with a wildcard, oldest first
        self._waiting: Shelf[Message] = Shelf()  # messages nobody has asked for yet
        self._lost: dict[int, NexarError] = {}  # sources that will send no more, and why
        self._closed: NexarError | None = None
        self.peers: dict[int, AwaitedPeer] = {}  # what is known of each source, for error messages

    # -- the receiver's side ---------------------------------------------------------------------------

    @uninterrupted
    def post(self, into: memoryview | None, *, source: int, space: int, tag: int, dtype: int = 0) -> Receive:
        """Ask for a message.

        `into` None: memory is made for it. Raises at once if the source is lost and left nothing behind.
        """
        receive = Receive(self, (source, space, tag), into, dtype)
        with self.lock:
            message = self._find_message(receive) if self._waiting else None
            if message is None:
                self._enqueue(receive)
            else:
                self._take(receive, message)
        if message is not None:
            if message.settling:
                self._settle(receive, message)
            self._outbox.flush()
        return receive

    def probe(self, *, source: int, space: int, tag: int) -> Message | None:
        """The message that such a receive would take now; it stays. For a caller without the lock."""
        with self.lock:
            return self._find_message(Receive(self, (source, space, tag), None, 0))

    @uninterrupted
    def cancel(self, receive: Receive) -> None:
        """See Receive.cancel."""
        with self.lock:
            if receive.done:
                return
            if receive.message is None:
                self._unpost(receive)
            else:
                self._detach(receive, receive.message)
            receive.finish(Cancelled(operation=receive.name))
        self._outbox.flush()

    def awaited(self, source: int, missing: str) -> AwaitedPeer:
        """Who should have sent."""
        known = self.peers.get(source)
        if known is None:
            return AwaitedPeer(node=None if source == ANY else source, missing=missing)
        return AwaitedPeer(rank=known.rank, node=known.node, address=known.address, missing=missing)

    def lost(self, source: int) -> NexarError | None:
        """Why nothing more can be exchanged with this source in this generation; None if it can."""
        return self._closed or self._lost.get(source)

    def _enqueue(self, receive: Receive) -> None:
        source, _, tag = receive.key
        if self._lost or self._closed is not None:
            self._refuse_to_wait(source)
        self._order += 1
        receive.order = self._order
        if source == ANY or tag == ANY:  # noqa: PLR1714 - a tuple for every receive would be dear
            self._wild.append(receive)
        else:
            self._posted.put(receive.key, receive)

    def _refuse_to_wait(self, source: int) -> None:
        """Raise if nothing can come any more. From anybody: if anybody is lost, because it might have been theirs."""
        error = self.lost(source)
        if error is None and source == ANY:
            error = next(iter(self._lost.values()), None)
        if error is not None:
            raise duplicate(error)

    def _unpost(self, receive: Receive) -> None:
        if not self._posted.remove(receive.key, receive):
            self._wild.remove(receive)

    def _repost(self, receive: Receive) -> None:
        """Its message was taken back: it waits again, in its old place."""
        receive.message = None
        if not receive.brought:
            receive.into = None
        if ANY in (receive.key[0], receive.key[2]):
            self._wild.append(receive)
            self._wild.sort(key=lambda other: other.order)
        else:
            self._posted.put_back(receive.key, receive)

    def _find_message(self, receive: Receive) -> Message | None:
        source, _, tag = receive.key
        if ANY not in (source, tag):
            return self._waiting.first(receive.key)
        candidates = [message for key, message in self._waiting.heads() if receive.wants(key)]
        return min(candidates, key=lambda message: message.order, default=None)

    def _take(self, receive: Receive, message: Message) -> None:
        """A late receive found its message."""
        if not receive.accepts(message.frame):
            receive.finish(receive.mismatch(message))
            return
        self._waiting.take(message.key)
        message.origin.consumed(message)
        if message.whole or message.granted:
            message.receive = receive
            message.settling = True
        else:
            self._flow_into(receive, message)

    def _flow_into(self, receive: Receive, message: Message) -> None:
        """Let the payload come straight into the receive's buffer."""
        if receive.into is None and not self._make_room(receive, message):
            self._shelve(message, None)
            return
        assert receive.into is not None
        message.receive = receive
        receive.message = message
        message.data = receive.into
        message.origin.grant(message, receive.into)

    def _settle(self, receive: Receive, message: Message) -> None:
        """Move over what has landed in early memory, and let the rest land in the right place. Without the lock."""
        early = message.data
        assert early is not None
        if receive.into is None:
            receive.into = allocate(message.frame.length)
        arrived = message.whole or not message.origin.redirect(message, receive.into)
        if arrived:
            copy(early, receive.into)
        with self.lock:
            message.settling = False
            message.data = None
            self._early.free(message)
            if arrived or message.whole:
                self._complete(receive, message)
            elif message.error is not None:
                receive.finish(message.error)
            elif message.gone:
                message.origin.redirect(message, None)
                self._repost(receive)
            else:
                receive.message = message

    def _make_room(self, receive: Receive, message: Message) -> bool:
        """Memory for a receive that brought none. The size is the sender's claim, so it may be absurd."""
        try:
            receive.into = allocate(message.frame.length)
        except (MemoryError, ValueError):
            receive.finish(
                UsageError(f"{receive.name}: a message of {message.frame.length} bytes does not fit into memory")
            )
            return False
        return True

    def _complete(self, receive: Receive, message: Message) -> None:
        receive.frame = message.frame
        receive.shape = message.shape
        receive.message = None
        message.gone = True
        receive.finish()

    def _detach(self, receive: Receive, message: Message) -> None:
        """The receive gives up while its message flows in. The message must not be lost: keep it if there is room."""
        receive.message = None
        message.receive = None
        if not self._early.reclaim(message):
            message.gone = True
            message.origin.refuse(message, f"{receive.name} was cancelled, and early_bytes are used up")
            return
        assert message.lease is not None
        message.data = message.lease.view
        if not message.origin.redirect(message, message.data) and receive.into is not None:
            copy(receive.into, message.data)
        self._waiting.put_back(message.key, message)

    # -- the sender's side: called by links, under the lock ---------------------------------------------

    def arrive(self, origin: Origin, source: int, frame: Frame, shape: tuple[int, ...], data: memoryview) -> bool:
        """A whole message. False: it waits (and keeps its credit)."""
        key = _key(source, frame)
        receive = self._find_receive(key) if self._wild else self._posted.first(key)
        if receive is not None and receive.accepts(frame):
            if self._wild:
                self._unpost(receive)
            else:
                self._posted.take(key)
            if receive.into is None:
                receive.into = memoryview(bytearray(data))  # small, and here already
            else:
                receive.into[:] = data
            receive.frame = frame
            receive.shape = shape
            receive.finish()
            return True
        message = Message(origin, key, frame, shape)
        self._early.keep(message, data)
        self._shelve(message, receive)
        return False

    def announce(self, origin: Origin, source: int, frame: Frame, shape: tuple[int, ...]) -> Message:
        """An envelope. The payload is granted now if somebody asked for it or there is room, else later."""
        key = _key(source, frame)
        message = Message(origin, key, frame, shape)
        receive = self._find_receive(key)
        if receive is not None and receive.accepts(frame):
            self._unpost(receive)
            origin.consumed(message)
            self._flow_into(receive, message)
        else:
            self._shelve(message, receive)
            self._early.admit(message)
        return message

    def land(self, message: Message) -> None:
        """The whole payload of a flowing message is in its place."""
        message.whole = True
        receive = message.receive
        if receive is not None and not message.settling:
            self._complete(receive, message)

    def withdraw(self, message: Message) -> None:
        """The sender takes an unfinished message back: as if it had never been sent."""
        message.gone = True
        if message.settling:
            return  # its receive is moving it over just now, and will see
        message.origin.redirect(message, None)
        if message.receive is not None:
            self._repost(message.receive)
            message.receive = None
        else:
            self._waiting.remove(message.key, message)
            message.origin.consumed(message)
            self._early.free(message)

    def lose(self, source: int, error: NexarError) -> None:
        """This source will send no more. Whole messages of it stay receivable; everything else of it fails now."""
        if self.members is not None and source not in self.members:
            return
        self._lost[source] = error
        for receive in [r for r in self._posted.everything() if r.key[0] == source]:
            self._posted.remove(receive.key, receive)
            receive.finish(error)
        for receive in [r for r in self._wild if r.key[0] in (ANY, source)]:
            self._wild.remove(receive)
            receive.finish(error)
        for message in [m for m in self._waiting.everything() if m.key[0] == source and not m.whole]:
            self._waiting.remove(message.key, message)
            self.abandon(message, error)

    def abandon(self, message: Message, error: NexarError) -> None:
        """The rest of this message will never come."""
        if message.gone:
            return
        message.gone = True
        message.error = error
        if message.settling:
            return  # its receive is moving it over just now, and will see
        if message.receive is not None:
            message.receive.message = None
            message.receive.finish(error)
        else:
            self._early.free(message)

    def close(self, error: NexarError) -> None:
        """The communicator is over: every receive fails, every early message is dropped."""
        self._closed = error
        for receive in [*self._posted.everything(), *self._wild]:
            self._unpost(receive)
            receive.finish(error)
        for message in self._waiting.everything():
            self._waiting.remove(message.key, message)
            message.gone = True
            self._early.free(message)

    def _find_receive(self, key: Key) -> Receive | None:
        exact = self._posted.first(key)
        if not self._wild:
            return exact
        wild = next((receive for receive in self._wild if receive.wants(key)), None)
        if exact is None or wild is None:
            return exact or wild
        return exact if exact.order < wild.order else wild

    def _shelve(self, message: Message, unfit: Receive | None) -> None:
        """Keep a message that nobody asked for, or that does not fit who did."""
        self._order += 1
        message.order = self._order
        self._waiting.put(message.key, message)
        if unfit is not None:
            self._unpost(unfit)
            unfit.finish(unfit.mismatch(message))


def _key(source: int, frame: Frame) -> Key:
    """The conversation of a frame. A collective's is its sequence and step; `tag` is the user's in the other spaces."""
    if frame.space == Space.COLLECTIVE:
        return source, frame.space, collective_tag(frame.sequence, frame.step)
    return source, frame.space, frame.tag


def collective_tag(sequence: int, step: int) -> int:
    """The tag to post for a step of a collective."""
    return sequence << 32 | step
