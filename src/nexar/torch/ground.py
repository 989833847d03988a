"""What the process groups of this process stand on: nodes of clusters, each shared by groups that come and go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from nexar.communicator.communicator import Communicator
from nexar.torch.completion import Completion


class Footing:
    """One node, and the groups that stand on it. The last of them to end leaves the cluster: torch ends a default group
    that is shrunk while its successor, which stands on the same node, goes on.
    """

    def __init__(self, world: Communicator, leave: Callable[[], None]) -> None:
        """`leave` ends the node; of one that belongs to somebody else it does nothing."""
        self._world = world
        self._leave = leave
        self._lock = threading.Lock()
        self._standing: set[Communicator] = set()  # under the lock
        self._dropped = Completion()

    def enter(self, communicator: Communicator) -> None:
        """A group on this node begins."""
        with self._lock:
            self._standing.add(communicator)
        self._dropped.open()

    def hand_over(self, departure: Callable[[], None]) -> None:
        """A group was dropped: let it leave, in another thread. Never blocks and takes no lock, so a finalizer may call
        it wherever it runs.
        """
        self._dropped.hand_over(departure)

    def end(self, communicator: Communicator) -> None:
        """It has ended. Idempotent."""
        with self._lock:
            if communicator not in self._standing:
                return
            self._standing.discard(communicator)
            last = not self._standing
        if communicator is not self._world:
            communicator.close()
        if last:
            self._leave()
            self._dropped.close()


class Ground:
    """Written by whichever thread makes and ends process groups; torch makes one at a time."""

    def __init__(self) -> None:
        self.offered: Communicator | None = None
        """For the next default group, by adopt()."""
        self.world: Communicator | None = None
        """Of the default group: others are made of its ranks."""
        self.footing: Footing | None = None
        """Of the same."""

    def forget(self, communicator: Communicator) -> None:
        """The default group has ended, if this is its communicator."""
        if self.world is communicator:
            self.world = self.footing = None


GROUND: Final = Ground()
