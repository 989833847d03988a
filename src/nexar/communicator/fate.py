"""What becomes of a communicator: open until its fate is sealed, from then on every call on it raises that."""

from __future__ import annotations

from copy import copy

from nexar.errors import NexarError
from nexar.links.operation import Operation
from nexar.links.progress import Progress
from nexar.types import AwaitedPeer


class Fate(Operation):
    """Done when the communicator is over; its error says why, and with what to go on. Any thread may wait for it; no
    wait ends it.
    """

    __slots__ = ("_progress",)

    def __init__(self, progress: Progress) -> None:
        super().__init__(progress.lock)
        self._progress = progress

    @property
    def name(self) -> str:
        """As errors call it."""
        return "the agreement on the next membership"

    def awaited(self) -> AwaitedPeer:
        """The other members, whoever is needed for a majority."""
        return AwaitedPeer(missing="its vote")

    def cancel(self) -> None:
        """Who waits no longer changes nothing."""

    def seal(self, error: NexarError) -> None:
        """It is over, for this reason. A later word replaces an earlier one: who has no quorum may still hear that the
        others went on. Without the node's lock.
        """
        with self.lock:
            if self.done:
                self.error = error
            else:
                self.finish(error)
        self._progress.kick()  # who waits for it may lead, and sleep

    def check(self) -> None:
        """Raise why it is over, if it is."""
        if self.done:
            assert self.error is not None
            raise copy(self.error)  # its own: many calls raise it
