"""What happens next in a soak. Pure: chance is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from random import Random

LEAST, MOST = 2, 10
"""So many processes are alive."""
_SPAWN: Final = 0.6
_PAUSE: Final = (0.5, 2.0)


class Step(NamedTuple):
    """One thing that happens."""

    pause: float
    """Seconds until the next."""
    victim: str | None = None
    """Who is killed; None: a process is started, if there is room."""


def next_step(chance: Random, alive: int, killable: Sequence[str]) -> Step | None:
    """A start or a death; None: what chance wants cannot be now, ask again a little later."""
    spawn = chance.random() < _SPAWN
    pause = chance.uniform(*_PAUSE)
    if spawn:
        return Step(pause) if alive < MOST else None
    if alive <= LEAST or not killable:
        return None
    return Step(pause, chance.choice(sorted(killable)))
