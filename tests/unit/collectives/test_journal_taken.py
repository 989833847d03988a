"""Calls that take a number and mostly need no more, beside ranks that make the same call the usual way."""

from __future__ import annotations

import time

import pytest

from nexar.errors import Cancelled, CollectiveMismatch, CollectiveTimeout
from nexar.wire.messages import Disagreed
from tests.unit.collectives.test_journal import ALL_REDUCE, BROADCAST, LONGER, late
from tests.unit.collectives.told_world import World


def test_a_difference_that_was_seen_before_a_call_is_adopted_is_what_it_raises_and_tells() -> None:
    world = World(2)
    journal = world[0].journal
    sequence = journal.take()
    assert sequence is not None
    journal.disagree(sequence, ALL_REDUCE, 1, LONGER)
    entry = journal.adopt(sequence, ALL_REDUCE, time.monotonic())
    error = journal.end(entry, Cancelled(operation="all_reduce", rank=1))
    assert isinstance(error, CollectiveMismatch)
    assert (error.ranks, error.sequence) == ([1], sequence)
    assert [type(message) for _, _, message in world.said] == [Disagreed]


def test_a_call_that_another_rank_has_spoken_of_is_not_taken() -> None:
    world = World(2)
    mine, journal = world[0].journal, world[1].journal
    mine.patience.declare(mine.begin(BROADCAST))
    world.deliver()
    assert journal.take() is None
    assert isinstance(journal.begin(ALL_REDUCE).error, CollectiveMismatch)


def test_a_call_that_was_given_up_is_not_taken_but_the_next_one_is() -> None:
    world = World(2)
    mine, journal = world[0].journal, world[1].journal
    mine.end(mine.begin(ALL_REDUCE), Cancelled())
    world.deliver()
    assert journal.take() is None
    journal.end(journal.begin(ALL_REDUCE), Cancelled())
    assert journal.take() == 1


def test_what_is_said_of_a_call_that_was_taken_is_not_kept() -> None:
    world = World(2)
    mine, journal = world[0].journal, world[1].journal
    for _ in range(3):
        entry, sequence = mine.begin(ALL_REDUCE), journal.take()
        assert sequence is not None
        mine.patience.declare(entry)
        world.deliver()
        journal.note(sequence, ALL_REDUCE, 32, time.monotonic())
        mine.patience.declare(entry)
        world.deliver()
        mine.end(entry)
        assert not world[1].matching.ledger.is_told_of(sequence)
    assert journal.take() == 3


def test_who_has_not_come_is_named_with_what_it_did_last_also_when_that_was_quick() -> None:
    world = World(2)
    for each in world.ranks:
        sequence = each.journal.take()
        assert sequence is not None
        each.journal.note(sequence, ALL_REDUCE, 32, time.monotonic())
    entry = world[0].journal.begin(BROADCAST)
    entry.moved_at -= 5.0
    with pytest.raises(CollectiveTimeout) as raised:
        world[0].journal.patience.extend(entry, late(), 5.0)
    assert [(peer.rank, peer.last_operation) for peer in raised.value.waiting_for] == [(1, "all_reduce #0")]
