"""The communicator: rank, size, and every verb as a method of a few lines. Immutable once made."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from nexar.cluster.membership import Membership
from nexar.collectives.barrier import barrier
from nexar.communicator.messaging import Messaging
from nexar.communicator.parts import Run
from nexar.communicator.point_to_point import run_to_end
from nexar.config import Config
from nexar.errors import CollectiveTimeout, OperationTimeout, UsageError
from nexar.group import Group, deadline_after
from nexar.types import Rank


class Communicator(Messaging):
    """Some nodes that talk to one another, each with a rank. May be used from several threads.

    Close it, or leave its `with` block: what was sent still arrives, then the others are told that this node left.
    """

    def __init__(self, group: Group, config: Config, close: Callable[[], None]) -> None:
        """`close` ends the node behind it."""
        self._group = group
        self._config = config
        self._close = close
        self._sequence = itertools.count()  # of collectives; next() is atomic
        self._closing = threading.Lock()  # taken by the first close, never given back

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def rank(self) -> Rank:
        """My place, 0 to size - 1."""
        return self._group.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._group.size

    @property
    def membership(self) -> Membership:
        """Who is here: nodes, hosts, addresses, by rank."""
        return self._group.membership

    @property
    def epoch(self) -> int:
        """Of the membership; it grows with each change."""
        return self.membership.epoch

    @property
    def host(self) -> str:
        """The id of this host; ranks that have the same one run on the same machine."""
        return self.membership.member(self.rank).host

    @property
    def local_rank(self) -> int:
        """My place among the ranks of this host."""
        return self.membership.local_rank(self.rank)

    @property
    def local_size(self) -> int:
        """How many ranks this host has."""
        return self.membership.local_size(self.rank)

    def __repr__(self) -> str:
        state = ", closed" if self._closing.locked() else ""
        return f"<nexar.Communicator rank {self.rank} of {self.size}, epoch {self.epoch}{state}>"

    # -- collectives -----------------------------------------------------------------------------------

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank has called it."""
        timeout = self._config.barrier_timeout if timeout is None else timeout
        deadline = self._deadline(timeout)
        sequence = next(self._sequence)  # a call that was refused takes none: the other ranks did not count it
        try:
            barrier(self._group, sequence, deadline)
        except OperationTimeout as late:
            raise CollectiveTimeout(
                operation="barrier", sequence=sequence, waiting_for=late.waiting_for, timeout=timeout
            ) from late

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave. Idempotent; every later call raises."""
        if self._closing.acquire(blocking=False):
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _carry_out(self, run: Run[Any], deadline: float) -> Any:
        return run_to_end(self._group, run, deadline)

    def _deadline(self, timeout: Any) -> float:
        if self._closing.locked():
            raise UsageError("this communicator is closed; make a new one with nexar.init()")
        timeout = self._config.collective_timeout if timeout is None else timeout
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            raise UsageError(f"timeout={timeout!r} leaves no time; give seconds above 0")
        return deadline_after(timeout)
