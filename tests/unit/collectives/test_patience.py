"""Calls that last, on several ranks without a transport."""

from __future__ import annotations

import time

import pytest

from nexar.collectives.entry import Entry
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.errors import CollectiveTimeout, OperationTimeout, PeerLost
from nexar.types import AwaitedPeer
from nexar.wire.messages import Report
from tests.unit.collectives.told_world import NODES, World

ALL_REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 8, 0, 1)


def late(waiting_for: list[AwaitedPeer] | str = "") -> OperationTimeout:
    return OperationTimeout(operation="a receive", waiting_for=waiting_for, timeout=5.0)


def begin_all(world: World) -> list[Entry]:
    return [each.journal.begin(ALL_REDUCE) for each in world.ranks]


def test_who_has_not_come_is_named_with_what_it_did_last() -> None:
    world = World(3)
    for rank, entry in enumerate(begin_all(world)):
        world[rank].journal.end(entry)
    entries = [world[rank].journal.begin(ALL_REDUCE) for rank in (0, 1)]
    for entry in entries:
        entry.moved_at -= 5.0
    with pytest.raises(CollectiveTimeout) as raised:
        world[0].journal.patience.extend(entries[0], late(), 5.0)
    assert raised.value.sequence == 1
    assert [(peer.rank, peer.node, peer.missing, peer.last_operation) for peer in raised.value.waiting_for] == [
        (2, NODES + 2, "all_reduce #1", "all_reduce #0")
    ]


def test_who_does_not_answer_is_named() -> None:
    world = World(3)
    entries = begin_all(world)
    for entry in entries:
        entry.moved_at -= 5.0
    world[0].hears(2, 0, ALL_REDUCE)
    world.deaf.add(2)
    with pytest.raises(CollectiveTimeout, match=r"rank 2 .*missing all_reduce #0 and any answer, last heard"):
        world[0].journal.patience.extend(entries[0], late(), 5.0)


def test_a_step_of_another_rank_puts_the_deadline_off() -> None:
    world = World(3)
    entries = begin_all(world)
    entries[0].moved_at -= 30.0
    entries[2].moved_at -= 30.0
    entries[1].moved()
    until = world[0].journal.patience.extend(entries[0], late(), 5.0)
    assert time.monotonic() < until <= time.monotonic() + 5.0


@pytest.mark.parametrize("moving", [0, 1], ids=["here", "elsewhere"])
def test_a_transfer_that_is_slow_puts_the_deadline_off_although_no_step_is_done(moving: int) -> None:
    world = World(3)
    entries = begin_all(world)
    for each in entries:
        each.moved_at -= 30.0
        each.carried = 0.0  # when it had lasted for a moment
    world[moving].carried = 1e6
    until = world[0].journal.patience.extend(entries[0], late(), 5.0)
    assert time.monotonic() < until <= time.monotonic() + 5.0
    entries[moving].moved_at -= 30.0
    with pytest.raises(CollectiveTimeout):  # nothing more has come since
        world[0].journal.patience.extend(entries[0], late(), 5.0)


def test_whoever_knows_better_ends_the_inquiry() -> None:
    world = World(2)
    entries = begin_all(world)
    entries[0].moved_at -= 5.0
    world[1].journal.end(entries[1], PeerLost(rank=1, cause="x"))
    with pytest.raises(PeerLost):
        world[0].journal.patience.extend(entries[0], late(), 5.0)


def test_with_nobody_to_blame_those_that_are_waited_for_are_named() -> None:
    world = World(2, pairs=[])
    entry = world[0].journal.begin(ALL_REDUCE)
    entry.moved_at -= 5.0
    with pytest.raises(CollectiveTimeout, match="rank 1"):
        world[0].journal.patience.extend(entry, late([AwaitedPeer(rank=1)]), 5.0)
    with pytest.raises(CollectiveTimeout, match="no link"):
        world[0].journal.patience.extend(entry, late(), 5.0)


def test_who_is_missing_says_where_it_is_and_the_error_names_its_host() -> None:
    world = World(2)
    entry = world[0].journal.begin(ALL_REDUCE)
    entry.moved_at -= 5.0
    with pytest.raises(CollectiveTimeout) as raised:
        world[0].journal.patience.extend(entry, late(), 5.0)
    (peer,) = raised.value.waiting_for
    assert isinstance(peer, AwaitedPeer)
    assert (peer.host, peer.last_heard, peer.last_operation) == ("host-1", 0.0, None)
    assert (peer.current_operation or "").startswith("user code for ")
    assert "it is in user code for" in str(raised.value)


# -- what is no collective ------------------------------------------------------------------------------------


def test_a_message_that_does_not_come_is_explained_by_who_should_have_sent_it() -> None:
    world = World(3)
    for rank, entry in enumerate(begin_all(world)):
        world[rank].journal.end(entry)
    world[1].journal.begin(ALL_REDUCE)
    world.deaf.add(2)
    waited = [AwaitedPeer(rank=1, missing="a send"), AwaitedPeer(rank=2, missing="a send"), AwaitedPeer()]
    error = world[0].journal.patience.explain(late(waited))
    one, two, anybody = error.waiting_for
    assert isinstance(one, AwaitedPeer)
    assert (one.last_operation, one.last_heard) == ("all_reduce #0", 0.0)
    assert (one.current_operation or "").startswith("all_reduce #1 for ")
    assert str(two).startswith("rank 2, missing a send and any answer")
    assert anybody == AwaitedPeer()
    assert (error.operation, error.timeout) == ("a receive", 5.0)
    assert world[0].journal.patience.explain(late(waited), 7.0).timeout == 7.0


def test_what_nobody_can_explain_stays_as_it_is() -> None:
    world = World(2, pairs=[])
    patience = world[0].journal.patience
    for error in (late("the seed"), CollectiveTimeout(operation="x", sequence=1, waiting_for=[], timeout=1.0)):
        assert patience.explain(error) is error
    peer = AwaitedPeer(rank=1, missing="a send")
    assert list(patience.explain(late([peer])).waiting_for) == [peer]


def test_an_answer_that_nobody_asked_for_is_dropped() -> None:
    world = World(2)
    world[0].journal.patience.answered(1, Report(3, 1, 99, 1, "in"))
    assert world.said == []
