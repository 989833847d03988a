import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.collectives.lateness import Lateness, Straggler

times = st.dictionaries(st.integers(0, 5), st.floats(0, 1000), max_size=6)


def test_nobody_is_late_before_anybody_has_come() -> None:
    assert Lateness().stragglers() == []


def test_lateness_is_measured_from_the_first_of_each_call() -> None:
    lateness = Lateness()
    lateness.saw({0: 10.0, 1: 13.0, 2: 11.0})
    lateness.saw({0: 50.0, 1: 51.0, 2: 52.0})
    assert lateness.stragglers() == [
        Straggler(1, 2.0, 3.0, 1, pytest.approx(4 / 7)),
        Straggler(2, 1.5, 2.0, 1, pytest.approx(3 / 7)),
        Straggler(0, 0.0, 0.0, 0, 0.0),
    ]


def test_a_rank_alone_is_not_late() -> None:
    lateness = Lateness()
    lateness.saw({0: 10.0})
    lateness.saw({})
    assert lateness.stragglers() == []


@given(st.lists(times, max_size=10))
def test_shares_add_up_and_the_worst_is_no_less_than_the_mean(calls: list[dict[int, float]]) -> None:
    lateness = Lateness()
    for arrivals in calls:
        lateness.saw(arrivals)
    found = lateness.stragglers()
    total = sum(each.share for each in found)
    assert total == pytest.approx(1.0) or all(each.worst == 0.0 for each in found)
    assert all(each.worst >= each.mean_lateness * (1 - 1e-9) >= 0 for each in found)
    assert [each.share for each in found] == sorted((each.share for each in found), reverse=True)
