import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.collectives.lateness import Lateness, Straggler

times = st.floats(0, 1000)
calls = st.tuples(times, st.dictionaries(st.integers(101, 105), times, max_size=5))


def rank_of(node: int) -> int:
    return node - 100


def test_nobody_is_late_before_anybody_has_come() -> None:
    assert Lateness(100).stragglers(rank_of) == []
    assert Lateness(100).waiting(rank_of) == {}


def test_lateness_is_measured_from_the_first_of_each_call() -> None:
    lateness = Lateness(100)
    lateness.saw(10.0, {101: 13.0, 102: 11.0})
    lateness.saw(50.0, {101: 51.0, 102: 52.0})
    assert lateness.stragglers(rank_of) == [
        Straggler(1, 2.0, 3.0, 1, pytest.approx(4 / 7)),
        Straggler(2, 1.5, 2.0, 1, pytest.approx(3 / 7)),
        Straggler(0, 0.0, 0.0, 0, 0.0),
    ]


def test_this_rank_can_be_the_last() -> None:
    lateness = Lateness(100)
    assert lateness.saw(10.0, {101: 8.0, 102: 9.0}) == 0.0
    assert lateness.stragglers(rank_of)[0] == Straggler(0, 2.0, 2.0, 1, pytest.approx(2 / 3))
    assert lateness.waiting(rank_of) == {1: 0.0, 2: 0.0}


def test_waiting_lasts_until_the_last_has_come_and_each_is_charged_with_its_own() -> None:
    lateness = Lateness(100)
    for _ in range(2):
        assert lateness.saw(10.0, {101: 12.0, 102: 13.0, 103: 9.0}) == 3.0
    assert lateness.waiting(rank_of) == {1: 4.0, 2: 6.0, 3: 0.0}


def test_arrivals_are_kept_by_operation_and_added_up_over_all() -> None:
    lateness = Lateness(100)
    lateness.saw(10.0, {101: 13.0}, operation=1)
    lateness.saw(50.0, {101: 51.0}, operation=2)
    lateness.saw(60.0, {101: 59.0}, operation=2)
    found = lateness.arrivals(rank_of)
    assert found[1][1] == {
        "calls": 1, "mean_lateness": 3.0, "worst": 3.0, "times_last": 1, "seconds_waited_for": 3.0,
    }  # fmt: skip
    assert (found[2][1]["calls"], found[2][1]["times_last"], found[2][0]["times_last"]) == (2, 1, 1)
    assert lateness.waiting(rank_of) == {1: 4.0}
    assert [(each.rank, each.times_last) for each in lateness.stragglers(rank_of)] == [(1, 2), (0, 1)]


@given(st.lists(calls, max_size=10))
def test_shares_add_up_and_the_worst_is_no_less_than_the_mean(seen: list[tuple[float, dict[int, float]]]) -> None:
    lateness = Lateness(100)
    for began, arrivals in seen:
        assert lateness.saw(began, arrivals) == max([began, *arrivals.values()]) - began
    found = lateness.stragglers(rank_of)
    total = sum(each.share for each in found)
    assert total == pytest.approx(1.0) or all(each.worst == 0.0 for each in found)
    assert all(each.worst >= each.mean_lateness * (1 - 1e-9) >= 0 for each in found)
    assert [each.share for each in found] == sorted((each.share for each in found), reverse=True)
