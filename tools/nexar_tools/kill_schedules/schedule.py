"""What one schedule does: a program, the same on all ranks, and kills. Pure: it depends on seed, number and size only.

Invariant: at every moment the living members have a majority, with the vote of the seed if their number is even. Of n
ranks, ⌊n / 2⌋ may be gone at once, whether they were killed, closed or left.
"""

from __future__ import annotations

from random import Random
from typing import Final, Literal, NamedTuple

Form = Literal["blocking", "started", "awaited"]
FORMS: Final[tuple[Form, ...]] = ("blocking", "started", "awaited")

LEAST, MOST = 4, 6  # ranks at the beginning of a schedule
# How often each kind of step is drawn.
KINDS: Final = {
    "collectives": 8,
    "batch": 3,
    "messages": 4,
    "remote_calls": 3,
    "split": 3,
    "group": 2,
    "team": 4,
    "agree": 2,
    "revoke": 2,
    "checkpoint": 2,
}
_STEPS: Final = (6, 14)
_REPETITIONS: Final = (1, 12)
_DELAY: Final = 0.03  # longest time from the beginning of a step, or from the first kill, to a kill
_RECOVERY: Final = 0.02  # longest time from the first kill to one during the recovery


class Step(NamedTuple):
    """A part of the program. Draws inside it come from `seed`."""

    kind: str
    form: Form
    repetitions: int
    seed: int


class Kill(NamedTuple):
    """These ranks get SIGKILL at once."""

    victims: tuple[int, ...]
    """Ranks at the beginning of the schedule."""
    step: int | None
    """It counts from the moment when the first rank begins this step; None: from the previous kill."""
    delay: float


class Schedule(NamedTuple):
    """One program and its kills."""

    number: int
    steps: tuple[Step, ...]
    kills: tuple[Kill, ...]
    leaver: int | None
    """This rank leaves at the step "leave", a checkpoint."""
    closer: int | None
    """This rank closes its communicator after step `closes_after`, and tells nobody."""
    closes_after: int

    @property
    def victims(self) -> frozenset[int]:
        return frozenset(rank for kill in self.kills for rank in kill.victims)


def draw_schedule(seed: int, number: int, size: int) -> Schedule:
    """The same on every rank and in the parent."""
    chance = Random(f"{seed}/{number}/{size}")
    steps = _draw_steps(chance)
    ranks = chance.sample(range(size), size // 2)
    killed = chance.randint(1, 2)
    victims, spare = ranks[:killed], ranks[killed:]
    kills = _draw_kills(chance, victims, len(steps))
    leaver = spare.pop() if spare and chance.random() < 0.3 else None
    closer = spare.pop() if spare and chance.random() < 0.3 else None
    if leaver is not None:
        steps.insert(chance.randrange(len(steps)), Step("leave", "blocking", 1, chance.getrandbits(32)))
    return Schedule(number, tuple(steps), kills, leaver, closer, chance.randrange(len(steps)))


def _draw_steps(chance: Random) -> list[Step]:
    kinds = chance.choices(list(KINDS), list(KINDS.values()), k=chance.randint(*_STEPS))
    return [Step(kind, chance.choice(FORMS), chance.randint(*_REPETITIONS), chance.getrandbits(32)) for kind in kinds]


def _draw_kills(chance: Random, victims: list[int], steps: int) -> tuple[Kill, ...]:
    """Two victims die at once, one during the recovery from the other's death, or independently of each other."""
    first, *others = victims
    step, delay = chance.randrange(steps), chance.uniform(0.0, _DELAY)
    match chance.choice(("at once", "recovery", "later")) if others else "one":
        case "at once":
            return (Kill(tuple(victims), step, delay),)
        case "recovery":
            return Kill((first,), step, delay), Kill(tuple(others), None, chance.uniform(0.0, _RECOVERY))
        case "later":
            return Kill((first,), step, delay), Kill(tuple(others), chance.randrange(step, steps), delay)
        case _:
            return (Kill((first,), step, delay),)
