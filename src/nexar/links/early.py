"""Where messages wait that came before their receive: pooled memory, within the node's early budget.

Changes under the node's lock. Small messages are bounded by their sender's credit; large ones are granted only while
the budget lasts. Those that found it used up are granted in order of arrival as it frees, so none is starved by
smaller ones behind it; one larger than the whole budget waits for its receive alone.
"""

from __future__ import annotations

from typing import Final

from nexar.links.credit import EarlyBudget
from nexar.links.message import Message, State
from nexar.transport.buffer_pool import BufferPool

_UNPOOLED_BYTES: Final = 8 << 10  # thousands of these may wait within a credit: a pooled buffer each would be a waste


class EarlyStore:
    """The early messages' memory of one node."""

    def __init__(self, limit_bytes: int, pool: BufferPool) -> None:
        self.budget = EarlyBudget(limit_bytes)
        self._pool = pool
        self._queue: dict[Message, None] = {}  # announced ones that wait for room, oldest first

    def keep(self, message: Message, body: memoryview) -> None:
        """A small message arrived whole and unasked for."""
        message.state = State.WHOLE
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
        message.state = State.WHOLE
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
            head.state = State.EARLY
            head.data = memory
            head.origin.grant(head, memory)
