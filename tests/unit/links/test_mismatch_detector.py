"""The mismatch detector alone, whose frames are made here; then with the messages that it drops."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.errors import Cancelled
from nexar.links.mismatch_detector import _UNEXPECTED, REMEMBERED, CallFacts, MismatchDetector, differ
from nexar.links.sending import MessageHeader
from nexar.wire.frame import Frame, FrameKind, Space
from nexar_tools.bare_nodes import LinkedNode
from tests.unit.links.conftest import MakePair
from tests.unit.links.scripted_origin import make

ALL_REDUCE: CallFacts = (2, 11, 8, 0, 1, 15)
BROADCAST: CallFacts = (3, 11, 8, 1, 0, 17)


class Book:
    """A mismatch detector, and what it said."""

    def __init__(self) -> None:
        self.discarded: list[tuple[int, str]] = []
        self.differences: list[tuple[int, int, CallFacts, CallFacts]] = []
        self.mismatch_detector = MismatchDetector(lambda sequence, reason: self.discarded.append((sequence, reason)))
        self.mismatch_detector.on_mismatch = lambda *facts: self.differences.append(facts)

    def saw(self, source: int, sequence: int, call: CallFacts, step: int = 0) -> bool:
        operation, dtype, count, root, reduce_op, way = call
        return self.mismatch_detector.check_frame(
            source,
            Frame(
                kind=int(FrameKind.EAGER), space=int(Space.COLLECTIVE), sequence=sequence, step=step,
                operation=operation, dtype=dtype, count=count, root=root, reduce_op=reduce_op, way=way,
            ),
        )  # fmt: skip


def test_frames_of_the_same_call_are_let_in_and_nothing_is_said() -> None:
    book = Book()
    book.mismatch_detector.begin(0, ALL_REDUCE)
    assert book.saw(7, 0, ALL_REDUCE)
    assert book.saw(7, 0, ALL_REDUCE, step=1)
    assert not book.differences


def test_a_frame_of_another_call_is_a_disagreement_reported_once_for_each_source() -> None:
    book = Book()
    book.mismatch_detector.begin(0, ALL_REDUCE)
    for source in (7, 8, 7):
        assert book.saw(source, 0, BROADCAST)
    assert book.differences == [(0, 7, BROADCAST, ALL_REDUCE), (0, 8, BROADCAST, ALL_REDUCE)]


def test_the_operation_of_a_sequence_is_known_from_the_local_call_or_from_an_announced_one() -> None:
    book = Book()
    assert book.mismatch_detector.operation_of(0) == 0
    book.saw(7, 0, BROADCAST)
    assert book.mismatch_detector.operation_of(0) == BROADCAST[0]
    book.mismatch_detector.begin(0, ALL_REDUCE)
    assert book.mismatch_detector.operation_of(0) == ALL_REDUCE[0]
    book.mismatch_detector.end(0)
    assert book.mismatch_detector.operation_of(0) == ALL_REDUCE[0]


def test_a_frame_that_comes_first_is_compared_when_the_call_is_made() -> None:
    book = Book()
    assert book.saw(7, 0, BROADCAST)
    assert book.saw(7, 0, BROADCAST, step=1)
    assert book.saw(8, 0, ALL_REDUCE)
    assert book.saw(7, 1, ALL_REDUCE)
    assert not book.differences
    assert set(book.mismatch_detector.begin(0, ALL_REDUCE)) == {7, 8}
    assert book.differences == [(0, 7, BROADCAST, ALL_REDUCE)]
    assert set(book.mismatch_detector.begin(1, ALL_REDUCE)) == {7}


def test_a_frame_of_a_call_that_is_over_is_compared_and_dropped() -> None:
    book = Book()
    book.mismatch_detector.begin(0, ALL_REDUCE)
    book.mismatch_detector.end(0)
    assert not book.saw(7, 0, ALL_REDUCE)
    assert not book.differences
    assert not book.saw(7, 0, BROADCAST)
    assert book.differences == [(0, 7, BROADCAST, ALL_REDUCE)]
    assert book.mismatch_detector.dropped == 2


def test_calls_that_are_long_over_are_not_remembered_but_their_frames_are_dropped_still() -> None:
    book = Book()
    for sequence in range(REMEMBERED + 1):
        book.mismatch_detector.begin(sequence, ALL_REDUCE)
        book.mismatch_detector.end(sequence)
    assert not book.saw(7, 0, BROADCAST)
    assert not book.differences
    assert not book.saw(7, 1, BROADCAST)
    assert book.differences


def test_giving_up_discards_what_waits_and_drops_what_comes() -> None:
    book = Book()
    book.mismatch_detector.begin(0, ALL_REDUCE)
    book.mismatch_detector.begin(1, ALL_REDUCE)
    book.mismatch_detector.give_up(0, "tired")
    assert book.discarded == [(0, "tired")]
    assert not book.saw(7, 0, ALL_REDUCE)
    assert book.saw(7, 1, ALL_REDUCE)


def test_what_is_remembered_of_calls_to_come_is_bounded() -> None:
    book = Book()
    for sequence in range(_UNEXPECTED + 5):
        assert book.saw(7, sequence, BROADCAST)
    assert sum(map(len, book.mismatch_detector._unexpected.values())) == _UNEXPECTED
    for sequence in range(_UNEXPECTED + 5):
        book.mismatch_detector.begin(sequence, ALL_REDUCE)
        book.mismatch_detector.end(sequence)
    assert len(book.differences) == _UNEXPECTED
    assert not book.mismatch_detector._unexpected
    assert not book.mismatch_detector._early_frames


def test_frames_that_state_no_call_are_let_in_and_not_remembered() -> None:
    book = Book()
    assert book.saw(7, (1 << 64) - 1, (0, 0, 0, 0, 0, 0))
    assert not book.mismatch_detector.is_announced((1 << 64) - 1)


def test_arrivals_are_the_times_of_first_frames() -> None:
    book = Book()
    book.saw(7, 0, ALL_REDUCE)
    arrivals = book.mismatch_detector.begin(0, ALL_REDUCE)
    book.saw(8, 0, ALL_REDUCE)
    first = dict(arrivals)
    book.saw(7, 0, ALL_REDUCE, step=1)
    assert arrivals == first
    assert list(arrivals) == [7, 8]
    assert arrivals[7] <= arrivals[8] == book.mismatch_detector.heard[8]


@pytest.mark.parametrize(
    ("other", "different"),
    [
        (ALL_REDUCE, False),
        (BROADCAST, True),
        ((2, 11, 9, 0, 1, 15), True),
        ((2, 12, 8, 0, 1, 15), True),
        ((2, 11, 8, 0, 2, 15), True),
        ((2, 0, 0, 0, 1, 15), False),
        ((2, 0, 0, 0, 2, 15), True),
        ((2, 11, 8, 0, 1, 0), False),
        ((2, 11, 8, 0, 1, 12), True),
        ((2, 0, 0, 0, 1, 12), True),
        ((1, 0, 0, 0, 0, 0), True),
        ((0, 11, 9, 3, 4, 5), False),
    ],
)
def test_calls_are_compared_so_far_as_both_are_stated(other: CallFacts, different: bool) -> None:
    assert differ(ALL_REDUCE, other) is different
    assert differ(other, ALL_REDUCE) is different


calls = st.tuples(*[st.integers(0, 2)] * 6)


@given(calls, calls)
def test_nobody_differs_from_itself_and_both_sides_see_the_same(one: CallFacts, other: CallFacts) -> None:
    assert not differ(one, one)
    assert differ(one, other) == differ(other, one)


# -- with a matching, and links -------------------------------------------------------------------------


def collective(kind: FrameKind, sequence: int, length: int, transfer: int = 0) -> Frame:
    body = length if kind is FrameKind.EAGER else 0
    return Frame(
        kind=int(kind), space=int(Space.COLLECTIVE), sequence=sequence, length=length, body=body, transfer=transfer
    )


def test_early_messages_of_a_call_that_was_given_up_go_and_their_senders_are_notified() -> None:
    matching, origin = make(early_bytes=1 << 10)
    with matching.lock:
        matching.arrive(origin, 1, collective(FrameKind.EAGER, 0, 3), (), memoryview(b"abc"))
        matching.arrive(origin, 1, collective(FrameKind.EAGER, 1, 3), (), memoryview(b"def"))
        granted = matching.announce(origin, 1, collective(FrameKind.ENVELOPE, 0, 1 << 10, transfer=1), ())
        announced = matching.announce(origin, 1, collective(FrameKind.ENVELOPE, 0, 1 << 10, transfer=2), ())
        matching.mismatch_detector.begin(0, ALL_REDUCE)
        matching.mismatch_detector.give_up(0, "tired")
    assert origin.refused == [granted, announced]
    assert len(origin.credits) == 3
    assert matching._unexpected_buffers.budget.used == 0
    assert [message.frame.sequence for message in matching._waiting.everything()] == [1]


ABOUT = MessageHeader(space=Space.COLLECTIVE, sequence=0, operation=2, dtype=11, elements=8, reduce_op=1)


def leave(node: LinkedNode) -> None:
    with node.router.lock:
        node.matching.mismatch_detector.begin(0, ALL_REDUCE)
        node.matching.mismatch_detector.give_up(0, "tired")
    node.router.deferred_io.flush()


@pytest.mark.parametrize("left_first", [True, False])
def test_who_sends_to_a_call_that_was_given_up_does_not_wait_for_ever(make_pair: MakePair, *, left_first: bool) -> None:
    pair = make_pair(early_bytes=1 << 16)
    if left_first:
        leave(pair.right)
    sent = pair.to_right.post_send(0, memoryview(bytes(1 << 20)), about=ABOUT)
    if not left_first:
        pair.to_right.post_send(0, memoryview(b""), about=MessageHeader(space=Space.TAGGED, tag=1))
        pair.right.wait(pair.right.matching.post(None, source=1, space=Space.TAGGED, tag=1))  # so the envelope is here
        leave(pair.right)
    with pytest.raises(Cancelled):
        pair.left.wait(sent)


def test_frames_of_a_call_that_is_over_give_their_credit_back_and_are_counted(make_pair: MakePair) -> None:
    pair = make_pair(credit_bytes=1 << 18, eager_limit_bytes=1 << 12)
    leave(pair.right)
    for _ in range(200):  # far more than the credit
        with suppress(Cancelled):  # one that found no credit went as an envelope
            pair.left.wait(pair.to_right.post_send(0, memoryview(bytes(1 << 12)), about=ABOUT))
    pair.to_right.post_send(0, memoryview(b""), about=MessageHeader(space=Space.TAGGED, tag=1))
    pair.right.wait(pair.right.matching.post(None, source=1, space=Space.TAGGED, tag=1))
    assert pair.to_left.stats()["frames_dropped"] == 200
    assert not pair.right.matching._waiting.everything()
