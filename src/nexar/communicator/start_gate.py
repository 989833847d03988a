"""Holds `init()` until every member of the first membership is connected, or raises on each of them.

A member tells the seed when its first communicator is made, or why it cannot be made. The seed answers all members at
once: the cluster has started, or it has failed (`cluster.decisions.starting`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from nexar.cluster.decisions.starting import START_TIMEOUT
from nexar.cluster.membership import Membership
from nexar.cluster.worker import GRACE
from nexar.errors import FormationTimeout, NexarError, PeerError
from nexar.types import Rank
from nexar.wire.joining import MAX_REASON_CHARACTERS, Connected, JoinMessage, StartFailed
from nexar.wire.line import few_lines

_VERDICT: Final = 5.0
"""Seconds that a member which cannot start waits for the answer that the seed sends to every member."""


class StartGate:
    """Of one node that is in the first membership. Any thread."""

    def __init__(
        self,
        membership: Membership,
        rank: Rank,
        interrupt: Callable[[NexarError], None],
        tell: Callable[[JoinMessage], bool],
    ) -> None:
        """`rank`: of this node. `interrupt` ends the making of the first communicator. It must not block. `tell` sends
        a message to the seed; False: there is no connection.
        """
        self._membership = membership
        self._rank = rank
        self._interrupt = interrupt
        self._tell = tell
        self._began = time.monotonic()
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._failure: NexarError | None = None  # this and the next under the lock, and written once
        self._connected = False

    # -- told by the seed: the thread that listens to it -----------------------------------------------------

    def started(self) -> None:
        """Every member is connected."""
        self._settled.set()

    def failed(self, error: NexarError) -> None:
        """The cluster has failed, or this node has no place in it. After the start it is no news."""
        with self._lock:
            first = self._failure is None and not self._settled.is_set()
            if first:
                self._failure = error
        if first:
            self._settled.set()
            self._interrupt(error)

    def seed_back(self) -> None:
        """There is a new connection to the seed, which may not know yet that this node is connected."""
        with self._lock:
            connected = self._connected and not self._settled.is_set()
        if connected:
            self._tell(Connected())

    # -- the thread that joins -------------------------------------------------------------------------------

    def connected(self, deadline: float) -> None:
        """This node has its links: tell the seed, and wait until every member has them. FormationTimeout, or what
        `failed` was told. The seed's own deadline comes first, so its answer is there by then, unless it is gone.
        """
        with self._lock:
            self._connected = True
        self._tell(Connected())
        until = max(deadline, time.monotonic() + START_TIMEOUT) + GRACE
        if not self._settled.wait(max(0.0, until - time.monotonic())):
            raise self._error("the seed did not say that every rank is connected: it is gone, or does not answer")
        self._check()

    def give_up(self, error: Exception) -> NexarError:
        """What `init()` raises when this node cannot make the first communicator: what the seed says to all."""
        self._settle(error)
        with self._lock:
            return self._failure or self._error(self._explain(error))

    def _settle(self, error: Exception) -> None:
        if not self._settled.is_set() and self._tell(
            StartFailed(few_lines(self._explain(error), MAX_REASON_CHARACTERS))
        ):
            self._settled.wait(_VERDICT)

    def _check(self) -> None:
        with self._lock:
            if self._failure is not None:
                raise self._failure

    def _explain(self, error: Exception) -> str:
        """Names the pair, where two ranks cannot connect."""
        if not isinstance(error, PeerError) or error.node is None:
            return f"rank {self._rank}: {error}"
        peer = self._membership.rank_of(error.node)
        cause = getattr(error, "cause", None) or str(error)
        where = f" at {error.address}" if error.address else ""
        return (
            f"rank {self._rank} cannot connect to rank {peer}{where}\n{cause}\n"
            f"check NEXAR_ADVERTISE and NEXAR_IFACE of rank {peer}, and the firewall between the two"
        )

    def _error(self, reason: str) -> FormationTimeout:
        ranks = range(self._membership.size)
        return FormationTimeout(
            joined=[f"rank {rank}" for rank in ranks],
            expected=self._membership.size,
            refused={},
            timeout=time.monotonic() - self._began,
            reason=reason,
        )
