"""The ledger alone: frames are made here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.links.ledger import _EARLY, REMEMBERED, Call, Ledger, differ
from nexar.wire.frame import Frame, Kind, Space

ALL_REDUCE: Call = (2, 11, 8, 0, 1)
BROADCAST: Call = (3, 11, 8, 1, 0)


class Book:
    """A ledger, and what it said."""

    def __init__(self) -> None:
        self.discarded: list[tuple[int, str]] = []
        self.differences: list[tuple[int, int, Call, Call]] = []
        self.ledger = Ledger(lambda sequence, reason: self.discarded.append((sequence, reason)))
        self.ledger.on_disagreement = lambda *facts: self.differences.append(facts)

    def saw(self, source: int, sequence: int, call: Call, step: int = 0) -> bool:
        operation, dtype, count, root, reduce_op = call
        return self.ledger.saw(
            source,
            Frame(
                kind=int(Kind.EAGER), space=int(Space.COLLECTIVE), sequence=sequence, step=step, operation=operation,
                dtype=dtype, count=count, root=root, reduce_op=reduce_op,
            ),
        )  # fmt: skip


def test_frames_of_the_same_call_are_let_in_and_nothing_is_said() -> None:
    book = Book()
    book.ledger.begin(0, ALL_REDUCE)
    assert book.saw(7, 0, ALL_REDUCE)
    assert book.saw(7, 0, ALL_REDUCE, step=1)
    assert not book.differences


def test_a_frame_of_another_call_is_a_disagreement_told_once_for_each_source() -> None:
    book = Book()
    book.ledger.begin(0, ALL_REDUCE)
    for source in (7, 8, 7):
        assert book.saw(source, 0, BROADCAST)
    assert book.differences == [(0, 7, BROADCAST, ALL_REDUCE), (0, 8, BROADCAST, ALL_REDUCE)]


def test_a_frame_that_comes_first_is_compared_when_the_call_is_made() -> None:
    book = Book()
    assert book.saw(7, 0, BROADCAST)
    assert book.saw(7, 0, BROADCAST, step=1)
    assert book.saw(8, 0, ALL_REDUCE)
    assert book.saw(7, 1, ALL_REDUCE)
    assert not book.differences
    assert set(book.ledger.begin(0, ALL_REDUCE)) == {7, 8}
    assert book.differences == [(0, 7, BROADCAST, ALL_REDUCE)]
    assert set(book.ledger.begin(1, ALL_REDUCE)) == {7}


def test_a_frame_of_a_call_that_is_over_is_compared_and_dropped() -> None:
    book = Book()
    book.ledger.begin(0, ALL_REDUCE)
    book.ledger.end(0)
    assert not book.saw(7, 0, ALL_REDUCE)
    assert not book.differences
    assert not book.saw(7, 0, BROADCAST)
    assert book.differences == [(0, 7, BROADCAST, ALL_REDUCE)]
    assert book.ledger.dropped == 2


def test_calls_that_are_long_over_are_not_remembered_but_their_frames_are_dropped_still() -> None:
    book = Book()
    for sequence in range(REMEMBERED + 1):
        book.ledger.begin(sequence, ALL_REDUCE)
        book.ledger.end(sequence)
    assert not book.saw(7, 0, BROADCAST)
    assert not book.differences
    assert not book.saw(7, 1, BROADCAST)
    assert book.differences


def test_giving_up_discards_what_waits_and_drops_what_comes() -> None:
    book = Book()
    book.ledger.begin(0, ALL_REDUCE)
    book.ledger.begin(1, ALL_REDUCE)
    book.ledger.give_up(0, "tired")
    assert book.discarded == [(0, "tired")]
    assert not book.saw(7, 0, ALL_REDUCE)
    assert book.saw(7, 1, ALL_REDUCE)


def test_what_is_remembered_of_calls_to_come_is_bounded() -> None:
    book = Book()
    for sequence in range(_EARLY + 5):
        assert book.saw(7, sequence, BROADCAST)
    assert sum(map(len, book.ledger._early.values())) == _EARLY
    for sequence in range(_EARLY + 5):
        book.ledger.begin(sequence, ALL_REDUCE)
        book.ledger.end(sequence)
    assert len(book.differences) == _EARLY
    assert not book.ledger._early
    assert not book.ledger._early_frames


def test_arrivals_are_the_times_of_first_frames() -> None:
    book = Book()
    book.saw(7, 0, ALL_REDUCE)
    arrivals = book.ledger.begin(0, ALL_REDUCE)
    book.saw(8, 0, ALL_REDUCE)
    first = dict(arrivals)
    book.saw(7, 0, ALL_REDUCE, step=1)
    assert arrivals == first
    assert list(arrivals) == [7, 8]
    assert arrivals[7] <= arrivals[8] == book.ledger.heard[8]


@pytest.mark.parametrize(
    ("other", "different"),
    [
        (ALL_REDUCE, False),
        (BROADCAST, True),
        ((2, 11, 9, 0, 1), True),
        ((2, 12, 8, 0, 1), True),
        ((2, 11, 8, 0, 2), True),
        ((2, 0, 0, 0, 1), False),
        ((2, 0, 0, 0, 2), True),
        ((1, 0, 0, 0, 0), True),
        ((0, 11, 9, 3, 4), False),
    ],
)
def test_calls_are_compared_so_far_as_both_are_stated(other: Call, different: bool) -> None:
    assert differ(ALL_REDUCE, other) is different
    assert differ(other, ALL_REDUCE) is different


calls = st.tuples(*[st.integers(0, 2)] * 5)


@given(calls, calls)
def test_nobody_differs_from_itself_and_both_sides_see_the_same(one: Call, other: Call) -> None:
    assert not differ(one, one)
    assert differ(one, other) == differ(other, one)
