import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.collectives.operations import OperationCode
from nexar.collectives.trace_part import Called, Part
from nexar.observe.one_clock import offsets
from tests.unit.observe.parts import call, part


def meeting(sequence: int, at: float, comes: tuple[float, ...], takes: float) -> list[Called]:
    """Of each rank: all end a while after the last has come."""
    last = at + max(comes)
    return [call(sequence, at + come, last + takes) for come in comes]


@given(
    st.floats(-1e5, 1e5),
    st.lists(st.tuples(*[st.floats(0, 0.5)] * 4, st.floats(1e-5, 1e-3)), min_size=1, max_size=20),
)
def test_a_clock_that_is_ahead_is_found_to_within_what_a_call_takes(
    ahead: float, calls: list[tuple[float, float, float, float, float]]
) -> None:
    met = [meeting(number, float(number), each[:4], each[4]) for number, each in enumerate(calls)]
    ranks = [[made[rank] for made in met] for rank in range(4)]
    parts = [part(rank, ranks[rank], host="ab"[rank // 2], ahead=ahead * (rank // 2)) for rank in range(4)]
    longest = max(max(each[:4]) - min(each[:4]) + each[4] for each in calls)
    assert offsets(parts)["b"] == pytest.approx(ahead, abs=longest + 1e-6)


def test_one_call_in_which_the_last_of_each_host_came_together_is_enough() -> None:
    parts = [part(0, [call(1, 1.0, 1.002)]), part(1, [call(1, 1.0, 1.002)], host="b", ahead=77.0)]
    assert offsets(parts) == {"a": 0.0, "b": pytest.approx(77.0, abs=1e-9)}


def without_a_meeting() -> list[list[Part]]:
    loose = int(OperationCode.BROADCAST)
    return [
        [part(0, []), part(1, [], host="b", ahead=9.0)],
        [part(0, [call(1, 1.0, 1.1, loose)]), part(1, [call(1, 5.0, 5.1, loose)], host="b", ahead=9.0)],
        [part(0, [call(1, 1, 1.1, outcome="X")]), part(1, [call(1, 5, 5.1, outcome="X")], host="b", ahead=9.0)],
        [part(0, [call(1, 1, 1.1)]), part(1, [call(2, 5, 5.1)], host="b", ahead=9.0)],
    ]


@pytest.mark.parametrize("parts", without_a_meeting())
def test_hosts_that_never_met_go_by_the_clocks_on_their_walls(parts: list[Part]) -> None:
    assert offsets(parts)["b"] == pytest.approx(9.0)


def test_ranks_of_one_host_share_its_clock_and_nobody_has_none() -> None:
    assert offsets([part(0, []), part(1, [])]) == {"a": 0.0}
    assert offsets([]) == {}
