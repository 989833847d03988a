import threading
from typing import Any

from nexar.collectives.call import Call, RegionCall
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.shared_region_layout import ABORTED
from tests.unit.collectives.posting import LOCK, Posted

REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 8, 0, 1)


def make_call(count: int) -> tuple[RegionCall, list[tuple[int, Any, bool]], list[Posted]]:
    """A call with so many turns, what was asked for, and what was posted."""
    asked: list[tuple[int, Any, bool]] = []
    posted: list[Posted] = []

    def turn(order_number: int, announcement: Any, spin: bool) -> Posted:
        asked.append((order_number, announcement, spin))
        posted.append(Posted())
        return posted[-1]

    return RegionCall(Call(LOCK, 4, REDUCE), REDUCE, 20, (turn,) * count), asked, posted


def test_the_lock_is_taken_in_the_order_of_the_order_numbers() -> None:
    call, asked, posted = make_call(2)
    call.spin = True
    assert [call.post_next(), call.post_next()] == posted
    assert asked == [(20, (4, REDUCE), True), (21, (4, REDUCE), True)]
    call.abort()
    assert [each.cancelled for each in posted] == [False, True]
    assert len(asked) == 2


def test_who_gives_up_cancels_the_turn_that_was_taken_and_takes_no_part_in_those_left() -> None:
    call, asked, posted = make_call(3)
    call.post_next()
    call.abort()
    assert posted[0].cancelled
    assert asked[1:] == [(21, ABORTED, False), (22, ABORTED, False)]


def test_a_call_without_an_order_number_gives_up_nothing() -> None:
    call, asked, _ = make_call(0)
    call.abort()
    assert asked == []


def make_entry() -> Call:
    return Call(threading.Lock(), 12, Fingerprint(OperationCode.ALL_REDUCE, 11, 8))


def test_a_call_is_named_by_its_operation_and_number() -> None:
    assert make_entry().name == "all_reduce #12"
    assert "all_reduce #12" in str(make_entry().awaited())


def test_each_step_is_progress() -> None:
    entry = make_entry()
    assert entry.moved_at == entry.began
    entry.moved()
    entry.moved()
    assert entry.step == 2
    assert entry.moved_at >= entry.began


def test_cancelling_the_cancel_token_of_a_call_does_not_end_the_call() -> None:
    entry = make_entry()
    entry.cancel()
    assert not entry.done
