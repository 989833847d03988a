"""Calls that last, on several ranks without a transport."""

from __future__ import annotations

import threading
import time
from typing import Literal

import pytest

from nexar.collectives.call import Call
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.timeouts import InquiryAnswers, decide
from nexar.errors import CollectiveTimeout, OperationTimeout, PeerLost
from nexar.types import AwaitedPeer
from nexar.wire.control import ProgressReply
from tests.unit.collectives.recorded_world import NODES, World

NOW, TIMEOUT = 1000.0, 30.0
ASKED = {1: AwaitedPeer(rank=1, last_heard=4.0), 2: AwaitedPeer(rank=2, last_heard=5.0)}


def entry(age: float = TIMEOUT) -> Call:
    made = Call(threading.Lock(), 7, Fingerprint(OperationCode.BARRIER))
    made.moved_at = NOW - age
    return made


def report(
    rank: int,
    state: Literal["absent", "in", "done", "failed"],
    age: float = 0.0,
    doing: str = "",
    since: float = 0.0,
) -> tuple[int, ProgressReply]:
    return rank, ProgressReply(0, 0, 1, rank, state, 0, age, doing, "barrier #6", since)


def judge(*reports: tuple[int, ProgressReply], age: float = TIMEOUT) -> float | tuple[AwaitedPeer, ...]:
    return decide(entry(age), ASKED, dict(reports), now=NOW, timeout=TIMEOUT)


def test_a_progress_query_is_done_when_all_who_were_asked_have_answered() -> None:
    answers = InquiryAnswers(threading.Lock(), ASKED)
    answers.answer(*report(1, "in"))
    answers.answer(*report(5, "in"))
    assert not answers.done
    assert answers.awaited().rank == 2
    answers.answer(*report(2, "in"))
    assert answers.done
    assert set(answers.reports) == {1, 2}


def test_a_step_of_anybody_within_the_timeout_puts_the_deadline_off_until_it_is_that_old() -> None:
    assert judge(report(1, "in", 10.0), report(2, "in", 40.0)) == NOW + 20.0
    assert judge(report(1, "in", 29.0), report(2, "absent")) == NOW + 1.0
    assert judge(age=5.0) == NOW + 25.0


@pytest.mark.parametrize("age", [-1.0, float("nan"), float("inf"), 30.0, 31.0])
def test_a_step_too_old_or_impossible_puts_nothing_off(age: float) -> None:
    assert judge(report(1, "in", age), report(2, "in", 40.0)) == ()


def test_being_alive_or_done_is_no_step() -> None:
    assert judge(report(1, "done", 0.0), report(2, "done", 0.0)) == ()


def test_those_who_have_not_come_or_do_not_answer_are_to_blame() -> None:
    blamed = judge(report(1, "absent"))
    assert blamed == (
        AwaitedPeer(
            rank=1, missing="barrier #7", last_heard=0.0, last_operation="barrier #6", current_operation="user code"
        ),
        AwaitedPeer(rank=2, missing="barrier #7, it did not answer", last_heard=5.0),
    )


def test_who_is_elsewhere_is_said_to_be_there() -> None:
    assert isinstance(blamed := judge(report(1, "absent", doing="scan #3"), report(2, "failed")), tuple)
    assert blamed[0].current_operation == "scan #3"
    assert "it is in scan #3" in str(blamed[0])
    assert "it aborted the call" in str(blamed[1])


@pytest.mark.parametrize(
    ("since", "place"),
    [(12.0, "user code for 12 s"), (0.0, "user code"), (-1.0, "user code"), (float("inf"), "user code")],
)
def test_who_answers_but_is_in_no_call_is_in_user_code_for_as_long_as_it_can_have_been(
    since: float, place: str
) -> None:
    blamed = judge(report(1, "absent", since=since), report(2, "in"), age=40.0)
    assert isinstance(blamed, float)  # rank 2 has just made a step
    blamed = judge(report(1, "absent", since=since), report(2, "in", 40.0))
    assert isinstance(blamed, tuple)
    assert blamed[0].current_operation == place
    assert blamed[0].last_heard == 0.0


ALL_REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 8, 0, 1)


def late(waiting_for: list[AwaitedPeer] | str = "") -> OperationTimeout:
    return OperationTimeout(operation="a receive", waiting_for=waiting_for, timeout=5.0)


def begin_all(world: World) -> list[Call]:
    return [each.call_log.begin(ALL_REDUCE) for each in world.ranks]


def test_who_has_not_come_is_named_with_what_it_did_last() -> None:
    world = World(3)
    for rank, entry in enumerate(begin_all(world)):
        world[rank].call_log.end(entry)
    entries = [world[rank].call_log.begin(ALL_REDUCE) for rank in (0, 1)]
    for entry in entries:
        entry.moved_at -= 5.0
    with pytest.raises(CollectiveTimeout) as raised:
        world[0].call_log.progress_inquiry.extend(entries[0], late(), 5.0)
    assert raised.value.sequence == 1
    assert [(peer.rank, peer.node, peer.missing, peer.last_operation) for peer in raised.value.waiting_for] == [
        (2, NODES + 2, "all_reduce #1", "all_reduce #0")
    ]


def test_who_does_not_answer_is_named() -> None:
    world = World(3)
    entries = begin_all(world)
    for entry in entries:
        entry.moved_at -= 5.0
    world[0].receives(2, 0, ALL_REDUCE)
    world.deaf.add(2)
    with pytest.raises(CollectiveTimeout, match=r"rank 2 .*missing all_reduce #0, it did not answer, last heard"):
        world[0].call_log.progress_inquiry.extend(entries[0], late(), 5.0)


def test_a_step_of_another_rank_puts_the_deadline_off() -> None:
    world = World(3)
    entries = begin_all(world)
    entries[0].moved_at -= 30.0
    entries[2].moved_at -= 30.0
    entries[1].moved()
    until = world[0].call_log.progress_inquiry.extend(entries[0], late(), 5.0)
    assert time.monotonic() < until <= time.monotonic() + 5.0


@pytest.mark.parametrize("moving", [0, 1], ids=["here", "elsewhere"])
def test_a_transfer_that_is_slow_puts_the_deadline_off_although_no_step_is_done(moving: int) -> None:
    world = World(3)
    entries = begin_all(world)
    for each in entries:
        each.moved_at -= 30.0
        each.carried = 0.0  # when it had lasted for a moment
    world[moving].carried = 1e6
    until = world[0].call_log.progress_inquiry.extend(entries[0], late(), 5.0)
    assert time.monotonic() < until <= time.monotonic() + 5.0
    entries[moving].moved_at -= 30.0
    with pytest.raises(CollectiveTimeout):  # nothing more has come since
        world[0].call_log.progress_inquiry.extend(entries[0], late(), 5.0)


def test_whoever_knows_better_ends_the_progress_query() -> None:
    world = World(2)
    entries = begin_all(world)
    entries[0].moved_at -= 5.0
    world[1].call_log.end(entries[1], PeerLost(rank=1, cause="x"))
    with pytest.raises(PeerLost):
        world[0].call_log.progress_inquiry.extend(entries[0], late(), 5.0)


def test_with_nobody_to_blame_those_that_are_waited_for_are_named() -> None:
    world = World(2, pairs=[])
    entry = world[0].call_log.begin(ALL_REDUCE)
    entry.moved_at -= 5.0
    with pytest.raises(CollectiveTimeout, match="rank 1"):
        world[0].call_log.progress_inquiry.extend(entry, late([AwaitedPeer(rank=1)]), 5.0)
    with pytest.raises(CollectiveTimeout, match="no link"):
        world[0].call_log.progress_inquiry.extend(entry, late(), 5.0)


def test_who_is_missing_says_where_it_is_and_the_error_names_its_host() -> None:
    world = World(2)
    entry = world[0].call_log.begin(ALL_REDUCE)
    entry.moved_at -= 5.0
    with pytest.raises(CollectiveTimeout) as raised:
        world[0].call_log.progress_inquiry.extend(entry, late(), 5.0)
    (peer,) = raised.value.waiting_for
    assert isinstance(peer, AwaitedPeer)
    assert (peer.host, peer.last_heard, peer.last_operation) == ("host-1", 0.0, None)
    assert (peer.current_operation or "").startswith("user code for ")
    assert "it is in user code for" in str(raised.value)


# -- what is no collective ------------------------------------------------------------------------------------


def test_a_message_that_does_not_come_is_explained_by_who_should_have_sent_it() -> None:
    world = World(3)
    for rank, entry in enumerate(begin_all(world)):
        world[rank].call_log.end(entry)
    world[1].call_log.begin(ALL_REDUCE)
    world.deaf.add(2)
    waited = [AwaitedPeer(rank=1, missing="a send"), AwaitedPeer(rank=2, missing="a send"), AwaitedPeer()]
    error = world[0].call_log.progress_inquiry.explain(late(waited))
    one, two, anybody = error.waiting_for
    assert isinstance(one, AwaitedPeer)
    assert (one.last_operation, one.last_heard) == ("all_reduce #0", 0.0)
    assert (one.current_operation or "").startswith("all_reduce #1 for ")
    assert str(two).startswith("rank 2, missing a send, it did not answer")
    assert anybody == AwaitedPeer()
    assert (error.operation, error.timeout) == ("a receive", 5.0)
    assert world[0].call_log.progress_inquiry.explain(late(waited), 7.0).timeout == 7.0


def test_what_nobody_can_explain_stays_as_it_is() -> None:
    world = World(2, pairs=[])
    patience = world[0].call_log.progress_inquiry
    for error in (late("the seed"), CollectiveTimeout(operation="x", sequence=1, waiting_for=[], timeout=1.0)):
        assert patience.explain(error) is error
    peer = AwaitedPeer(rank=1, missing="a send")
    assert list(patience.explain(late([peer])).waiting_for) == [peer]


def test_an_answer_that_nobody_asked_for_is_dropped() -> None:
    world = World(2)
    world[0].call_log.progress_inquiry.answered(1, ProgressReply(3, 1, 99, 1, "in"))
    assert world.said == []
