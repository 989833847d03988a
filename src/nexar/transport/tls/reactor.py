"""Which descriptors of this transport have news, in one system call.

The transport keeps its own list beside the Waker's: the Waker ends a sleep without saying why, and a thread that does
not sleep must learn what there is to do for the price of one call, whatever the number of peers.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

from nexar.transport.base import Waker

Ready: TypeAlias = Callable[[int], bool]
"""Called by the driving thread with the events of a descriptor; True if anything happened."""

READABLE: Final = select.POLLIN
WRITABLE: Final = select.POLLOUT


class Reactor:
    """Descriptors and what to call for them. Every method but `turn` may be called from any thread."""

    def __init__(self, waker: Waker) -> None:
        self._waker = waker
        # epoll and poll number their events alike, and a timeout of 0 means the same to both.
        self._poller = select.epoll() if hasattr(select, "epoll") else select.poll()
        self._ready: dict[int, Ready] = {}  # any thread, one step at a time
        # Work that no descriptor shows: bytes that are in our memory already, ends to be told. Any thread appends.
        self._again: deque[Callable[[], bool]] = deque()

    def add(self, descriptor: int, ready: Ready, events: int = READABLE) -> None:
        """Watch a descriptor until it is removed."""
        self._ready[descriptor] = ready
        self._poller.register(descriptor, events)
        self._waker.watch(descriptor, readable=bool(events & READABLE), writable=bool(events & WRITABLE))

    def change(self, descriptor: int, events: int) -> None:
        """Watch it for something else."""
        self._poller.modify(descriptor, events)
        self._waker.watch(descriptor, readable=bool(events & READABLE), writable=bool(events & WRITABLE))

    def remove(self, descriptor: int) -> None:
        """Must be called before the descriptor is closed."""
        self._waker.unwatch(descriptor)
        self._poller.unregister(descriptor)
        del self._ready[descriptor]

    def again(self, work: Callable[[], bool]) -> None:
        """Have the driving thread call `work` at its next turn."""
        self._again.append(work)
        self._waker.kick()

    @property
    def has_more(self) -> bool:
        """Something waits that no descriptor shows."""
        return bool(self._again)

    def turn(self) -> bool:
        """Look once, without waiting, and call whoever has news. True if anything happened."""
        happened = False
        for _ in range(len(self._again)):
            happened |= self._again.popleft()()
        for descriptor, events in self._poller.poll(0):
            # Another thread may have closed it meanwhile, and even have opened a new one under the same number: that
            # one then finds nothing to read, which is no harm.
            ready = self._ready.get(descriptor)
            if ready is not None:
                happened |= ready(events)
        return happened

    def close(self) -> None:
        """Free the descriptor, if there is one. In a forked child this leaves the parent's registrations alone."""
        if isinstance(self._poller, select.epoll):
            self._poller.close()
