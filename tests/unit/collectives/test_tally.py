from nexar.collectives.operations import OperationCode
from nexar.collectives.tally import Tally


def test_nothing_has_been_counted_at_first() -> None:
    stats = Tally().stats()
    assert stats["calls"] == stats["bytes"] == stats["errors"] == 0
    assert stats["operations"] == {}


def test_calls_are_counted_by_operation_and_in_all() -> None:
    tally = Tally()
    tally.count(OperationCode.BARRIER, 0, 0.5, 0.25, "")
    tally.count(OperationCode.ALL_REDUCE, 100, 1.0, 0.5, "")
    tally.count(OperationCode.ALL_REDUCE, 100, 2.0, 0.0, "PeerLost")
    stats = tally.stats()
    assert (stats["calls"], stats["bytes"], stats["seconds"], stats["errors"]) == (3, 200, 3.5, 1)
    assert stats["seconds_waiting"] == 0.75
    assert stats["operations"]["all_reduce"] == {
        "calls": 2, "bytes": 200, "seconds": 3.0, "seconds_waiting": 0.5, "errors": 1,
    }  # fmt: skip
    assert stats["errors_by_kind"] == {"PeerLost": 1}
    assert tally.totals() == (3, 200, 1, 0.75)
