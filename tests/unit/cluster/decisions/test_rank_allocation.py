"""Runs of free ranks behave like a set of numbers, and never touch one another.

Who gets which rank: requests granted exactly, blocks kept for their children, the rest host by host.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.cluster.decisions.rank_allocation import FreeRanks, RankAllocator
from nexar.cluster.decisions.refusals import Refusal
from nexar.errors import InternalError
from nexar.types import format_node

SIZE = 12


def _lowest(free: set[int], count: int) -> int | None:
    return next((first for first in range(SIZE) if all(first + n in free for n in range(count))), None)


@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, 5)), max_size=40))
def test_they_behave_like_a_set(steps: list[tuple[int, int]]) -> None:
    ranks, model = FreeRanks(SIZE), set(range(SIZE))
    for first, count in steps:
        wanted = set(range(first, first + count))
        assert ranks.are_free(first, count) == (wanted <= model)
        if wanted <= model:
            ranks.take(first, count)
            model -= wanted
        elif first not in model:
            ranks.give_back(first)
            model.add(first)
        assert list(ranks) == sorted(model)
        assert ranks.count == len(model)
        assert [ranks.lowest(n) for n in range(1, 6)] == [_lowest(model, n) for n in range(1, 6)]


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (4, 1), (2, 3), (0, 5)])
def test_what_is_not_free_cannot_be_taken(first: int, count: int) -> None:
    with pytest.raises(ValueError, match="not all free"):
        FreeRanks(4).take(first, count)


def test_what_is_free_cannot_be_given_back() -> None:
    with pytest.raises(ValueError, match="free already"):
        FreeRanks(4).give_back(2)


def test_a_world_of_nobody_has_no_ranks() -> None:
    assert list(FreeRanks(0)) == []
    assert FreeRanks(0).lowest(1) is None


LAUNCHER, OTHER = 71, 72


def test_without_requests_hosts_come_by_first_arrival_and_nodes_by_arrival() -> None:
    places = RankAllocator(5)
    arrivals = [(1, "b"), (2, "a"), (3, "b"), (4, "c"), (5, "a")]
    for node, _ in arrivals:
        places.claim(node, None, 0)
    assert places.assign(arrivals) == [1, 3, 2, 5, 4]


def test_requests_are_granted_exactly_and_the_others_fill_the_gaps() -> None:
    places = RankAllocator(5)
    places.claim(1, None, 0)
    places.claim(2, 0, 0)
    places.claim(3, None, 0)
    places.claim(4, 3, 0)
    places.claim(5, None, 0)
    assert places.assign([(1, "a"), (2, "a"), (3, "b"), (4, "b"), (5, "a")]) == [2, 1, 5, 4, 3]


def test_a_rank_that_is_taken_is_refused_and_its_holder_named() -> None:
    places = RankAllocator(4)
    places.claim(1, 2, 0)
    with pytest.raises(Refusal, match=f"rank 2 is held by node {format_node(1)}"):
        places.claim(2, 2, 0)
    assert places.rank_of(1) == 2
    assert places.holder(2) == 1


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(Refusal, match=r"rank 4 is outside 0\.\.3"):
        RankAllocator(4).claim(1, 4, 0)


def test_a_full_world_refuses() -> None:
    places = RankAllocator(2)
    places.claim(1, None, 0)
    places.claim(2, None, 0)
    assert places.is_full
    for rank in (None, 1):
        with pytest.raises(Refusal, match="all 2 places are taken"):
            places.claim(3, rank, 0)


def test_a_candidate_that_gives_up_leaves_no_trace() -> None:
    places = RankAllocator(2)
    places.claim(1, 1, 0)
    places.claim(2, None, 0)
    places.give_up(1)
    places.give_up(2)
    assert places.left == 2
    places.claim(3, 1, 0)
    assert places.holder(1) == 3


def test_blocks_are_the_lowest_that_fit_and_groups_are_counted() -> None:
    places = RankAllocator(8)
    places.claim(1, 2, 0)
    assert places.reserve(LAUNCHER, 3, None).ranks == range(3, 6)
    second = places.reserve(OTHER, 2, None)
    assert (second.first_rank, second.group_rank) == (0, 1)


def test_a_block_can_be_asked_for_by_its_place() -> None:
    places = RankAllocator(8)
    assert places.reserve(LAUNCHER, 4, 4).ranks == range(4, 8)
    with pytest.raises(Refusal, match=f"rank 4 is reserved by launcher {format_node(LAUNCHER)}"):
        places.reserve(OTHER, 2, 3)
    with pytest.raises(Refusal, match=r"not all in 0\.\.7; choose a lower first rank"):
        places.reserve(OTHER, 2, 7)
    assert places.reserve(OTHER, 4, 0).ranks == range(4)


def test_more_ranks_than_are_left_are_refused() -> None:
    places = RankAllocator(4)
    places.claim(1, None, 0)
    with pytest.raises(Refusal, match="4 places were asked for, 3 are left of 4; start fewer ranks"):
        places.reserve(LAUNCHER, 4, None)


def test_a_block_needs_neighbouring_ranks() -> None:
    places = RankAllocator(4)
    places.claim(1, 1, 0)
    with pytest.raises(Refusal, match="no 3 neighbouring ranks"):
        places.reserve(LAUNCHER, 3, None)


def test_only_its_children_get_the_ranks_of_a_block() -> None:
    places = RankAllocator(3)
    places.reserve(LAUNCHER, 2, None)
    with pytest.raises(Refusal, match="rank 0 is reserved by launcher"):
        places.claim(1, 0, 0)
    with pytest.raises(Refusal, match="rank 0 is reserved by launcher"):
        places.claim(1, 0, OTHER)
    places.claim(2, 0, LAUNCHER)
    with pytest.raises(Refusal, match="rank 0 is held by node"):
        places.claim(3, 0, LAUNCHER)
    with pytest.raises(Refusal, match=r"rank 2 is outside the ranks 0\.\.1 that its launcher has reserved"):
        places.claim(3, 2, LAUNCHER)


def test_nobody_waits_for_a_rank_that_is_reserved() -> None:
    places = RankAllocator(3)
    places.reserve(LAUNCHER, 2, None)
    places.claim(1, None, 0)
    with pytest.raises(Refusal, match="all 3 places are taken or reserved"):
        places.claim(2, None, 0)


def test_the_rank_of_a_child_that_dies_stays_reserved() -> None:
    places = RankAllocator(2)
    places.reserve(LAUNCHER, 2, None)
    places.claim(1, 1, LAUNCHER)
    places.give_up(1)
    with pytest.raises(Refusal):
        places.claim(2, 1, 0)
    places.claim(3, 1, LAUNCHER)


def test_a_launcher_that_goes_gives_back_what_no_child_holds() -> None:
    places = RankAllocator(4)
    places.reserve(LAUNCHER, 3, None)
    places.claim(1, 1, LAUNCHER)
    places.release(LAUNCHER)
    assert places.left == 3
    assert places.holder(1) == 1
    places.claim(2, 0, 0)
    places.give_up(1)
    assert places.reserve(OTHER, 3, None).ranks == range(1, 4)


def test_the_number_of_a_group_that_went_is_given_to_the_next() -> None:
    places = RankAllocator(8)
    assert [places.reserve(launcher, 1, None).group_rank for launcher in (1, 2, 3)] == [0, 1, 2]
    places.release(2)
    places.release(1)
    assert [places.reserve(launcher, 1, None).group_rank for launcher in (4, 5, 6)] == [0, 1, 3]


def test_ranks_are_not_assigned_before_everybody_is_there() -> None:
    with pytest.raises(InternalError, match="0 of 1"):
        RankAllocator(1).assign([])


_claims = st.lists(
    st.tuples(
        st.sampled_from(["claim", "reserve", "give up", "release"]),
        st.integers(1, 9),
        st.one_of(st.none(), st.integers(0, 7)),
        st.sampled_from([0, 101, 102, 103]),
        st.sampled_from("abc"),
    ),
    max_size=80,
)


@given(_claims)
def test_every_promise_is_kept_when_the_world_is_full(steps: list[tuple[str, int, int | None, int, str]]) -> None:
    size = 6
    places, hosts, requests, launchers = RankAllocator(size), dict[int, str](), dict[int, int | None](), set[int]()
    for step, node, rank, launcher, host in steps:
        try:
            if step == "claim" and node not in requests:
                places.claim(node, rank, launcher)
                requests[node], hosts[node] = rank, host
            elif step == "give up" and node in requests:
                places.give_up(node)
                del requests[node], hosts[node]
            elif step == "reserve" and launcher and launcher not in launchers:
                places.reserve(launcher, node % 4 + 1, rank)
                launchers.add(launcher)
            elif step == "release" and launcher in launchers:
                places.release(launcher)
                launchers.remove(launcher)
        except Refusal:
            pass
        assert places.left >= 0
    for launcher in launchers:
        places.release(launcher)
    for node in range(1000, 1000 + places.left):
        places.claim(node, None, 0)
        requests[node], hosts[node] = None, "z"
    order = places.assign(hosts.items())
    assert sorted(order) == sorted(requests)
    assert all(order[rank] == node for node, rank in requests.items() if rank is not None)
