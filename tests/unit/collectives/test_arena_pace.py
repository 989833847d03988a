"""In step with the others: what one rank does when the words of another say this or that."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from nexar.collectives import arena_pace
from nexar.collectives.arena_memory import ArenaMemory, create_memory
from nexar.collectives.arena_operation import ArenaOperation
from nexar.collectives.arena_pace import Differs, GaveUp, Pace
from nexar.collectives.arena_records import Records
from nexar.collectives.arena_slots import Slots
from nexar.collectives.fingerprint import Fingerprint
from nexar.errors import InternalError
from nexar.types import AwaitedPeer

ONE = Fingerprint(2, 11, 2, 0, 1)


class Stage:
    """Rank 0 with its pace, and the words of rank 1."""

    def __init__(self, memory: ArenaMemory) -> None:
        self.lock = threading.Lock()
        self.nudged = 0
        self.records, self.theirs = Records(memory.records(), 0, 2), Records(memory.records(), 1, 2)
        self.slots = Slots(memory, 0)
        self.pace = Pace(self.records, self.slots, [self.nudge, self.nudge])

    def nudge(self) -> None:
        self.nudged += 1

    def publish(self, number: int) -> None:
        """By rank 1."""
        self.theirs.words[self.theirs.mine] = number

    def begin(self, rounds: int, slip: int = 1) -> ArenaOperation:
        operation = ArenaOperation(self, "test", slip, (1, ONE), (rounds, iter([None] * rounds)))
        self.pace.begin(operation)
        return operation

    def cancel(self, operation: ArenaOperation) -> None: ...

    def awaited(self, operation: ArenaOperation) -> AwaitedPeer:
        return AwaitedPeer()


@pytest.fixture
def stage() -> Iterator[Stage]:
    memory = create_memory(2, 4096)
    made = Stage(memory)
    yield made
    made.slots.release()
    made.records.release()
    made.theirs.release()
    memory.close()


def test_an_operation_goes_from_round_to_round(stage: Stage) -> None:
    operation, pace = stage.begin(2), stage.pace
    stage.theirs.take(1, ONE)
    assert pace.reached(operation.wants)
    assert not pace.step(operation)
    assert not pace.reached(operation.wants)
    assert pace.missing(operation.wants) == 1
    stage.publish(1)
    assert not pace.step(operation)
    stage.publish(2)
    assert pace.missing(operation.wants) is None
    assert pace.step(operation)
    assert pace.round == stage.records.words[stage.records.mine] == 2


def test_only_who_may_wait_for_a_round_is_nudged(stage: Stage) -> None:
    stage.pace.publish(1)
    assert stage.nudged == 0
    stage.publish(2)
    stage.pace.publish(2)
    assert stage.nudged == 1


def test_who_gave_up_or_means_something_else_is_found(stage: Stage) -> None:
    operation, pace = stage.begin(1), stage.pace
    pace.step(operation)
    stage.theirs.take(1, ONE._replace(dtype=4))
    stage.publish(1)
    with pytest.raises(Differs) as different:
        pace.step(operation)
    assert different.value.index == 1
    assert pace.deserter(1) is None
    stage.theirs.give_up(1)
    with pytest.raises(GaveUp) as gone:
        pace.step(operation)
    assert gone.value.index == 1
    assert pace.deserter(1) == 1
    assert not pace.waits(operation)


def test_after_giving_up_the_next_waits_for_all_to_have_left(stage: Stage) -> None:
    operation, pace = stage.begin(5), stage.pace
    pace.step(operation)
    pace.give_up(operation)
    assert stage.nudged == 1
    assert not pace.settled
    assert stage.theirs.has_given_up(stage.records.mine, 1)
    following = stage.begin(1, slip=2)
    assert not pace.reached(following.wants)
    assert pace.waits(following)
    stage.publish(5)
    assert not pace.step(following)
    assert pace.settled
    assert pace.round == 6


def test_a_wrong_number_of_rounds_is_our_bug(stage: Stage) -> None:
    operation = stage.begin(1)
    operation.rounds = 2
    stage.theirs.take(1, ONE)
    stage.pace.step(operation)
    stage.publish(1)
    with pytest.raises(InternalError, match="1 rounds, not 2"):
        stage.pace.step(operation)


def test_spinning_ends_in_time_or_when_there_is_nothing_to_wait_for(stage: Stage) -> None:
    begin = time.monotonic()
    assert not stage.pace.spin(1, 0.001, lambda: False)
    assert not stage.pace.spin(1, 30.0, lambda: True)
    assert time.monotonic() - begin < 10
    stage.publish(1)
    assert stage.pace.spin(1, 0.0, lambda: True)


def test_it_yields_sooner_where_that_helps_and_later_where_it_is_not_needed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 0

    def yielded() -> None:
        stage.publish(number)

    monkeypatch.setattr(arena_pace, "_CROWDED", 30.0)
    monkeypatch.setattr(os, "sched_yield", yielded)
    before = stage.pace._patience
    for number in range(1, 20):
        assert stage.pace.spin(number, 30.0, lambda: False)
    least = stage.pace._patience
    assert least < before
    for _ in range(5):
        assert stage.pace.spin(number, 30.0, lambda: False)
    assert stage.pace._patience > least
