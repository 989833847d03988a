"""When a node says that no next membership comes about. Pure.

It says so when the time for recovery is over; and before, when those who are lost leave no majority, as soon as it is
sure of them. It is told once in an epoch: what was chosen makes a new one.
"""

from __future__ import annotations

from collections.abc import Callable

from nexar.cluster.decisions.agreement import Agreement
from nexar.cluster.decisions.electorate import Electorate
from nexar.cluster.decisions.succession_events import Stall
from nexar.cluster.decisions.suspicions import Suspicions
from nexar.types import NodeId


class Stalling:
    """The patience of one node, in one epoch."""

    def __init__(
        self,
        me: NodeId,
        electorate: Electorate,
        suspicions: Suspicions,
        *,
        recovery_timeout: float,
        probe_timeout: float,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`probe_timeout`: a suspicion as old as that has been checked. All limits extend by `own_delay`."""
        self._own_delay = own_delay
        self._me = me
        self._electorate = electorate
        self._suspicions = suspicions
        self._recovery_timeout = recovery_timeout
        self._probe_timeout = probe_timeout
        self._since: float | None = None
        self.told = False

    def press(self, now: float, *, pressing: bool) -> None:
        """Whether something has to be decided."""
        if not pressing:
            self._since = None
        elif self._since is None:
            self._since = now

    @property
    def due(self) -> float | None:
        """When to say it; None: nothing presses, or it is said."""
        if self._since is None or self.told:
            return None
        delay = self._own_delay()
        over = self._since + self._recovery_timeout + delay
        return min(over, self._suspicions.newest + self._probe_timeout + delay) if self._is_hopeless else over

    def stall(self, agreement: Agreement | None, now: float) -> list[Stall]:
        """What is to be said now."""
        due = self.due
        if due is None or now < due:
            return []
        self.told = True
        alive = tuple(voter for voter in self._electorate if voter not in self._suspicions)
        missing = () if self._is_hopeless else self._missing(agreement, alive)
        left = tuple(node for node in self._electorate if node in self._suspicions and self._suspicions[node].willing)
        return [Stall(alive, self._electorate.needed, missing, left)]

    @property
    def _is_hopeless(self) -> bool:
        return len(self._electorate) - self._suspicions.votes < self._electorate.needed

    def _missing(self, agreement: Agreement | None, alive: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
        """Who has not voted, so far as this node can know: all others, if it has no ballot of its own."""
        asked = [] if agreement is None else agreement.missing()
        return tuple(node for node in asked or alive if node != self._me)
