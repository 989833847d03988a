"""Where messages wait that came before their receive: pooled memory, within the node's early budget.

Changes under the node's lock. Small messages are bounded by their sender's credit; large ones are granted only
while the budget lasts, and those that found it used up are granted in order of arrival as it frees.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from nexar.links.credit import EarlyBudget
from nexar.links.message import Message
from nexar.transport.buffer_pool import BufferPool

_UNPOOLED_BYTES: Final = 8 << 10  # thousands of these may wait within a credit: a pooled buffer each would be a waste


class EarlyStore:
    """The early messages' memory of one node."""

    def __init__(self, limit_bytes: int, pool: BufferPool) -> None:
        self.budget = EarlyBudget(limit_bytes)
        self._pool = pool
        self._announced: deque[Message] = deque()

    def keep(self, message: Message, body: memoryview) -> None:
        """A small message arrived whole and unasked for."""
        message.whole = True
        if len(body) <= _UNPOOLED_BYTES:
            message.data = memoryview(bytes(body))
            return
        message.lease = self._pool.take(len(body))
        message.data = message.lease.view
        message.data[:] = body

    def admit(self, message: Message) -> None:
        """An envelope arrived unasked for: grant it now, or when there is room."""
        if not self._try(message):
            self._announced.append(message)

    def reclaim(self, message: Message) -> bool:
        """Memory for a message whose receive gave up. False: there is no room."""
        size = message.frame.length
        if not self.budget.reserve(size):
            return False
        message.early_bytes = size
        message.lease = self._pool.take(size)
        return True

    def free(self, message: Message) -> None:
        """The message was moved out, or will not come. Others may have room now."""
        if message.lease is not None:
            message.lease.release()
            message.lease = None
        message.data = None
        if message.early_bytes:
            self.budget.release(message.early_bytes)
            message.early_bytes = 0
            self._admit_more()

    def _try(self, message: Message) -> bool:
        if not self.reclaim(message):
            return False
        assert message.lease is not None
        message.data = message.lease.view
        message.origin.grant(message, message.data)
        return True

    def _admit_more(self) -> None:
        """Strictly in order: a large one at the head is not starved by small ones behind it."""
        while self._announced:
            head = self._announced[0]
            if self._wants_room(head) and not self._try(head):
                return
            self._announced.popleft()

    def _wants_room(self, message: Message) -> bool:
        return not (message.granted or message.gone)
