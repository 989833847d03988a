"""The root talks to everybody itself.

To or from one rank by way of all.

Down a tree along the edges of a topology.

Branches that stand for neighbouring ranks.
"""

import pytest

from nexar.arrays.views import split
from nexar.collectives.schedule import Combine, schedule_cost
from nexar.collectives.schedules import tree
from nexar.collectives.schedules.tree import subtrees
from nexar.topology import neighbors


def test_the_root_grows_outwards_so_that_rank_order_is_kept():
    (step,) = tree.flat_reduce(2, 5, 1, root=2)
    assert [(each.peer, each.how) for each in step.receives] == [
        (1, Combine.BEFORE),
        (0, Combine.BEFORE),
        (3, Combine.AFTER),
        (4, Combine.AFTER),
    ]


def test_only_the_root_has_to_know_the_blocks_of_others():
    mine = split(10, 5)[3]
    unknown = [mine if rank == 3 else None for rank in range(5)]
    (step,) = tree.flat_gather(3, 5, unknown, root=0)
    assert step.sends[0].part == (0, *mine)
    (step,) = tree.flat_scatter(3, 5, unknown, root=0)
    assert step.receives[0].part == (0, *mine)


def test_nobody_has_to_send_the_vector_many_times():
    assert max(schedule_cost(tree.scattered_broadcast(rank, 8, 800, 0)).sent_bytes for rank in range(8)) == 1400
    assert schedule_cost(tree.flat_broadcast(0, 8, 800, 0)).sent_bytes == 5600


def test_the_root_receives_what_others_have_reduced():
    for way in (tree.scattered_reduce, tree.scattered_fold):
        *_, last = way(2, 4, 40, 2)
        assert [each.part.count for each in last.receives] == [10, 10, 10]


@pytest.mark.parametrize("topology", ["k_regular:2", "k_regular:4", "hypercube"])
def test_ranks_speak_with_neighbours_alone_and_everybody_is_reached(topology):
    for size in (2, 5, 9, 16):
        for root in (0, size - 1):
            schedules = [
                list(tree.spanning_tree_broadcast(rank, size, 50, root, topology, segment=10)) for rank in range(size)
            ]
            for rank, steps in enumerate(schedules):
                peers = {each.peer for step in steps for each in (*step.sends, *step.receives)}
                assert peers <= set(neighbors(topology, size, rank))
                assert (rank == root) != bool(sum(len(step.receives) for step in steps) == 5)


def test_a_rank_passes_a_segment_on_while_it_receives_the_next():
    first, *middle, last = tree.spanning_tree_broadcast(1, 8, 50, 0, "k_regular:2", segment=10)
    assert not first.sends
    assert not last.receives
    for before, step in zip([first, *middle], middle, strict=False):
        assert step.sends[0].part == before.receives[0].part


def test_in_a_full_mesh_the_root_sends_to_all_itself():
    (only,) = tree.spanning_tree_broadcast(0, 5, 50, 0, "full_mesh")
    assert [send.peer for send in only.sends] == [1, 2, 3, 4]


WORLDS = [(size, root) for size in (1, 2, 3, 5, 8, 13) for root in range(size)]


@pytest.mark.parametrize(("size", "root"), WORLDS)
def test_everybody_but_the_root_has_one_parent_who_knows_it(size, root):
    upward = [(rank, each.peer) for rank in range(size) for each in subtrees(rank, size, root) if each.upward]
    downward = [(each.peer, rank) for rank in range(size) for each in subtrees(rank, size, root) if not each.upward]
    assert sorted(upward) == sorted(downward)
    assert [rank for rank, _ in upward] == [rank for rank in range(size) if rank != root]


@pytest.mark.parametrize(("size", "root"), WORLDS)
def test_two_runs_that_meet_are_neighbours_and_each_has_its_head(size, root):
    for rank in range(size):
        for each in subtrees(rank, size, root):
            assert each.near.stop == each.far.start or each.far.stop == each.near.start
            assert rank in each.near
            assert each.peer in each.far


@pytest.mark.parametrize(("size", "root"), WORLDS)
def test_there_are_log2_n_levels(size, root):
    assert max(len(subtrees(rank, size, root)) for rank in range(size)) <= (size - 1).bit_length()
