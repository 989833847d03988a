"""Every link of a small world, opened at once."""

import time
from collections.abc import Iterator

import pytest

from nexar.cluster import opening
from nexar.cluster.opening import open_all
from nexar.errors import PeerLost
from nexar.testing.faults import RefuseDial
from tests.ranks import on_every
from tests.unit.cluster.memory_mesh import Meshes, eventually, soon


@pytest.fixture
def world() -> Iterator[Meshes]:
    made = Meshes(3)
    yield made
    made.close()


PAIRS = [(0, 1), (0, 2), (1, 2)]


def test_everybody_has_a_link_to_everybody_and_a_second_time_there_is_nothing_to_do(world: Meshes) -> None:
    on_every(world.meshes, lambda mesh: open_all(mesh, soon()))
    for pair in PAIRS:
        eventually(lambda pair=pair: world.linked(*pair), "a link")  # type: ignore[misc]
    links = [mesh.links() for mesh in world.meshes]
    on_every(world.meshes, lambda mesh: open_all(mesh, time.monotonic()))
    assert [mesh.links() for mesh in world.meshes] == links


def test_where_the_lower_rank_does_not_get_through_the_higher_one_does(
    world: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_HEAD_START", 0.1)
    world.faults.add(world.on_way(RefuseDial, 0, 2))
    on_every(world.meshes, lambda mesh: open_all(mesh, soon()))
    for pair in PAIRS:
        eventually(lambda pair=pair: world.linked(*pair), "a link")  # type: ignore[misc]


def test_a_pair_that_cannot_reach_each_other_is_named_when_all_have_been_tried(
    world: Meshes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_HEAD_START", 0.1)
    for way in [(0, 2), (2, 0)]:
        world.faults.add(world.on_way(RefuseDial, *way))

    def open_and_fail(rank: int) -> int | None:
        if rank == 1:
            open_all(world.meshes[rank], soon())
            return None
        with pytest.raises(PeerLost) as raised:
            open_all(world.meshes[rank], soon())
        return raised.value.rank

    assert on_every([0, 1, 2], open_and_fail) == [2, None, 0]
    for pair in [(0, 1), (1, 2)]:
        eventually(lambda pair=pair: world.linked(*pair), "a link")  # type: ignore[misc]


def test_a_link_that_was_lost_is_made_anew(world: Meshes) -> None:
    on_every(world.meshes, lambda mesh: open_all(mesh, soon()))
    lost = world.linked_to(0, 1)
    eventually(lambda: world.linked(0, 1), "a link")
    lost.lose("a cable was cut")
    on_every(world.meshes[:2], lambda mesh: open_all(mesh, soon()))
    eventually(lambda: world.linked(0, 1), "another link")
    assert world.linked_to(0, 1) is not lost
