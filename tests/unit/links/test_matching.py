"""Matching alone: no transport, no thread but for the lock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.errors import BufferMismatch, Cancelled, PeerLost, UsageError
from nexar.links.message import ANY
from nexar.wire.frame import Frame, Kind, Space
from tests.unit.links.scripted_origin import TAGGED, UNTAGGED, NoMemory, announce, arrive, make


def test_a_message_lands_in_the_buffer_of_a_receive_posted_before() -> None:
    matching, origin = make()
    into = bytearray(3)
    receive = matching.post(memoryview(into), source=1, space=TAGGED, tag=7)
    assert arrive(matching, origin, b"abc")
    assert receive.done
    assert bytes(into) == b"abc"


def test_a_message_that_came_before_its_receive_waits_for_it() -> None:
    matching, origin = make()
    assert not arrive(matching, origin, b"abc")
    receive = matching.post(None, source=1, space=TAGGED, tag=7)
    assert receive.done
    assert receive.into is not None
    assert bytes(receive.into) == b"abc"
    assert len(origin.credits) == 1


def test_other_tags_sources_and_spaces_are_left_alone() -> None:
    matching, origin = make()
    receives = [
        matching.post(None, source=1, space=TAGGED, tag=8),
        matching.post(None, source=2, space=TAGGED, tag=7),
        matching.post(None, source=1, space=UNTAGGED, tag=7),
    ]
    arrive(matching, origin, b"abc")
    assert not any(receive.done for receive in receives)


def test_order_is_kept_within_a_conversation() -> None:
    matching, origin = make()
    for number in range(5):
        arrive(matching, origin, bytes([number]))
    received = [matching.post(None, source=1, space=TAGGED, tag=7) for _ in range(5)]
    assert [bytes(receive.into or b"") for receive in received] == [bytes([n]) for n in range(5)]


def test_the_oldest_receive_takes_the_message_wildcard_or_not() -> None:
    matching, origin = make()
    wild = matching.post(None, source=ANY, space=TAGGED, tag=ANY)
    exact = matching.post(None, source=1, space=TAGGED, tag=7)
    arrive(matching, origin, b"a")
    assert wild.done
    assert not exact.done
    arrive(matching, origin, b"b")
    assert exact.done


def test_a_wildcard_takes_the_oldest_message() -> None:
    matching, origin = make()
    arrive(matching, origin, b"first", source=2, tag=9)
    arrive(matching, origin, b"second", source=1, tag=7)
    receive = matching.post(None, source=ANY, space=TAGGED, tag=ANY)
    assert bytes(receive.into or b"") == b"first"
    assert receive.frame is not None
    assert receive.frame.tag == 9


def test_a_wildcard_never_takes_a_collective() -> None:
    matching, origin = make()
    frame = Frame(kind=Kind.EAGER, space=int(Space.COLLECTIVE), sequence=1, step=0, length=1, body=1)
    with matching.lock:
        matching.arrive(origin, 1, frame, (), memoryview(b"x"))
    assert not matching.post(None, source=ANY, space=TAGGED, tag=ANY).done


def test_a_receive_of_another_size_raises_and_the_message_stays() -> None:
    matching, origin = make()
    small = matching.post(memoryview(bytearray(2)), source=1, space=TAGGED, tag=7)
    arrive(matching, origin, b"abc")
    with pytest.raises(BufferMismatch, match=r"2 bytes.*3 bytes"):
        small.result()
    assert matching.post(None, source=1, space=TAGGED, tag=7).done


def test_a_receive_of_another_dtype_raises_and_names_both() -> None:
    matching, origin = make()
    arrive(matching, origin, bytes(8), dtype=11)
    receive = matching.post(memoryview(bytearray(8)), source=1, space=TAGGED, tag=7, dtype=4)
    with pytest.raises(BufferMismatch, match=r"int32\[2\].*float32\[2\]"):
        receive.result()


def test_an_envelope_with_a_receive_flows_straight_into_its_buffer() -> None:
    matching, origin = make()
    into = bytearray(4)
    receive = matching.post(memoryview(into), source=1, space=TAGGED, tag=7)
    message = announce(matching, origin, 4, transfer=1)
    assert origin.granted == [message]
    origin.pour(matching, message, b"wxyz")
    assert receive.done
    assert bytes(into) == b"wxyz"


def test_an_unasked_envelope_is_granted_while_there_is_room_and_the_next_when_it_frees() -> None:
    matching, origin = make(early_bytes=10)
    first = announce(matching, origin, 8, transfer=1)
    second = announce(matching, origin, 8, transfer=2)
    assert origin.granted == [first]
    origin.pour(matching, first, b"12345678")
    assert bytes(matching.post(None, source=1, space=TAGGED, tag=7).into or b"") == b"12345678"
    assert origin.granted == [first, second]


def test_a_late_receive_takes_over_a_message_in_flight() -> None:
    matching, origin = make()
    message = announce(matching, origin, 4, transfer=1)
    into = bytearray(4)
    receive = matching.post(memoryview(into), source=1, space=TAGGED, tag=7)
    assert not receive.done
    origin.pour(matching, message, b"wxyz")
    assert receive.done
    assert bytes(into) == b"wxyz"


def test_a_claim_that_fits_no_memory_is_refused_to_the_receive_and_not_allocated() -> None:
    matching, origin = make()
    receive = matching.post(None, source=1, space=TAGGED, tag=7)
    announce(matching, origin, 1 << 60, transfer=1)
    with pytest.raises(MemoryError, match=str(1 << 60)):
        receive.result()
    assert not origin.granted


def test_cancelling_an_unmatched_receive_leaves_its_message_to_the_next() -> None:
    matching, origin = make()
    receive = matching.post(None, source=1, space=TAGGED, tag=7)
    receive.cancel()
    with pytest.raises(Cancelled):
        receive.result()
    assert not arrive(matching, origin, b"abc")
    assert matching.post(None, source=1, space=TAGGED, tag=7).done


def test_cancelling_a_receive_in_mid_flight_keeps_the_message_for_the_next() -> None:
    matching, origin = make()
    into = bytearray(4)
    receive = matching.post(memoryview(into), source=1, space=TAGGED, tag=7)
    message = announce(matching, origin, 4, transfer=1)
    receive.cancel()
    origin.pour(matching, message, b"wxyz")
    assert bytes(into) == bytes(4)
    assert bytes(matching.post(None, source=1, space=TAGGED, tag=7).into or b"") == b"wxyz"


def test_cancelling_in_mid_flight_keeps_the_message_although_the_budget_is_used_up() -> None:
    matching, origin = make(early_bytes=1)
    receive = matching.post(memoryview(bytearray(4)), source=1, space=TAGGED, tag=7)
    message = announce(matching, origin, 4, transfer=1)
    receive.cancel()
    assert origin.refused == []
    origin.pour(matching, message, b"wxyz")
    assert bytes(matching.post(None, source=1, space=TAGGED, tag=7).into or b"") == b"wxyz"
    assert matching._early.budget.used == 0


def test_cancelling_in_mid_flight_without_memory_tells_the_sender() -> None:
    matching, origin = make(pool=NoMemory())
    receive = matching.post(memoryview(bytearray(4)), source=1, space=TAGGED, tag=7)
    message = announce(matching, origin, 4, transfer=1)
    receive.cancel()
    assert origin.refused == [message]
    assert isinstance(receive.error, Cancelled)


def test_a_withdrawn_message_leaves_its_receive_waiting_in_its_old_place() -> None:
    matching, origin = make()
    first = matching.post(None, source=1, space=TAGGED, tag=7)
    second = matching.post(None, source=1, space=TAGGED, tag=7)
    message = announce(matching, origin, 4, transfer=1)
    with matching.lock:
        matching.withdraw(message)
    arrive(matching, origin, b"later")
    assert first.done
    assert not second.done


def test_losing_a_source_fails_its_receives_and_wildcards_but_keeps_whole_messages() -> None:
    matching, origin = make()
    arrive(matching, origin, b"whole", tag=1)
    mine = matching.post(None, source=1, space=TAGGED, tag=7)
    wild = matching.post(None, source=ANY, space=TAGGED, tag=7)
    other = matching.post(None, source=2, space=TAGGED, tag=7)
    with matching.lock:
        matching.lose(1, PeerLost(node=1, cause="killed"))
    for receive in (mine, wild):
        with pytest.raises(PeerLost, match="killed"):
            receive.result()
    assert not other.done
    assert matching.post(None, source=1, space=TAGGED, tag=1).done
    with pytest.raises(PeerLost):
        matching.post(None, source=1, space=TAGGED, tag=7)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.integers(0, 2), st.booleans()), max_size=40))
def test_each_message_is_received_once_and_in_order_whatever_is_posted_when(
    steps: list[tuple[bool, int, int, bool]],
) -> None:
    matching, origin = make()
    sent: dict[tuple[int, int], list[bytes]] = {}
    receives = []
    for number, (sends, source, tag, wild) in enumerate(steps):
        if sends:
            payload = number.to_bytes(2, "little")
            sent.setdefault((source, tag), []).append(payload)
            arrive(matching, origin, payload, source=source, tag=tag)
        else:
            receives.append(matching.post(None, source=ANY if wild else source, space=TAGGED, tag=ANY if wild else tag))
    got: dict[int, list[bytes]] = {}
    for receive in receives:
        if receive.done:
            data = bytes(receive.into or b"")
            owner = next(key for key, queue in sent.items() if data in queue)
            assert receive.key in ((owner[0], TAGGED, owner[1]), (ANY, TAGGED, ANY))
            got.setdefault(hash(owner), []).append(data)
    taken = [data for queue in got.values() for data in queue]
    assert len(taken) == len(set(taken))
    left = len(matching._waiting)
    assert len(taken) + left == sum(map(len, sent.values()))
    # Nobody waits for a message that is here.
    for receive in receives:
        if not receive.done:
            assert not any(receive.wants(key) for key, _ in matching._waiting.heads())


def test_closing_fails_every_receive_and_frees_every_early_message() -> None:
    matching, origin = make()
    arrive(matching, origin, b"unread", tag=1)
    receives = [
        matching.post(None, source=1, space=TAGGED, tag=7),
        matching.post(None, source=ANY, space=TAGGED, tag=ANY),
    ]
    assert receives[1].done
    with matching.lock:
        matching.close(UsageError("over"))
    with pytest.raises(UsageError, match="over"):
        receives[0].result()
    with pytest.raises(UsageError, match="over"):
        matching.post(None, source=1, space=TAGGED, tag=1)
