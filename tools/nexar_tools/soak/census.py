"""Members and processes of a soak, derived from their reports. Pure.

Invariant: the living members keep a majority. A killed process counts as a member until a membership without it is
reported. A joiner that is killed while it waits may still be voted in. An isolated member counts as dead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

_VOTED_IN_SECONDS: Final = 15.0  # in which a killed joiner may still be voted in


@dataclass(slots=True)
class ProcessLife:
    """State of one process."""

    started_at: float
    node: int | None = None
    """None while it waits for admission."""
    moved_at: float = 0.0
    """Time of its last report."""
    rounds: int = 0
    round_at: float = 0.0
    """Time of the last report of a round."""
    step: int = 0
    killed_at: float | None = None
    expelled: bool = False
    """It was isolated for too long, and will end."""
    ended: bool = False
    """It ended after it was isolated."""

    @property
    def alive(self) -> bool:
        return self.killed_at is None and not self.ended


@dataclass(slots=True)
class Census:
    """State of all processes, by name."""

    lives: dict[str, ProcessLife] = field(default_factory=dict)
    epoch: int = 0
    nodes: frozenset[int] = frozenset()
    """Nodes of the newest membership."""
    moved_at: float = 0.0
    """Time of the last round that any process completed."""
    joined: int = 0
    recoveries: list[float] = field(default_factory=list)
    """Seconds from a death to a correct sum, per survivor."""
    isolated: set[str] = field(default_factory=set)
    """Living processes that cannot reach the seed, or could not a moment ago."""
    longest_stall: float = 0.0
    """Seconds in which no member completed a round."""

    def started(self, name: str, now: float) -> None:
        self.lives[name] = ProcessLife(now, moved_at=now)

    def killed(self, name: str, now: float) -> None:
        self.lives[name].killed_at = now
        self.isolated.discard(name)

    def ended(self, name: str) -> None:
        """A process that was isolated has ended."""
        self.lives[name].ended = True
        self.isolated.discard(name)

    def heard(self, name: str, report: Mapping[str, Any]) -> None:
        """Updates the state with a report of `member_main`."""
        life = self.lives[name]
        life.moved_at = report["at"]
        if report["what"] == "here":
            life.node = report["node"]
            self.joined += bool(report["joined"])
        if report["epoch"] > self.epoch:
            self.epoch, self.nodes = report["epoch"], frozenset(report["nodes"])
        life.expelled = life.expelled or report["what"] == "expelled"
        if report["what"] == "round" and report["rounds"] > life.rounds:
            if self.moved_at:
                self.longest_stall = max(self.longest_stall, report["at"] - self.moved_at)
            self.moved_at = max(self.moved_at, report["at"])
            life.round_at = report["at"]
            self._recovered(report["at"], report["recovered_from"])
        life.rounds, life.step = report["rounds"], report["step"]

    def _recovered(self, at: float, lost: list[int]) -> None:
        deaths = [life.killed_at for life in self.lives.values() if life.node in lost and life.killed_at is not None]
        if deaths:
            self.recoveries.append(at - max(deaths))

    @property
    def alive(self) -> list[str]:
        return [name for name, life in self.lives.items() if life.alive]

    @property
    def members(self) -> list[str]:
        """Living processes in the newest membership that can reach the seed."""
        return [name for name in self.alive if self.lives[name].node in self.nodes and name not in self.isolated]

    @property
    def has_isolated_members(self) -> bool:
        """Whether processes in the newest membership are isolated."""
        return any(self.lives[name].node in self.nodes for name in self.isolated)

    @property
    def rounds(self) -> int:
        return sum(life.rounds for life in self.lives.values())

    @property
    def median_recovery(self) -> float:
        """Seconds; 0 before the first."""
        return median(self.recoveries) if self.recoveries else 0.0

    def all_are_in(self) -> bool:
        return len(self.nodes) == len(self.members) == len(self.alive)

    def killable(self, now: float, protected: str | None = None) -> list[str]:
        """The processes of which one may be killed.

        Half of the voters and the seed are a majority, so as many must live as are dead.
        """
        members = self.members
        dead = self._unsettled(now) + 1
        waiting = [name for name in self.alive if self.lives[name].node is None and name not in self.isolated]
        able = waiting if len(members) >= dead else []
        if len(members) - 1 >= dead:
            able = able + members
        return [name for name in able if name != protected]

    def _unsettled(self, now: float) -> int:
        """The number of dead processes that may still have a vote."""
        count = 0
        for name, life in self.lives.items():
            if not life.alive or name in self.isolated:
                recent = (life.killed_at or now) > now - _VOTED_IN_SECONDS
                count += recent if life.node is None else life.node in self.nodes
        return count + self._unreported_dead()

    def may_isolate(self, now: float, names: Collection[str]) -> bool:
        """Whether the other members keep a majority with the seed, whoever of the waiting ones is voted in."""
        members = [name for name in self.members if name not in names]
        waiting = sum(self.lives[name].node is None for name in self.alive)
        return len(members) >= self._unsettled(now) + len(names) + waiting

    def _unreported_dead(self) -> int:
        """The number of members that never reported, minus living processes that may be about to: they are dead."""
        known = {life.node for life in self.lives.values()}
        silent = sum(life.alive and life.node is None for life in self.lives.values())
        return max(0, len(self.nodes - known) - silent)
