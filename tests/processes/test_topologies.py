"""Ranks of sparse worlds are killed: who is left agrees over whatever ways are left, and sums right."""

from pathlib import Path
from typing import Any

import pytest

from tests.processes.scale import measured, sized
from tests.processes.story import Story

pytestmark = pytest.mark.timeout(120)

TOPOLOGIES = sized(("k_regular:2", "hypercube"), ("k_regular:2", "k_regular:4", "hypercube"))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_rank_is_killed_and_the_others_go_on(topology: str, tmp_path: Path, record_property: Any) -> None:
    size = sized(5, 9)
    left = [rank for rank in range(size) if rank != 1]
    with Story(tmp_path, size, topology=topology) as story:
        killed = story.kill(1)
        took = story.await_sum(left) - killed
        story.await_more(left)
        story.finish()
    measured(record_property, topology=topology, recovery_ms=round(took * 1e3, 1))


def test_a_ring_that_is_cut_in_two_heals(tmp_path: Path, record_property: Any) -> None:
    """Neither half reaches the other over neighbours: control dials whom it needs, and the ring is closed anew."""
    with Story(tmp_path, 6, topology="k_regular:2") as story:
        killed = story.kill(1, 4)
        took = story.await_sum([0, 2, 3, 5]) - killed
        story.await_more([0, 2, 3, 5])
        story.finish()
    measured(record_property, recovery_ms=round(took * 1e3, 1))
