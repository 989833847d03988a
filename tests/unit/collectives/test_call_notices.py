"""A rank closes a communicator that others still use: what they receive, and when."""

from __future__ import annotations

import threading

import pytest

from nexar.collectives.call import Call
from nexar.collectives.call_notices import (
    ABORTED_KEPT,
    AbortedCalls,
    AbortReason,
    ClosingNotice,
    NoticeSender,
    error_of,
    mismatch_of,
    timeout_caused_here,
    with_call_name,
)
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.errors import (
    Cancelled,
    CollectiveTimeout,
    LinkClosed,
    NexarError,
    OperationTimeout,
    PeerLost,
    PeerMisbehaved,
    Revoked,
    UsageError,
)
from nexar.types import AwaitedPeer, Rank
from nexar.wire.control import Blamed, CallAborted, ProgressQuery, ProgressReply
from tests.unit.collectives.recorded_world import NODES, World

BARRIER = Fingerprint(OperationCode.BARRIER)


def reported(world: World) -> list[tuple[int, int]]:
    return [(source, dest) for source, dest, message in world.said if isinstance(message, CallAborted)]


def leave(world: World, rank: int) -> None:
    world[rank].call_log.leave()
    world[rank].call_log.close()


def test_it_answers_that_a_call_is_done_or_will_never_be() -> None:
    closing_notice = ClosingNotice(3, 1, 2, 5)
    assert closing_notice.answer(ProgressQuery(3, 1, 4, 9)) == ProgressReply(3, 1, 9, 2, "done")
    for sequence in (5, 6):
        assert closing_notice.answer(ProgressQuery(3, 1, sequence, 9)) == closing_notice.message
    message = closing_notice.answer(ProgressQuery(3, 1, -1, 9))  # of no collective
    assert isinstance(message, ProgressReply)
    assert message.doing == "user code, which has closed this communicator"
    assert closing_notice.message.closed
    assert (closing_notice.message.sequence, closing_notice.message.rank) == (5, 2)


def test_where_all_close_after_the_same_call_nothing_is_said() -> None:
    world = World(3)
    for rank in world.ranks:
        rank.call_log.end(rank.call_log.begin(BARRIER))
    for number in range(3):
        leave(world, number)
    world.deliver()
    assert world.said == []


def test_who_waits_already_is_notified_at_once_and_also_of_calls_to_come() -> None:
    world = World(3, pairs=[(0, 1), (1, 2)])
    waiting = [world[rank].call_log.begin(BARRIER) for rank in (1, 2)]
    assert world[0].receives(1, 0, BARRIER)
    leave(world, 0)
    world.deliver()  # to 2 through 1
    for entry in waiting:
        assert isinstance(entry.error, Revoked)
        assert (entry.error.rank, entry.error.closed) == (0, True)
        assert "rank 0 has closed it and takes no part in barrier #0" in str(entry.error)
    for rank, entry in zip((1, 2), waiting, strict=True):
        world[rank].call_log.end(entry, entry.error)
        assert world[rank].call_log.take() is None
        assert "barrier #1" in str(world[rank].call_log.begin(BARRIER).error)
    assert len(reported(world)) == len(set(reported(world)))


def test_who_comes_later_is_notified_when_it_asks() -> None:
    world = World(2)
    leave(world, 0)
    entry = world[1].call_log.begin(BARRIER)
    assert entry.error is None
    world[1].call_log.progress_inquiry.declare(entry)
    world.deliver()
    assert isinstance(entry.error, Revoked)


def test_who_asks_in_the_moment_between_is_notified_too() -> None:
    world = World(2)
    world[0].call_log.leave()
    entry = world[1].call_log.begin(BARRIER)
    world[1].call_log.progress_inquiry.declare(entry)
    world.deliver()
    assert isinstance(entry.error, Revoked)


def test_a_call_that_it_had_a_part_in_is_left_alone() -> None:
    world = World(2)
    entries = [rank.call_log.begin(BARRIER) for rank in world.ranks]
    world[0].call_log.end(entries[0])
    leave(world, 0)
    world[1].call_log.progress_inquiry.declare(entries[1])
    world.deliver()
    assert entries[1].error is None
    assert world[1].call_log.end(entries[1]) is None


def test_one_that_is_closed_already_says_nothing() -> None:
    world = World(2)
    assert world[0].receives(1, 0, BARRIER)
    world[0].call_log.close()
    leave(world, 0)
    assert world.said == []


def gave_up(sequence: int, rank: int = 1, *, closed: bool = False) -> CallAborted:
    return CallAborted(3, 1, sequence, rank, "tired", closed=closed)


def test_a_call_that_was_given_up_is_found_and_no_other() -> None:
    given_up = AbortedCalls()
    assert not given_up
    assert given_up.add(gave_up(4))
    assert given_up.find(4) == gave_up(4)
    assert (given_up.find(3), given_up.find(5)) == (None, None)


def test_the_first_report_about_a_call_stands() -> None:
    given_up = AbortedCalls()
    assert given_up.add(gave_up(4, rank=1))
    assert not given_up.add(gave_up(4, rank=2))
    assert given_up.find(4) == gave_up(4, rank=1)


def test_who_has_closed_takes_no_part_in_that_call_and_those_after_it() -> None:
    given_up = AbortedCalls()
    given_up.add(gave_up(4))
    assert given_up.add(gave_up(4, rank=2, closed=True))
    assert given_up.find(4) == gave_up(4)
    assert given_up.find(5) == given_up.find(900) == gave_up(4, rank=2, closed=True)
    assert given_up.find(3) is None
    assert not given_up.add(gave_up(7))


def test_of_those_who_have_closed_the_first_counts() -> None:
    given_up = AbortedCalls()
    assert given_up.add(gave_up(6, rank=1, closed=True))
    assert not given_up.add(gave_up(8, rank=2, closed=True))
    assert given_up.add(gave_up(2, rank=3, closed=True))
    assert given_up.find(3) == gave_up(2, rank=3, closed=True)
    assert not given_up.add(gave_up(2, rank=0, closed=True))


def test_what_is_remembered_is_bounded_and_a_close_is_not_forgotten() -> None:
    given_up = AbortedCalls()
    given_up.add(gave_up(ABORTED_KEPT + 50, closed=True))
    for sequence in range(ABORTED_KEPT + 10):
        given_up.add(gave_up(sequence))
    assert len(given_up) == ABORTED_KEPT
    assert given_up.find(ABORTED_KEPT + 60) == gave_up(ABORTED_KEPT + 50, closed=True)


ENTRY = Call(threading.Lock(), 7, Fingerprint(OperationCode.SCAN, 11, 8, 0, 1))
SCAN, REDUCE, BARRIER_FINGERPRINT = (10, 11, 8, 0, 1, 4), (4, 11, 8, 1, 1, 7), (1, 0, 0, 0, 0, 18)


def known(rank: Rank) -> AwaitedPeer:
    return AwaitedPeer(rank=rank, node=rank + 100, address="h:1", last_heard=9.0)


def rank_of(node: int) -> Rank | None:
    return node - 100 if node >= 100 else None


def received(error: BaseException) -> NexarError:
    """What another rank raises."""
    abort_reason = AbortReason(error, rank_of)
    return error_of(
        CallAborted(0, 0, 7, 3, abort_reason.reason, abort_reason.timeout, abort_reason.culprits), ENTRY, known, 0
    )


def test_a_rank_that_has_closed_the_communicator_is_no_loss() -> None:
    error = error_of(CallAborted(5, 0, 7, 3, "it has closed it", closed=True), ENTRY, known, 0)
    assert isinstance(error, Revoked)
    assert (error.communicator, error.rank, error.closed) == ("5", 3, True)
    assert "takes no part in scan #7; make a new one with split() or group()" in str(error)


def test_a_timeout_is_one_on_every_rank_and_blames_the_same() -> None:
    peer = AwaitedPeer(
        rank=2, missing="scan #7", last_heard=4.0, last_operation="scan #6", current_operation="barrier #1"
    )
    error = received(OperationTimeout(operation="x", waiting_for=[peer, AwaitedPeer()], timeout=30.0))
    assert isinstance(error, CollectiveTimeout)
    assert (error.operation, error.sequence, error.timeout) == ("scan", 7, 30.0)
    assert list(error.waiting_for) == [
        AwaitedPeer(
            rank=2,
            node=102,
            address="h:1",
            missing="scan #7",
            last_heard=4.0,
            last_operation="scan #6",
            current_operation="barrier #1",
        )
    ]


@pytest.mark.parametrize(
    "error", [PeerLost(rank=9, node=102, cause="it left"), LinkClosed(rank=9, node=102)], ids=["lost", "link closed"]
)
def test_who_is_lost_is_named_by_its_rank_here_whatever_its_link_calls_it(error: NexarError) -> None:
    found = received(error)
    assert isinstance(found, PeerLost)
    assert (found.rank, found.node) == (2, 102)
    assert isinstance(received(LinkClosed(owner="the communicator")), Cancelled)


@pytest.mark.parametrize(
    ("missing", "says"), [("scan #7", "missing scan #7 (this rank"), ("", "missing its part (this rank")]
)
def test_who_is_blamed_reads_that_it_is_meant(missing: str, says: str) -> None:
    notice = CallAborted(0, 0, 7, 3, "late", 30.0, (Blamed(2, missing),))
    assert says in str(error_of(notice, ENTRY, known, 2))


def test_a_lost_peer_is_lost_for_every_rank() -> None:
    error = received(PeerLost(rank=2, cause="its process died"))
    assert isinstance(error, PeerLost)
    assert (error.rank, error.node, error.operation) == (2, 102, "scan #7")
    assert "rank 3" in error.cause
    assert "its process died" in error.cause


@pytest.mark.parametrize(
    "fault",
    [
        KeyboardInterrupt(),
        UsageError("bad buffer"),
        PeerLost(cause="nobody knows who"),
        PeerMisbehaved(rank=2, what="it sent nonsense"),  # who lives, and is not to be waited for as one lost
    ],
)
def test_anything_else_is_cancelled_by_who_raised_it(fault: BaseException) -> None:
    error = received(fault)
    assert isinstance(error, Cancelled)
    assert (error.rank, error.operation) == (3, "scan #7")
    assert (str(fault) or "KeyboardInterrupt") in error.reason


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("fault", "says"), [(ValueError("caf\udce9"), r"caf\udce9"), (Mute(), "no text: its __str__ raised")]
)
def test_what_cannot_be_sent_as_it_is_is_reported_otherwise(fault: Exception, says: str) -> None:
    reason = AbortReason(fault, rank_of).reason
    assert says in reason
    assert reason.encode()


def test_a_reason_is_not_reported_at_any_length() -> None:
    assert len(AbortReason(UsageError("x" * 1_000_000), rank_of).reason) == 1000


def test_a_mismatch_names_first_whose_call_differs_from_mine() -> None:
    calls = {0: SCAN, 1: REDUCE, 2: SCAN, 3: BARRIER_FINGERPRINT}
    error = mismatch_of(7, calls, 2)
    assert (error.expected, error.found, error.ranks) == (
        "scan of float32[8], sum", "reduce of float32[8], sum, root 0", [1],
    )  # fmt: skip
    assert mismatch_of(7, calls, 1).ranks == [0, 2]
    assert error.calls == {0: error.expected, 1: error.found, 2: error.expected, 3: "barrier"}
    assert "barrier on rank 3" in str(error)


def test_a_mismatch_of_others_alone_names_one_of_them() -> None:
    error = mismatch_of(7, {0: SCAN, 1: REDUCE}, 2)
    assert error.expected == "no such call yet"
    assert error.ranks == [0]


def test_a_part_that_another_rank_gave_up_is_named_as_the_call() -> None:
    error = with_call_name(Cancelled(operation="all_gather", reason="it did", rank=1), ENTRY)
    assert isinstance(error, Cancelled)
    assert (error.operation, error.reason, error.rank) == ("scan #7", "it did", 1)
    mine = Cancelled(operation="all_gather")
    assert with_call_name(mine, ENTRY) is mine


def test_the_way_is_named_only_where_nothing_else_distinguishes_the_calls() -> None:
    ring = (*SCAN[:5], 15)
    error = mismatch_of(7, {0: SCAN, 1: ring}, 0)
    assert error.expected == "scan of float32[8], sum, by chain"
    assert error.found == "scan of float32[8], sum, by ring"
    assert "by" not in mismatch_of(7, {0: SCAN, 1: REDUCE}, 0).found


@pytest.mark.parametrize(("operation", "name"), [(OperationCode.SCAN, "scan"), (0, "a collective")])
def test_the_error_of_an_awaited_rank_names_the_operation_by_its_code(operation: int, name: str) -> None:
    notice = CallAborted(0, 0, 7, 3, "late", 30.0, (Blamed(1, "scan #7"), Blamed(2, "reduce #9, it did not answer")))
    error = timeout_caused_here(notice, 2, operation)
    assert list(error.waiting_for) == [AwaitedPeer(rank=2, missing="reduce #9, it did not answer")]
    assert (error.operation, error.sequence, error.timeout) == (name, 7, 30.0)


NOTICE = CallAborted(3, 1, 0, 0, "tired")


def test_what_is_spread_goes_to_all_that_are_linked_but_who_said_it() -> None:
    world = World(4, [(0, 1), (0, 2)])
    NoticeSender(world[0]).send_all(NOTICE)
    NoticeSender(world[0]).send_all(NOTICE, but=1)
    assert [(source, dest) for source, dest, _ in world.said] == [(0, 1), (0, 2), (0, 2)]


def test_a_lost_link_keeps_nobody_else_from_hearing() -> None:
    world = World(3)
    world[0].lines[1].cut = True
    NoticeSender(world[0]).send_all(NOTICE)
    assert [dest for _, dest, _ in world.said] == [2]


def test_a_rank_is_known_by_its_node_and_by_the_time_of_its_last_message() -> None:
    world = World(2)
    peer = NoticeSender(world[0]).known(1)
    assert (peer.rank, peer.node, peer.last_heard) == (1, NODES + 1, None)
    world[0].matching.mismatch_detector.heard[NODES + 1] = 0.0
    assert (NoticeSender(world[0]).known(1).last_heard or 0.0) > 0.0
