import threading

from nexar.collectives.entry import Entry
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode


def make() -> Entry:
    return Entry(threading.Lock(), 12, Fingerprint(OperationCode.ALL_REDUCE, 11, 8))


def test_a_call_is_named_by_its_operation_and_number() -> None:
    assert make().name == "all_reduce #12"
    assert "all_reduce #12" in str(make().awaited())


def test_each_step_is_progress() -> None:
    entry = make()
    assert entry.moved_at == entry.began
    entry.moved()
    entry.moved()
    assert entry.step == 2
    assert entry.moved_at >= entry.began


def test_cancelling_the_alarm_of_a_call_does_not_end_the_call() -> None:
    entry = make()
    entry.cancel()
    assert not entry.done
