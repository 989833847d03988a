"""Kills, stops and partitions at random moments, with real processes: no epoch ever has two memberships.

Whether anybody can go on depends on the schedule; that whoever goes on goes on alone does not. After the last
misfortune the network is mended and who was stopped continues: then every rank that lives comes to an end that it
knows, with the others or without them.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nexar_tools.network_namespaces import NetworkNamespaces
from tests.processes.scale import FULL, sized
from tests.processes.story import Story

pytestmark = pytest.mark.netns
HOSTS = 3
SETTINGS = {"heartbeat_interval": 0.2, "heartbeat_timeout": sized(2.0, 1.0), "recovery_timeout": 4.0}
MOST = 4
"""Misfortunes of a schedule."""


@pytest.fixture(scope="module")
def network() -> Iterator[NetworkNamespaces]:
    """The same hosts for all schedules: making them takes as long as a schedule does."""
    with NetworkNamespaces(HOSTS) as made:
        yield made


class Fortune:
    """What one schedule brings about."""

    def __init__(self, story: Story, network: NetworkNamespaces, chance: random.Random) -> None:
        self._story = story
        self._network = network
        self._chance = chance
        self._stopped: set[int] = set()

    def strike(self) -> None:
        """Something bad, to somebody."""
        living = [rank for rank in range(self._story.size) if rank not in self._story.killed]
        rank, (one, other) = self._chance.choice(living), self._chance.sample(range(HOSTS), 2)
        match self._chance.choice(("kill", "kill", "stop", "part", "deafen", "isolate", "seed")):
            case "kill":
                self._story.kill(rank)
            case "stop":
                self._story.stop(rank)
                self._stopped.add(rank)
            case "part":
                self._network.deafen(one, other)
                self._network.deafen(other, one)
            case "deafen":
                self._network.deafen(one, other)
            case "isolate":
                self._network.drop(one)
            case "seed":
                self._story.kill_seed()

    def relent(self) -> None:
        """All that can be mended is."""
        for number in range(HOSTS):
            self._network.clear(number)
        for rank in self._stopped - self._story.killed:
            self._story.go_on(rank)
        self._stopped.clear()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(sized(2, 200)))
def test_no_epoch_has_two_memberships_whatever_happens(seed: int, network: NetworkNamespaces, tmp_path: Path) -> None:
    chance = random.Random(seed)
    size = chance.randint(3, 6)
    prefixes = [network.places[chance.randrange(HOSTS)].prefix for _ in range(size)]
    with Story(tmp_path, size, prefixes=prefixes, **SETTINGS) as story:
        fortune = Fortune(story, network, chance)
        try:
            for _ in range(chance.randint(1, MOST)):
                time.sleep(chance.choice((0.0, 0.01, 0.1, 1.0)) * chance.random())  # the schedule
                fortune.strike()
            time.sleep(chance.uniform(0.0, 3.0 if FULL else 1.0))
        finally:
            fortune.relent()
        story.finish()
