"""Who is here in a soak, from what the members say: pure.

Only so many may be killed that the others can go on: whoever is killed counts as a member until a membership without it
is heard of. Who was killed while it waited may still be voted in, by members that had given it the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

_VOTED_IN_SECONDS: Final = 15.0
"""How long somebody that was killed while it waited may still be voted in."""


@dataclass(slots=True)
class ProcessLife:
    """Of one process, as it is known."""

    started_at: float
    node: int | None = None
    """None: it waits to come in."""
    moved_at: float = 0.0
    """When it last said something."""
    rounds: int = 0
    step: int = 0
    killed_at: float | None = None

    @property
    def alive(self) -> bool:
        """It was not killed."""
        return self.killed_at is None


@dataclass(slots=True)
class Census:
    """Of all processes of a soak, by name."""

    lives: dict[str, ProcessLife] = field(default_factory=dict)
    epoch: int = 0
    nodes: frozenset[int] = frozenset()
    """Of the newest membership that anybody spoke of."""
    moved_at: float = 0.0
    """When a round was last completed by anybody."""
    joined: int = 0
    recoveries: list[float] = field(default_factory=list)
    """Seconds from a death to a right sum without the dead; one for each survivor."""

    def started(self, name: str, now: float) -> None:
        """A process was started."""
        self.lives[name] = ProcessLife(now, moved_at=now)

    def killed(self, name: str, now: float) -> None:
        """A process was killed."""
        self.lives[name].killed_at = now

    def heard(self, name: str, report: Mapping[str, Any]) -> None:
        """What a process said: see member_main."""
        life = self.lives[name]
        life.moved_at = report["at"]
        if report["what"] == "here":
            life.node = report["node"]
            self.joined += bool(report["joined"])
        if report["epoch"] > self.epoch:
            self.epoch, self.nodes = report["epoch"], frozenset(report["nodes"])
        if report["what"] == "round" and report["rounds"] > life.rounds:
            self.moved_at = max(self.moved_at, report["at"])
            self._recovered(report["at"], report["recovered_from"])
        life.rounds, life.step = report["rounds"], report["step"]

    def _recovered(self, at: float, lost: list[int]) -> None:
        deaths = [life.killed_at for life in self.lives.values() if life.node in lost and life.killed_at is not None]
        if deaths:
            self.recoveries.append(at - max(deaths))

    @property
    def alive(self) -> list[str]:
        """Those that were not killed."""
        return [name for name, life in self.lives.items() if life.alive]

    @property
    def members(self) -> list[str]:
        """Those of them that are in the newest membership."""
        return [name for name in self.alive if self.lives[name].node in self.nodes]

    @property
    def rounds(self) -> int:
        """Of all processes together."""
        return sum(life.rounds for life in self.lives.values())

    @property
    def median_recovery(self) -> float:
        """In seconds; 0 before the first."""
        return median(self.recoveries) if self.recoveries else 0.0

    def all_are_in(self) -> bool:
        """Whether the newest membership is of exactly those that are alive."""
        return len(self.nodes) == len(self.members) == len(self.alive)

    def killable(self, now: float, protected: str | None = None) -> list[str]:
        """Those of which one may be killed: the others and the seed are a majority even then.

        Half of the voters and the seed are enough, so there must be as many that live as that are dead.
        """
        members = self.members
        dead = self._unsettled(now) + 1
        waiting = [name for name in self.alive if self.lives[name].node is None]
        able = waiting if len(members) >= dead else []
        if len(members) - 1 >= dead:
            able = able + members
        return [name for name in able if name != protected]

    def _unsettled(self, now: float) -> int:
        """The dead that may still have a vote."""
        count = 0
        for life in self.lives.values():
            if life.killed_at is not None:
                recent = life.killed_at > now - _VOTED_IN_SECONDS
                count += recent if life.node is None else life.node in self.nodes
        return count + self._strangers()

    def _strangers(self) -> int:
        """Members that have not said who they are, beyond those that may be about to: they died before they could."""
        known = {life.node for life in self.lives.values()}
        silent = sum(life.alive and life.node is None for life in self.lives.values())
        return max(0, len(self.nodes - known) - silent)
