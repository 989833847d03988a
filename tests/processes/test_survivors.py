"""Ranks are killed, one after another or at once, with and without the seed: who is left agrees, and sums right."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes.scale import measured, sized
from tests.processes.story import Story, causes


@pytest.mark.full
def test_three_of_seven_are_killed_one_after_another_rank_0_first(tmp_path: Path, record_property: Any) -> None:
    with Story(tmp_path, 7) as story:
        left, took = list(range(7)), []
        for victim in (0, 3, 6):
            left.remove(victim)
            killed = story.kill(victim)
            took.append(round((story.await_sum(left) - killed) * 1e3, 1))
        story.await_more(left)
        story.finish()
        changes = story.reported(1, "changed")
    assert [line["epoch"] for line in changes] == [2, 3, 4]
    assert [list(causes(line)) for line in changes] == [[0], [2], [4]]  # as they were numbered by then
    assert all(cause for line in changes for cause in causes(line).values())
    measured(record_property, recovery_ms=took)


def test_two_of_five_are_killed_at_once(tmp_path: Path, record_property: Any) -> None:
    with Story(tmp_path, 5) as story:
        killed = story.kill(0, 3)
        took = story.await_sum([1, 2, 4]) - killed
        story.await_more([1, 2, 4])
        story.finish()
    measured(record_property, recovery_ms=round(took * 1e3, 1))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(sized(2, 20)))
def test_another_one_is_killed_during_recovery(seed: int, tmp_path: Path, record_property: Any) -> None:
    chance = random.Random(seed)
    first, second = chance.sample(range(6), 2)
    left = [rank for rank in range(6) if rank not in (first, second)]
    with Story(tmp_path, 6) as story:
        story.kill(first)
        time.sleep(chance.uniform(0.0, 0.02))  # what the story is about: some moment of the recovery
        killed = story.kill(second)
        took = story.await_sum(left) - killed
        story.await_more(left)
        story.finish()
    measured(record_property, recovery_ms=round(took * 1e3, 1))


# -- with the seed, and without it -----------------------------------------------------------------------------------


def test_one_of_two_goes_on_with_the_vote_of_the_seed(tmp_path: Path, record_property: Any) -> None:
    with Story(tmp_path, 2) as story:
        took = -story.kill(0) + story.await_sum([1])
        story.await_more([1])
        story.finish()
    measured(record_property, recovery_ms=round(took * 1e3, 1))


def test_one_of_two_has_no_quorum_without_the_seed_and_is_notified_at_once(
    tmp_path: Path, record_property: Any
) -> None:
    with Story(tmp_path, 2, recovery_timeout=60) as story:
        story.kill_seed()
        killed = story.kill(0)
        line = story.await_error(1, "NoQuorum")
        story.finish()
    assert (line["alive"], line["needed"]) == ([1], 2)
    measured(record_property, no_quorum_ms=round((line["at"] - killed) * 1e3, 1))
    assert line["at"] - killed < 20


@pytest.mark.full
@pytest.mark.parametrize("size", [3, 4])
def test_a_majority_of_members_needs_no_seed(size: int, tmp_path: Path) -> None:
    with Story(tmp_path, size) as story:
        story.kill_seed()
        story.kill(0)
        story.await_sum(range(1, size))
        story.finish()


@pytest.mark.full
def test_a_seed_that_was_killed_and_has_its_state_again_votes(tmp_path: Path) -> None:
    with Story(tmp_path, 2, state=True) as story:
        story.kill_seed()
        story.start_seed()
        story.await_more([0, 1])
        story.kill(1)
        story.await_sum([0])
        story.await_more([0])
        story.finish()


@pytest.mark.full
def test_a_seed_that_was_killed_after_a_vote_knows_it_when_it_is_back(tmp_path: Path) -> None:
    with Story(tmp_path, 4, state=True) as story:
        story.kill(3)
        story.await_sum([0, 1, 2])
        story.kill(0)  # of an odd number: the seed only learns of it
        story.await_sum([1, 2])
        story.kill_seed()
        story.start_seed()
        story.kill(1)
        story.await_sum([2])
        story.finish()
