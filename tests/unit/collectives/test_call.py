from typing import Any

from nexar.collectives.arena_records import GIVEN_UP
from nexar.collectives.call import Call
from nexar.collectives.entry import Entry
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from tests.unit.collectives.posting import LOCK, Posted

REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 8, 0, 1)


def make(count: int) -> tuple[Call, list[tuple[int, Any, bool]], list[Posted]]:
    """A call with so many turns, what was asked for, and what was posted."""
    asked: list[tuple[int, Any, bool]] = []
    posted: list[Posted] = []

    def turn(slip: int, announcement: Any, spin: bool) -> Posted:
        asked.append((slip, announcement, spin))
        posted.append(Posted())
        return posted[-1]

    return Call(Entry(LOCK, 4, REDUCE), REDUCE, 20, (turn,) * count), asked, posted


def test_turns_are_taken_in_order_with_slips_in_a_row() -> None:
    call, asked, posted = make(2)
    call.spin = True
    assert [call.take_turn(), call.take_turn()] == posted
    assert asked == [(20, (4, REDUCE), True), (21, (4, REDUCE), True)]
    call.give_up()
    assert [each.cancelled for each in posted] == [False, True]
    assert len(asked) == 2


def test_who_gives_up_cancels_the_turn_that_was_taken_and_takes_no_part_in_those_left() -> None:
    call, asked, posted = make(3)
    call.take_turn()
    call.give_up()
    assert posted[0].cancelled
    assert asked[1:] == [(21, GIVEN_UP, False), (22, GIVEN_UP, False)]


def test_a_call_without_turns_gives_up_nothing() -> None:
    call, asked, _ = make(0)
    call.give_up()
    assert asked == []
