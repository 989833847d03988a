"""Runs of free ranks behave like a set of numbers, and never touch one another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.cluster.decisions.free_ranks import FreeRanks

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
