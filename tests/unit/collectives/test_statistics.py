import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.statistics import (
    KEPT,
    CallTotals,
    RecentCalls,
    Record,
    RecordFields,
    Straggler,
    StragglerEstimate,
)

times = st.floats(0, 1000)
calls = st.tuples(times, st.dictionaries(st.integers(101, 105), times, max_size=5))


def rank_of(node: int) -> int:
    return node - 100


def test_nobody_is_late_before_anybody_has_come() -> None:
    assert StragglerEstimate(100).stragglers(rank_of) == []
    assert StragglerEstimate(100).waiting(rank_of) == {}


def test_delay_is_measured_from_the_first_of_each_call() -> None:
    estimate = StragglerEstimate(100)
    estimate.add_call(10.0, {101: 13.0, 102: 11.0})
    estimate.add_call(50.0, {101: 51.0, 102: 52.0})
    assert estimate.stragglers(rank_of) == [
        Straggler(1, 2.0, 3.0, 1, pytest.approx(4 / 7)),
        Straggler(2, 1.5, 2.0, 1, pytest.approx(3 / 7)),
        Straggler(0, 0.0, 0.0, 0, 0.0),
    ]


def test_this_rank_can_be_the_last() -> None:
    estimate = StragglerEstimate(100)
    assert estimate.add_call(10.0, {101: 8.0, 102: 9.0}) == 0.0
    assert estimate.stragglers(rank_of)[0] == Straggler(0, 2.0, 2.0, 1, pytest.approx(2 / 3))
    assert estimate.waiting(rank_of) == {1: 0.0, 2: 0.0}


def test_waiting_lasts_until_the_last_has_come_and_each_is_charged_with_its_own() -> None:
    estimate = StragglerEstimate(100)
    for _ in range(2):
        assert estimate.add_call(10.0, {101: 12.0, 102: 13.0, 103: 9.0}) == 3.0
    assert estimate.waiting(rank_of) == {1: 4.0, 2: 6.0, 3: 0.0}


def test_arrivals_are_kept_by_operation_and_added_up_over_all() -> None:
    estimate = StragglerEstimate(100)
    estimate.add_call(10.0, {101: 13.0}, operation=1)
    estimate.add_call(50.0, {101: 51.0}, operation=2)
    estimate.add_call(60.0, {101: 59.0}, operation=2)
    found = estimate.arrivals(rank_of)
    assert found[1][1] == {
        "calls": 1, "mean_lateness": 3.0, "worst": 3.0, "times_last": 1, "seconds_waited_for": 3.0,
    }  # fmt: skip
    assert (found[2][1]["calls"], found[2][1]["times_last"], found[2][0]["times_last"]) == (2, 1, 1)
    assert estimate.waiting(rank_of) == {1: 4.0}
    assert [(each.rank, each.times_last) for each in estimate.stragglers(rank_of)] == [(1, 2), (0, 1)]


@given(st.lists(calls, max_size=10))
def test_shares_add_up_and_the_worst_is_no_less_than_the_mean(seen: list[tuple[float, dict[int, float]]]) -> None:
    estimate = StragglerEstimate(100)
    for began, arrivals in seen:
        assert estimate.add_call(began, arrivals) == max([began, *arrivals.values()]) - began
    found = estimate.stragglers(rank_of)
    total = sum(each.share for each in found)
    assert total == pytest.approx(1.0) or all(each.worst == 0.0 for each in found)
    assert all(each.worst >= each.mean_lateness * (1 - 1e-9) >= 0 for each in found)
    assert [each.share for each in found] == sorted((each.share for each in found), reverse=True)


def facts(sequence: int) -> RecordFields:
    return sequence, Fingerprint(2, 11, 8, 0, 1), float(sequence), sequence + 0.5, 32, ""


def test_what_was_recorded_can_be_read_in_the_order_of_its_end() -> None:
    recorder = RecentCalls()
    assert recorder.snapshot() == []
    for sequence in (1, 0, 2):
        recorder.record(facts(sequence))
    assert recorder.snapshot() == [Record(*facts(sequence)) for sequence in (0, 1, 2)]


def test_only_the_last_are_kept() -> None:
    recorder = RecentCalls()
    for sequence in range(KEPT + 7):
        recorder.record(facts(sequence))
    assert [record.sequence for record in recorder.snapshot()] == list(range(7, KEPT + 7))


def test_several_threads_lose_nothing() -> None:
    recorder = RecentCalls()

    def run(begin: int) -> None:
        for sequence in range(begin, begin + KEPT // 4):
            recorder.record(facts(sequence))

    threads = [threading.Thread(target=run, args=(part * KEPT // 4,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record.sequence for record in recorder.snapshot()] == list(range(KEPT))


def test_at_the_end_all_that_is_kept_is_handed_out_with_how_many_are_not() -> None:
    recorder = RecentCalls(4)
    for sequence in range(6):
        recorder.record(facts(sequence))
    kept, missed = recorder.drain()
    assert ([each[0] for each in kept], missed) == ([2, 3, 4, 5], 2)


def test_nothing_has_been_counted_at_first() -> None:
    stats = CallTotals().stats()
    assert stats["calls"] == stats["bytes"] == stats["errors"] == 0
    assert stats["operations"] == {}


def test_calls_are_counted_by_operation_and_in_all() -> None:
    call_totals = CallTotals()
    call_totals.count(OperationCode.BARRIER, 0, 0.5, 0.25, "")
    call_totals.count(OperationCode.ALL_REDUCE, 100, 1.0, 0.5, "")
    call_totals.count(OperationCode.ALL_REDUCE, 100, 2.0, 0.0, "PeerLost")
    stats = call_totals.stats()
    assert (stats["calls"], stats["bytes"], stats["seconds"], stats["errors"]) == (3, 200, 3.5, 1)
    assert stats["seconds_waiting"] == 0.75
    assert stats["operations"]["all_reduce"] == {
        "calls": 2, "bytes": 200, "seconds": 3.0, "seconds_waiting": 0.5, "errors": 1,
    }  # fmt: skip
    assert stats["errors_by_kind"] == {"PeerLost": 1}
    assert call_totals.totals() == (3, 200, 1, 0.75)
