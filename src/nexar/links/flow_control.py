"""Credit, lane budgets, and memory of unexpected messages. The node's lock guards everything.

Per (peer, communicator), bytes sent and not consumed never exceed the credit. Whole messages leave a reserve: beyond
it, only envelopes are sent, and without credit sends wait. So an unread conversation never blocks another, and a peer
can make this node hold only bounded memory.

Large unexpected messages are granted within the node's budget, in order of arrival, so that smaller ones cannot starve
them. A message above the whole budget waits for its receive.
"""

from __future__ import annotations

from typing import Final

from nexar.links.messages import Message, MessageState
from nexar.transport.buffer_pool import BufferPool
from nexar.wire.frame import Lane

# Every receiver grants this much. A sender assumes no more until TERMS says so, so settings may differ.
MIN_CREDIT_BYTES = 262_144
_RETURN_FRACTION = 4
_RESERVE_FRACTION = 4


class SendCredit:
    """Bytes that may still be sent to one peer in one communicator."""

    __slots__ = ("available", "limit", "reserve")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.available = limit
        self.reserve = limit // _RESERVE_FRACTION

    def take_whole(self, cost: int) -> bool:
        """Return False if less than the reserve for envelopes would remain."""
        if self.available - cost < self.reserve:
            return False
        self.available -= cost
        return True

    def take_envelope(self, cost: int) -> bool:
        if self.available < cost:
            return False
        self.available -= cost
        return True

    def raise_limit(self, amount: int) -> None:
        self.limit += amount
        self.available += amount
        self.reserve = self.limit // _RESERVE_FRACTION

    def give_back(self, amount: int) -> bool:
        """Return False for a protocol error: the receiver returned more than it got."""
        self.available += amount
        return self.available <= self.limit


class ReceiveCredit:
    """Bytes that one peer may still send in one communicator, and the credit owed to it."""

    __slots__ = ("batching_limit", "held", "limit", "owed", "threshold")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.threshold = limit // _RETURN_FRACTION
        self.batching_limit = limit - self.threshold  # above this the peer may have less than a quarter left
        self.held = 0
        self.owed = 0

    def arrived(self, cost: int) -> bool:
        """Return False if the peer exceeded its credit."""
        self.held += cost
        return self.held <= self.limit

    def consumed(self, cost: int) -> int:
        """Return the credit to send back now. Amounts accumulate only while the peer cannot run out of credit."""
        owed = self.owed + cost
        if owed < self.threshold and self.held <= self.batching_limit:
            self.owed = owed
            return 0
        self.owed = 0
        self.held -= owed
        return owed


class UnexpectedBudget:
    """Bytes of a node's large unexpected messages."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def reserve(self, size: int) -> bool:
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def exceed(self, size: int) -> None:
        """Reserve beyond the limit, for the message of a cancelled receive."""
        self.used += size

    def release(self, size: int) -> None:
        self.used -= size


# bytes that a lane may queue for a slow peer; credit bounds the data lanes
BUDGET_BYTES: Final[dict[Lane, int]] = {Lane.CONTROL: 1 << 20, Lane.RPC: 16 << 20}


def admits(lane: Lane, queued_bytes: int, size_bytes: int) -> bool:
    """Whether the lane may queue this frame. An empty lane accepts any size."""
    budget = BUDGET_BYTES.get(lane)
    return budget is None or queued_bytes == 0 or queued_bytes + size_bytes <= budget


_UNPOOLED_BYTES: Final = 8 << 10  # thousands of these fit into a credit: a pooled buffer for each would be wasteful


class UnexpectedBuffers:
    """The memory of one node's unexpected messages."""

    def __init__(self, limit_bytes: int, pool: BufferPool) -> None:
        self.budget = UnexpectedBudget(limit_bytes)
        self._pool = pool
        self._queue: dict[Message, None] = {}  # envelopes that wait for budget, oldest first

    def keep(self, message: Message, body: memoryview) -> None:
        message.state = MessageState.COMPLETE
        if len(body) <= _UNPOOLED_BYTES:
            message.data = memoryview(bytes(body))
            return
        message.lease = self._pool.take(len(body))
        message.data = message.lease.view
        message.data[:] = body

    def admit(self, message: Message) -> None:
        """Grant an unexpected envelope, now or when the budget allows."""
        if message.frame.length <= self.budget.limit:
            self._queue[message] = None
            self._admit_more()

    def reserve(self, message: Message) -> memoryview | None:
        """Return memory for the whole message, or None."""
        size = message.frame.length
        if not self.budget.reserve(size):
            return None
        try:
            memory = self._lease(message)
        except MemoryError:  # like an exhausted budget: the sender keeps the message
            self.budget.release(size)
            return None
        message.budget_bytes = size
        return memory

    def _lease(self, message: Message) -> memoryview:
        message.lease = self._pool.take(message.frame.length)
        return message.lease.view

    def take_over(self, message: Message) -> memoryview:
        """Return memory for the message of a cancelled receive. Raise MemoryError. It may exceed the budget: posted
        receives bound the total.
        """
        memory = self._lease(message)
        self.budget.exceed(message.frame.length)
        message.budget_bytes = message.frame.length
        return memory

    def keep_back(self, message: Message, data: memoryview) -> None:
        """Keep a message that its receive gives back. The message then owns `data`."""
        message.state = MessageState.COMPLETE
        message.data = data
        self.budget.exceed(len(data))
        message.budget_bytes = len(data)

    def free(self, message: Message) -> None:
        """Release the memory and admit waiting messages. No carrier may still write to it."""
        self._queue.pop(message, None)
        if message.lease is not None:
            message.lease.release()
            message.lease = None
        if message.budget_bytes:
            self.budget.release(message.budget_bytes)
            message.budget_bytes = 0
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
