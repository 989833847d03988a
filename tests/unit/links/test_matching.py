"""Matching alone: no transport, no thread but for the lock.

What comes back to matching: messages of receives that gave up, receives of messages that were taken back.
"""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.errors import BufferMismatch, Cancelled, PeerLost, UsageError
from nexar.links.matching import Matching
from nexar.links.messages import ANY, MessageState, Receive
from nexar.wire.frame import Frame, FrameKind, Space
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
    frame = Frame(kind=FrameKind.EAGER, space=int(Space.COLLECTIVE), sequence=1, step=0, length=1, body=1)
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
    assert matching._unexpected_buffers.budget.used == 0


def test_cancelling_in_mid_flight_without_memory_notifies_the_sender() -> None:
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


def post(matching: Matching, size: int | None = None, *, source: int = 1, tag: int = 7) -> Receive:
    into = None if size is None else memoryview(bytearray(size))
    return matching.post(into, source=source, space=TAGGED, tag=tag, retractable=True)


def content(receive: Receive) -> bytes:
    assert receive.done
    assert receive.error is None
    return bytes(receive.into or b"")


def test_credit_is_given_back_once_however_often_a_receive_gives_up() -> None:
    matching, origin = make()
    message = announce(matching, origin, 4, transfer=1)
    for _ in range(3):
        receive = post(matching, 4)
        receive.cancel()
    assert origin.credits == {message: 1}
    last = post(matching, 4)
    origin.pour(matching, message, b"data")
    assert content(last) == b"data"
    assert origin.credits == {message: 1}


def test_the_message_of_a_cancelled_receive_goes_to_the_next_one_that_waits() -> None:
    matching, origin = make()
    first, second = post(matching, 4), post(matching, 4)
    message = announce(matching, origin, 4, transfer=1)
    first.cancel()
    origin.pour(matching, message, b"data")
    assert content(second) == b"data"


def test_a_receive_whose_message_was_withdrawn_takes_one_that_came_meanwhile() -> None:
    matching, origin = make()
    receive = post(matching, 4)
    withdrawn = announce(matching, origin, 4, transfer=1)
    arrive(matching, origin, b"next")
    with matching.lock:
        matching.withdraw(withdrawn)
    matching._deferred_io.flush()
    assert content(receive) == b"next"


def test_a_message_that_does_not_fit_the_oldest_receive_goes_to_the_next_it_fits() -> None:
    matching, origin = make()
    small, right = post(matching, 2), post(matching, 3)
    arrive(matching, origin, b"abc")
    with pytest.raises(BufferMismatch):
        small.result()
    assert content(right) == b"abc"


def test_messages_of_receives_that_gave_up_together_keep_their_order() -> None:
    matching, origin = make()
    receives = [post(matching, 1), post(matching, 1)]
    messages = [announce(matching, origin, 1, transfer=1), announce(matching, origin, 1, transfer=2)]
    for receive in receives:
        receive.cancel()
    for message, data in zip(messages, (b"1", b"2"), strict=True):
        origin.pour(matching, message, data)
    assert [content(post(matching, 1)) for _ in range(2)] == [b"1", b"2"]


def test_a_wildcard_takes_the_older_of_two_messages_that_came_back() -> None:
    matching, origin = make()
    first, second = post(matching, 1, tag=1), post(matching, 1, tag=2)
    messages = [announce(matching, origin, 1, transfer=1, tag=1), announce(matching, origin, 1, transfer=2, tag=2)]
    second.cancel()
    first.cancel()
    for message, data in zip(messages, (b"1", b"2"), strict=True):
        origin.pour(matching, message, data)
    assert content(matching.post(None, source=ANY, space=TAGGED, tag=ANY)) == b"1"


def test_half_a_payload_never_passes_for_a_whole_one_when_its_link_is_lost_during_the_move() -> None:
    matching, origin = make()
    message = announce(matching, origin, 4, transfer=1)
    lost = PeerLost(node=1, cause="cut")

    def lose() -> None:
        origin.places[1] = None  # the carrier let go
        with matching.lock:
            matching.abandon(message, lost)
            matching.lose(1, lost)

    origin.on_redirect = lose
    receive = post(matching, 4)
    with pytest.raises(PeerLost, match="cut"):
        receive.result()


def test_a_message_withdrawn_during_the_move_leaves_its_receive_waiting() -> None:
    matching, origin = make()
    message = announce(matching, origin, 4, transfer=1)

    def withdraw() -> None:
        with matching.lock:
            matching.withdraw(message)

    origin.on_redirect = withdraw
    receive = post(matching, 4)
    assert not receive.done
    arrive(matching, origin, b"next")
    assert content(receive) == b"next"


def test_a_payload_that_lands_during_the_move_is_received() -> None:
    matching, origin = make()
    message = announce(matching, origin, 4, transfer=1)
    origin.on_redirect = lambda: origin.pour(matching, message, b"data")
    assert content(post(matching, 4)) == b"data"


def test_a_receive_reposted_after_its_source_was_lost_raises_instead_of_waiting() -> None:
    matching, origin = make()
    receive = post(matching, 4)
    message = announce(matching, origin, 4, transfer=1)
    with matching.lock:
        matching.lose(1, PeerLost(node=1, cause="cut"))
        matching.withdraw(message)
    with pytest.raises(PeerLost, match="cut"):
        receive.result()


def test_cancelling_a_receive_that_is_being_moved_into_waits_for_the_move() -> None:
    matching, origin = make()
    announce(matching, origin, 4, transfer=1)
    moving, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        moving.set()
        assert go_on.wait(10)

    origin.on_redirect = pause
    posted: list[Receive] = []
    poster = threading.Thread(target=lambda: posted.append(post(matching, 4)))
    poster.start()
    assert moving.wait(10)
    receive = next(m.receive for m in [origin.granted[0]] if m.receive is not None)
    canceller = threading.Thread(target=receive.cancel)
    canceller.start()
    while origin.granted[0].settled is None:
        assert canceller.is_alive()
    go_on.set()
    poster.join(10)
    canceller.join(10)
    assert isinstance(receive.error, Cancelled)
    assert origin.granted[0].state is MessageState.BUFFERING


def test_nothing_keeps_a_finished_message_or_its_memory() -> None:
    matching, origin = make(early_bytes=8)
    for transfer in range(5):
        receive = post(matching, 100, tag=transfer)
        message = announce(matching, origin, 100, transfer=transfer, tag=transfer)
        origin.pour(matching, message, bytes(100))
        assert receive.done
        assert message.data is None
        assert message.receive is None
    assert not matching._unexpected_buffers._queue
    assert matching._unexpected_buffers.budget.used == 0


@pytest.mark.parametrize("end", ["abandon", "withdraw"])
def test_nothing_lands_any_more_in_a_receive_whose_message_ended_while_it_was_moved(end: str) -> None:
    matching, origin = make()
    message = announce(matching, origin, 4, transfer=1)

    def ends() -> None:
        with matching.lock:
            if end == "abandon":
                matching.abandon(message, Cancelled(operation="all of it"))
            else:
                matching.withdraw(message)

    origin.on_redirect = ends
    receive = post(matching, 4)
    assert receive.done == (end == "abandon")
    assert origin.places == {1: None}


# -- receives that are undone ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 4])
def test_a_receive_that_is_undone_after_its_message_came_gives_it_to_the_next(size: int | None) -> None:
    matching, origin = make()
    receive = post(matching, size)
    arrive(matching, origin, b"data")
    receive.undo()
    if size is not None and receive.into is not None:
        receive.into[:] = b"mine"  # its buffer is the caller's again
    assert isinstance(receive.error, Cancelled)
    assert content(post(matching, 4)) == b"data"
    assert matching._unexpected_buffers.budget.used == 0


def test_a_message_that_is_given_back_comes_before_those_that_arrived_after_it() -> None:
    matching, origin = make()
    receive = post(matching, 1)
    for data in (b"1", b"2", b"3"):
        arrive(matching, origin, data)
    receive.undo()
    assert [content(post(matching, 1)) for _ in range(3)] == [b"1", b"2", b"3"]


@pytest.mark.parametrize("forward", [True, False])
def test_messages_that_are_given_back_together_keep_their_order(forward: bool) -> None:
    matching, origin = make()
    receives = [post(matching, None, tag=ANY), post(matching, 1), post(matching, 1)]
    for data in (b"1", b"2", b"3"):
        arrive(matching, origin, data)
    for receive in receives if forward else reversed(receives):
        receive.undo()
    assert [content(post(matching, 1)) for _ in range(3)] == [b"1", b"2", b"3"]


def test_a_message_that_is_given_back_goes_to_a_receive_that_waits_for_it() -> None:
    matching, origin = make()
    first, second = post(matching, 4), post(matching, 4)
    arrive(matching, origin, b"data")
    first.undo()
    assert content(second) == b"data"


def test_a_large_message_that_had_landed_is_given_back_whole() -> None:
    matching, origin = make(early_bytes=1)
    receive = post(matching, 4)
    message = announce(matching, origin, 4, transfer=1)
    origin.pour(matching, message, b"data")
    receive.undo()
    assert origin.refused == []
    assert content(post(matching, 4)) == b"data"
    assert matching._unexpected_buffers.budget.used == 0


def test_undoing_twice_gives_back_once() -> None:
    matching, origin = make()
    receive = post(matching, 4)
    arrive(matching, origin, b"data")
    receive.undo()
    receive.undo()
    assert content(post(matching, 4)) == b"data"
    assert not post(matching, 4).done


def test_what_is_given_back_to_a_communicator_that_is_closed_is_gone() -> None:
    matching, origin = make()
    receive = post(matching, 4)
    arrive(matching, origin, b"data")
    with matching.lock:
        matching.close(Cancelled(operation="all of it"))
    receive.undo()
    assert len(matching._waiting) == 0
    assert matching._unexpected_buffers.budget.used == 0


def test_a_receive_is_retracted_unless_a_later_message_of_its_conversation_was_taken() -> None:
    matching, origin = make()
    first = post(matching, 1)
    arrive(matching, origin, b"1")
    other = post(matching, 1, tag=8)
    arrive(matching, origin, b"x", tag=8)
    second = post(matching, 1)
    arrive(matching, origin, b"2")
    assert not first.retract()
    assert content(first) == b"1"
    assert second.retract()
    assert other.retract()
    assert content(post(matching, 1)) == b"2"


def test_a_receive_whose_message_flows_is_not_retracted_after_a_later_one_was_taken() -> None:
    matching, origin = make()
    first, second = post(matching, 4), post(matching, 1)
    message = announce(matching, origin, 4, transfer=1)
    arrive(matching, origin, b"2")
    assert second.done
    assert not first.retract()
    origin.pour(matching, message, b"data")
    assert content(first) == b"data"


def test_a_message_that_comes_while_another_is_moved_out_does_not_overtake_it() -> None:
    matching, origin = make()
    first, second = post(matching, 4), post(matching, 4)
    message = announce(matching, origin, 4, transfer=1)

    def come() -> None:
        arrive(matching, origin, b"next")

    origin.on_redirect = come
    assert first.retract()
    origin.pour(matching, message, b"data")
    assert content(second) == b"data"
    assert content(post(matching, 4)) == b"next"


def test_a_receive_stays_overtaken_however_many_conversations_follow() -> None:
    matching, origin = make()
    first, second = post(matching, 1), post(matching, 1)
    for data in (b"1", b"2"):
        arrive(matching, origin, data)
    for tag in range(10_000):
        post(matching, 1, tag=1000 + tag)
        arrive(matching, origin, b"x", tag=1000 + tag)
    assert not first.retract()
    assert content(first) == b"1"
    assert second.retract()
    assert content(post(matching, 1)) == b"2"


def test_a_receive_that_is_not_retractable_overtakes_one_that_is() -> None:
    matching, origin = make()
    first = post(matching, 1)
    arrive(matching, origin, b"1")
    for data in (b"2", b"3"):
        matching.post(None, source=1, space=TAGGED, tag=7)
        arrive(matching, origin, data)
    assert not first.retract()


def test_a_message_that_a_cancelled_receive_leaves_to_the_next_can_be_overtaken_there() -> None:
    matching, origin = make()
    first, second, third = post(matching, 4), post(matching, 4), post(matching, 1)
    message = announce(matching, origin, 4, transfer=1)
    assert first.retract()
    arrive(matching, origin, b"3")
    assert third.done
    assert not second.retract()
    origin.pour(matching, message, b"data")
    assert content(second) == b"data"


def test_a_conversation_is_forgotten_with_its_last_receive() -> None:
    matching, origin = make()
    kept = post(matching, 1)
    arrive(matching, origin, b"1")
    for tag in range(1000):
        post(matching, 1, tag=1000 + tag)
        arrive(matching, origin, b"x", tag=1000 + tag)
    assert list(matching._newest_taken) == [kept.key]
    del kept
    matching.post(None, source=1, space=TAGGED, tag=7)
    arrive(matching, origin, b"2")
    assert not matching._newest_taken
    assert not matching._tracks_taken
