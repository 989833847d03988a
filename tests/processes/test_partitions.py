"""Hosts that cannot reach one another: at most one side goes on, and the other is notified when the network heals."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import pytest

from nexar_tools.network_namespaces import NetworkNamespaces
from tests.processes.story import Story, causes

pytestmark = pytest.mark.netns
SETTINGS = {"heartbeat_interval": 0.2, "heartbeat_timeout": 2.0, "recovery_timeout": 10.0}


class Partition:
    """A story on several hosts, with the seed on the first one, and what lies between them."""

    def __init__(self, story: Story, network: NetworkNamespaces) -> None:
        self.story = story
        self._network = network

    def split(self, *pairs: tuple[int, int]) -> None:
        """These hosts receive nothing from each other; without any: no host receives from another."""
        for pair in pairs or combinations(range(len(self._network.names)), 2):
            for here, there in (pair, pair[::-1]):
                self._network.deafen(here, there)

    def heal(self) -> None:
        for number in range(len(self._network.names)):
            self._network.clear(number)


@contextmanager
def hosts(folder: Path, *ranks: int) -> Iterator[Partition]:
    """So many ranks on each host."""
    with NetworkNamespaces(len(ranks)) as network:
        prefixes = [network.places[host].prefix for host, count in enumerate(ranks) for _ in range(count)]
        with Story(folder, sum(ranks), prefixes=prefixes, **SETTINGS) as story:
            yield Partition(story, network)


def assert_notified(story: Story, left_out: Sequence[int]) -> None:
    for rank in left_out:
        reported = story.await_error(rank, "Expelled")
        assert reported["epoch"] > 1  # the first or the second change: they may have been removed one after the other
        assert reported["reason"]


def _outcomes(story: Story, rank: int) -> list[str]:
    """Each time that it went on, or was informed that it does not."""
    lines = (line for line in story.reported(rank) if line["what"] == "changed" or line.get("error") == "Expelled")
    return [line["what"] for line in lines]


@pytest.mark.full
@pytest.mark.parametrize(
    ("near", "far"),
    [(2, 2), (3, 2)],
    ids=["2|2 with the seed on one side", "3|2"],
)
def test_one_side_goes_on_and_the_other_is_notified_when_it_is_reached_again(
    near: int, far: int, tmp_path: Path
) -> None:
    here, there = range(near), range(near, near + far)
    with hosts(tmp_path, near, far) as partition:
        story = partition.story
        partition.split()
        story.await_sum(here)
        for rank in there:
            story.await_error(rank, "NoQuorum")
        story.await_more(here)
        partition.heal()
        assert_notified(story, there)
        story.await_more(here)
        story.finish()


def test_the_side_with_the_majority_goes_on_where_the_seed_is_on_the_other(tmp_path: Path) -> None:
    with hosts(tmp_path, 2, 3) as partition:
        story = partition.story
        partition.split()
        story.await_sum([2, 3, 4])
        for rank in (0, 1):
            story.await_error(rank, "NoQuorum")
        partition.heal()
        assert_notified(story, (0, 1))
        story.finish()


@pytest.mark.full
def test_nobody_goes_on_where_each_is_alone_and_those_who_meet_again_first_do(tmp_path: Path) -> None:
    with hosts(tmp_path, 1, 1, 1) as partition:
        story = partition.story
        partition.split()
        begin = time.monotonic()
        raised = [story.await_error(rank, "NoQuorum") for rank in range(3)]
        assert [line["alive"] for line in raised] == [[0], [1], [2]]
        assert max(line["at"] for line in raised) - begin < 30
        assert not any(story.reported(rank, "changed") for rank in range(3))
        partition.heal()  # any two are a majority, and need not wait for the third
        story.await_all(range(3), lambda rank: bool(_outcomes(story, rank)), "an end of being alone")
        on, out = ([rank for rank in range(3) if _outcomes(story, rank)[-1] == what] for what in ("changed", "raised"))
        assert len(on) >= 2
        assert_notified(story, out)
        story.await_more(on)
        story.finish()


@pytest.mark.full
def test_two_that_cannot_reach_each_other_go_on_over_a_third_and_nobody_leaves(tmp_path: Path) -> None:
    with hosts(tmp_path, 1, 1, 1) as partition:
        story = partition.story
        partition.split((1, 2))
        story.await_all(range(3), lambda rank: bool(story.reported(rank, "changed")), "a successor")
        story.await_more(range(3), rounds=50)
        for rank in range(3):
            assert [causes(change) for change in story.reported(rank, "changed")] == [{}]
            assert not story.reported(rank, "raised", error="Expelled")
        story.finish()
