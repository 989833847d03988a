from nexar.collectives.operations import OperationCode
from nexar.collectives.tally import Tally


def test_nothing_has_been_counted_at_first() -> None:
    stats = Tally().stats()
    assert stats["calls"] == stats["bytes"] == stats["errors"] == 0
    assert stats["operations"] == stats["waiting_for"] == {}


def test_calls_are_counted_by_operation_and_in_all() -> None:
    tally = Tally()
    tally.count(OperationCode.BARRIER, 0, 0.5, "")
    tally.count(OperationCode.ALL_REDUCE, 100, 1.0, "")
    tally.count(OperationCode.ALL_REDUCE, 100, 2.0, "PeerLost")
    stats = tally.stats()
    assert (stats["calls"], stats["bytes"], stats["seconds"], stats["errors"]) == (3, 200, 3.5, 1)
    assert stats["operations"]["all_reduce"] == {
        "calls": 2, "bytes": 200, "seconds": 3.0, "seconds_waiting": 0.0, "errors": 1,
    }  # fmt: skip
    assert stats["errors_by_kind"] == {"PeerLost": 1}


def test_waiting_lasts_until_the_last_has_come_and_each_is_charged_with_its_own() -> None:
    tally = Tally()
    for _ in range(2):
        totals = tally.count(OperationCode.BARRIER, 0, 5.0, "")
        tally.waited(totals, 10.0, {1: 12.0, 2: 13.0, 3: 9.0})
    assert tally.stats()["waiting_for"] == {1: 4.0, 2: 6.0}
    assert tally.stats()["seconds_waiting"] == 6.0
