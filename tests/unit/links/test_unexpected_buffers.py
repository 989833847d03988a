from nexar.links.messages import MessageState
from tests.unit.links.scripted_origin import TAGGED, NoMemory, announce, make


def test_a_message_larger_than_the_budget_waits_for_its_receive_and_blocks_nobody() -> None:
    matching, origin = make(early_bytes=10)
    giant = announce(matching, origin, 100, transfer=1)
    small = announce(matching, origin, 4, transfer=2, tag=8)
    assert origin.granted == [small]
    into = bytearray(100)
    matching.post(memoryview(into), source=1, space=TAGGED, tag=7)
    assert origin.granted == [small, giant]


def test_those_that_wait_for_room_are_granted_in_order_of_arrival() -> None:
    matching, origin = make(early_bytes=10)
    first = announce(matching, origin, 10, transfer=1)
    second = announce(matching, origin, 8, transfer=2, tag=8)
    third = announce(matching, origin, 2, transfer=3, tag=9)
    assert origin.granted == [first]
    origin.pour(matching, first, bytes(10))
    matching.post(None, source=1, space=TAGGED, tag=7)
    assert origin.granted == [first, second, third]


def test_a_message_taken_while_it_waited_for_room_is_forgotten() -> None:
    matching, origin = make(early_bytes=10)
    first = announce(matching, origin, 10, transfer=1)
    second = announce(matching, origin, 8, transfer=2, tag=8)
    matching.post(memoryview(bytearray(8)), source=1, space=TAGGED, tag=8)
    assert second.state is MessageState.DIRECT
    origin.pour(matching, first, bytes(10))
    matching.post(None, source=1, space=TAGGED, tag=7)
    assert origin.granted == [first, second]


def test_a_message_for_which_there_is_no_memory_stays_with_its_sender_until_it_is_received() -> None:
    matching, origin = make(pool=NoMemory())
    message = announce(matching, origin, 4, transfer=1)
    assert message.state is MessageState.ENVELOPE
    assert origin.granted == []
    assert matching._unexpected_buffers.budget.used == 0
    into = bytearray(4)
    matching.post(memoryview(into), source=1, space=TAGGED, tag=7)
    origin.pour(matching, message, b"data")
    assert into == b"data"
