"""How much slower this node runs than it would on an idle machine. Pure.

A node that gets too little CPU reads answers late, and peers on its host are as slow as it is. A deadline for a peer
must therefore extend by this node's own delay. Two measurements show it: how late timers run, and how long threads
wait for a CPU compared with how long they have one.

Law: the delay is 0 while the machine has CPU to spare, follows the measurements within seconds, and never exceeds
`longest`. So a dead peer is found without loss of time on an idle machine, and is found in bounded time on any other.
"""

from __future__ import annotations

import math
from typing import Final

LONGEST: Final = 20.0
"""Seconds, whatever the settings are."""
_MEMORY: Final = 3.0
"""Seconds after which a measurement counts for about a third of its value."""
_STEPS: Final = 10.0
"""Turns of threads, here and at the peer, that one answer takes: a connection, its handshake, a question."""
_LATEST: Final = LONGEST / _STEPS
"""Seconds of lateness that count: a longer pause is a suspension, which says nothing about the time after it."""
_PUNCTUAL: Final = 0.05
"""Seconds of lateness that timers show on an idle machine."""
_LEAST_SHARE: Final = 0.05
"""CPU seconds per second: with less a thread's wait for a CPU says little about what work would take."""
_UNDISTURBED: Final = 0.5
"""Seconds by which a second of work may take longer before that counts: other processes run, too."""


class OwnDelay:
    """The measurements of one node, as two averages that forget exponentially."""

    def __init__(self, longest: float = LONGEST) -> None:
        """`longest`: seconds that the delay has at most."""
        self._longest = min(longest, LONGEST)
        self._lateness = _Average()
        self._slowdown = _Average()
        self._totals: tuple[float, float, float] | None = None  # cpu, waited, when

    @property
    def seconds(self) -> float:
        """By which every deadline for a peer extends now."""
        late = self._lateness.value if self._lateness.value >= _PUNCTUAL else 0.0
        slow = self._slowdown.value if self._slowdown.value >= _UNDISTURBED else 0.0
        return min(self._longest, max(_STEPS * late, slow))

    def timer_ran(self, due: float, now: float) -> None:
        """A timer that was set to `due` has run at `now`."""
        self._lateness.add(min(_LATEST, max(0.0, now - due)), now)

    def threads_used(self, cpu: float, waited: float, now: float) -> None:
        """So many seconds this process has run in all, and so many its threads were ready and had no CPU. Totals may
        go down: a thread that ends takes its share with it. Such a period says nothing.
        """
        before, self._totals = self._totals, (cpu, waited, now)
        if before is None or now <= before[2]:
            return
        seconds = now - before[2]
        ran, lacked = (cpu - before[0]) / seconds, (waited - before[1]) / seconds
        if ran >= 0 and lacked >= 0:
            self._slowdown.add(min(LONGEST, lacked / max(ran, _LEAST_SHARE)), now)


class _Average:
    """Of values that hold for the time since the one before."""

    def __init__(self) -> None:
        self.value = 0.0
        self._at: float | None = None

    def add(self, value: float, now: float) -> None:
        weight = 1.0 if self._at is None else 1.0 - math.exp(-(now - self._at) / _MEMORY)
        self.value += weight * (value - self.value)
        self._at = now
