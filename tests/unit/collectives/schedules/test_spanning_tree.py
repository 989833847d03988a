"""Down a tree along the edges of a topology."""

import pytest

from nexar.collectives.schedules import spanning_tree
from nexar.topology.neighbors import neighbors


@pytest.mark.parametrize("topology", ["k_regular:2", "k_regular:4", "hypercube"])
def test_ranks_speak_with_neighbours_alone_and_everybody_is_reached(topology):
    for size in (2, 5, 9, 16):
        for root in (0, size - 1):
            schedules = [
                list(spanning_tree.broadcast(rank, size, 50, root, topology, segment=10)) for rank in range(size)
            ]
            for rank, steps in enumerate(schedules):
                peers = {each.peer for step in steps for each in (*step.sends, *step.receives)}
                assert peers <= set(neighbors(topology, size, rank))
                assert (rank == root) != bool(sum(len(step.receives) for step in steps) == 5)


def test_a_rank_passes_a_segment_on_while_it_receives_the_next():
    first, *middle, last = spanning_tree.broadcast(1, 8, 50, 0, "k_regular:2", segment=10)
    assert not first.sends
    assert not last.receives
    for before, step in zip([first, *middle], middle, strict=False):
        assert step.sends[0].part == before.receives[0].part


def test_in_a_full_mesh_the_root_sends_to_all_itself():
    (only,) = spanning_tree.broadcast(0, 5, 50, 0, "full_mesh")
    assert [send.peer for send in only.sends] == [1, 2, 3, 4]
