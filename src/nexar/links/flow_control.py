"""How much a sender may send before the receiver has asked for it. Pure arithmetic.

Law: for each (peer, communicator) the bytes of frames sent and not yet consumed never exceed the credit. Small
messages stop above a reserve and become envelopes; envelopes use the reserve; when even that is used up, sends
wait. So one unread conversation never stops another, and what a peer can make us hold is bounded.

How much each lane may hold back for a peer that does not take it. Pure.

Where messages wait that came before their receive: pooled memory, within the node's early budget.

Changes under the node's lock. Small messages are bounded by their sender's credit; large ones are granted only while
the budget lasts. Those that found it used up are granted in order of arrival as it frees, so none is starved by
smaller ones behind it; one larger than the whole budget waits for its receive alone.
"""

from __future__ import annotations

from typing import Final

from nexar.links.messages import Message, MessageState
from nexar.transport.buffer_pool import BufferPool
from nexar.wire.frame import Lane

MIN_CREDIT_BYTES = 262_144
"""What every receiver grants. A sender assumes no more until the receiver has said more; so settings may differ."""
_RETURN_FRACTION = 4
_RESERVE_FRACTION = 4


class SendCredit:
    """What I may still send to one peer in one communicator."""

    __slots__ = ("available", "limit", "reserve")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.available = limit
        self.reserve = limit // _RESERVE_FRACTION

    def take_whole(self, cost: int) -> bool:
        """Room for a message that travels whole?"""
        if self.available - cost < self.reserve:
            return False
        self.available -= cost
        return True

    def take_envelope(self, cost: int) -> bool:
        """Room for an envelope?"""
        if self.available < cost:
            return False
        self.available -= cost
        return True

    def raise_limit(self, amount: int) -> None:
        """The receiver allows more than was assumed."""
        self.limit += amount
        self.available += amount
        self.reserve = self.limit // _RESERVE_FRACTION

    def give_back(self, amount: int) -> bool:
        """The receiver consumed that much. False: more than was ever taken, so the peer is wrong."""
        self.available += amount
        return self.available <= self.limit


class ReceiveCredit:
    """What one peer may still send to me in one communicator, and what I owe it back."""

    __slots__ = ("comfort", "held", "limit", "owed", "threshold")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.threshold = limit // _RETURN_FRACTION
        self.comfort = limit - self.threshold  # above this the peer may have less than a quarter left
        self.held = 0
        self.owed = 0

    def arrived(self, cost: int) -> bool:
        """A frame came. False: the peer overdrew its credit."""
        self.held += cost
        return self.held <= self.limit

    def consumed(self, cost: int) -> int:
        """A frame's memory is free again. Returns how much to give back now.

        Small amounts are saved up, but only while the peer has plenty left: of a credit that others hold unread, the
        last part must circulate, or it would run dry with all of it owed here.
        """
        owed = self.owed + cost
        if owed < self.threshold and self.held <= self.comfort:
            self.owed = owed
            return 0
        self.owed = 0
        self.held -= owed
        return owed


class UnexpectedBudget:
    """Bytes of large messages that a node takes in although nobody has asked for them yet."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def reserve(self, size: int) -> bool:
        """Room for `size` more?"""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def exceed(self, size: int) -> None:
        """`size` more, room or not: a receive that was cancelled leaves its message here. Others wait until it fits."""
        self.used += size

    def release(self, size: int) -> None:
        """Those bytes were consumed, or will not come."""
        self.used -= size


BUDGET_BYTES: Final[dict[Lane, int]] = {Lane.CONTROL: 1 << 20, Lane.RPC: 16 << 20}
"""Data needs none: its credit bounds it, wherever it waits."""


def admits(lane: Lane, queued_bytes: int, size_bytes: int) -> bool:
    """May a frame of that size still join what the lane holds back? One frame always may, however large."""
    budget = BUDGET_BYTES.get(lane)
    return budget is None or queued_bytes == 0 or queued_bytes + size_bytes <= budget


_UNPOOLED_BYTES: Final = 8 << 10  # thousands of these may wait within a credit: a pooled buffer each would be a waste


class UnexpectedBuffers:
    """The early messages' memory of one node."""

    def __init__(self, limit_bytes: int, pool: BufferPool) -> None:
        self.budget = UnexpectedBudget(limit_bytes)
        self._pool = pool
        self._queue: dict[Message, None] = {}  # announced ones that wait for room, oldest first

    def keep(self, message: Message, body: memoryview) -> None:
        """A small message arrived whole and unasked for."""
        message.state = MessageState.COMPLETE
        if len(body) <= _UNPOOLED_BYTES:
            message.data = memoryview(bytes(body))
            return
        message.lease = self._pool.take(len(body))
        message.data = message.lease.view
        message.data[:] = body

    def admit(self, message: Message) -> None:
        """An envelope arrived unasked for: grant it now, or in its turn."""
        if message.frame.length <= self.budget.limit:
            self._queue[message] = None
            self._admit_more()

    def reserve(self, message: Message) -> memoryview | None:
        """Memory for all of a message. None: there is no room."""
        size = message.frame.length
        if not self.budget.reserve(size):
            return None
        try:
            memory = self._lease(message)
        except MemoryError:  # as if the budget were used up: the message stays with its sender
            self.budget.release(size)
            return None
        message.early_bytes = size
        return memory

    def _lease(self, message: Message) -> memoryview:
        message.lease = self._pool.take(message.frame.length)
        return message.lease.view

    def take_over(self, message: Message) -> memoryview:
        """Memory for all of a message that a cancelled receive leaves behind, whatever the budget says: it had memory
        before, so this bounds what a node holds by what was asked for. Raises MemoryError.
        """
        memory = self._lease(message)
        self.budget.exceed(message.frame.length)
        message.early_bytes = message.frame.length
        return memory

    def keep_back(self, message: Message, data: memoryview) -> None:
        """A message was received and is given back: it is whole, and `data` is nobody else's."""
        message.state = MessageState.COMPLETE
        message.data = data
        self.budget.exceed(len(data))
        message.early_bytes = len(data)

    def free(self, message: Message) -> None:
        """The message needs no early memory any more, nor will. Others may have room now.

        Whoever could still write there (a carrier) must have been told to stop.
        """
        self._queue.pop(message, None)
        if message.lease is not None:
            message.lease.release()
            message.lease = None
        if message.early_bytes:
            self.budget.release(message.early_bytes)
            message.early_bytes = 0
        if self._queue:
            self._admit_more()

    def _admit_more(self) -> None:
        while self._queue:
            head = next(iter(self._queue))
            memory = self.reserve(head)
            if memory is None:
                return
            del self._queue[head]
            head.state = MessageState.BUFFERING
            head.data = memory
            head.origin.grant(head, memory)
