from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.collectives.operations import OperationCode
from nexar.collectives.trace_writer import Called, TracePart
from nexar.observe.trace_merge import clocks
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
    clock = clocks(parts)["b"]
    for number in range(len(calls)):
        assert clock.ahead(number + ahead) == pytest.approx(ahead, abs=longest + 1e-6)


def test_one_call_in_which_the_last_of_each_host_came_together_is_enough() -> None:
    parts = [part(0, [call(1, 1.0, 1.002)]), part(1, [call(1, 1.0, 1.002)], host="b", ahead=77.0)]
    found = clocks(parts)
    assert (found["a"].ahead(1.0), found["b"].ahead(78.0)) == (0.0, pytest.approx(77.0, abs=1e-9))


def run(meetings: list[list[Called]], shows: Callable[[float], float]) -> list[TracePart]:
    """Of two hosts, the second of which has a clock that shows something else."""
    return [
        part(0, [each[0] for each in meetings]),
        part(
            1,
            [(s, f, shows(b), shows(e), size, out) for s, f, b, e, size, out in (each[1] for each in meetings)],
            host="b",
        ),
    ]


def hour(takes: float = 0.001) -> list[list[Called]]:
    return [meeting(second, float(second), (0.0, 0.0), takes) for second in range(3600)]


@pytest.mark.parametrize("drift", [5e-6, -20e-6, 400e-6])
def test_a_clock_that_runs_fast_or_slow_is_followed_for_an_hour(drift: float) -> None:
    def shows(time: float) -> float:
        return 500.0 + time * (1 + drift)

    clock = clocks(run(hour(), shows))["b"]
    assert [clock.common(shows(time)) for time in (0.0, 7.5, 1800.0, 3599.0)] == pytest.approx(
        [0.0, 7.5, 1800.0, 3599.0], abs=1e-6
    )


def test_a_clock_that_ran_unevenly_is_followed_to_within_what_a_call_takes() -> None:
    """As one does that a daemon slews: faster for a while, then slower, and once it is put ahead."""

    def shows(time: float) -> float:
        slewed = 50e-6 * min(time, 1000.0) - 30e-6 * max(0.0, time - 1000.0)
        return time + slewed + (0.25 if time >= 2000.0 else 0.0)

    clock = clocks(run(hour(), shows))["b"]
    off = [abs(clock.common(shows(float(second))) - second) for second in range(3600)]
    assert max(off) <= 0.001 + 2e-6
    assert sum(off) / len(off) < 0.0005


@given(
    st.floats(-1e-4, 1e-4),
    st.lists(st.tuples(st.floats(0, 0.4), st.floats(0, 0.4), st.floats(1e-5, 1e-3)), min_size=1, max_size=30),
)
def test_nobody_is_shown_to_end_before_all_have_begun(drift: float, calls: list[tuple[float, float, float]]) -> None:
    met = [meeting(number, number * 60.0, each[:2], each[2]) for number, each in enumerate(calls)]
    ours, theirs = run(met, lambda time: time * (1 + drift) - 77.0)
    clock = clocks([ours, theirs])["b"]
    for one, other in zip(ours.calls, theirs.calls, strict=True):
        assert one[2] <= clock.common(other[3]) + 2e-6
        assert clock.common(other[2]) <= one[3] + 2e-6


def test_before_the_first_call_and_after_the_last_a_clock_is_as_far_ahead_as_then() -> None:
    clock = clocks(run(hour(), lambda time: time * (1 + 1e-4)))["b"]
    assert clock.ahead(-1e6) == clock.ahead(0.0) == pytest.approx(0.0, abs=1e-6)
    assert clock.ahead(1e6) == pytest.approx(0.36, abs=0.001)


def without_a_meeting() -> list[list[TracePart]]:
    loose = int(OperationCode.BROADCAST)
    return [
        [part(0, []), part(1, [], host="b", ahead=9.0)],
        [part(0, [call(1, 1.0, 1.1, loose)]), part(1, [call(1, 5.0, 5.1, loose)], host="b", ahead=9.0)],
        [part(0, [call(1, 1, 1.1, outcome="X")]), part(1, [call(1, 5, 5.1, outcome="X")], host="b", ahead=9.0)],
        [part(0, [call(1, 1, 1.1)]), part(1, [call(2, 5, 5.1)], host="b", ahead=9.0)],
    ]


@pytest.mark.parametrize("parts", without_a_meeting())
def test_hosts_that_never_met_go_by_the_clocks_on_their_walls(parts: list[TracePart]) -> None:
    assert clocks(parts)["b"].ahead(1.0) == pytest.approx(9.0)


def test_ranks_of_one_host_share_its_clock_and_nobody_has_none() -> None:
    assert clocks([part(0, []), part(1, [])]).keys() == {"a"}
    assert clocks([]) == {}
