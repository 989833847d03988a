"""The call logs of several ranks, without a transport.

Calls that take a number and mostly need no more, beside ranks that make the same call the usual way.
"""

from __future__ import annotations

import threading
import time

import pytest

from nexar.arrays.operators import ReduceCode
from nexar.collectives.call import Call
from nexar.collectives.call_log import CallLog
from nexar.collectives.call_notices import ABORTED_KEPT
from nexar.collectives.fingerprint import Fingerprint, rooted
from nexar.collectives.operations import OperationCode
from nexar.errors import (
    BufferMismatch,
    Cancelled,
    CollectiveMismatch,
    CollectiveTimeout,
    NexarError,
    OperationTimeout,
    PeerLost,
    Revoked,
)
from nexar.types import AwaitedPeer
from nexar.wire.control import CallAborted, CallMismatch, ProgressReply
from tests.unit.collectives.recorded_world import Line, World

ALL_REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 8, 0, ReduceCode.SUM)
LONGER = ALL_REDUCE._replace(count=4)
BROADCAST = Fingerprint(OperationCode.BROADCAST, 11, 8, rooted(0))
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


def late(waiting_for: list[AwaitedPeer] | str = "") -> OperationTimeout:
    return OperationTimeout(operation="a receive", waiting_for=waiting_for, timeout=5.0)


def begin_all(world: World, fingerprint: Fingerprint = ALL_REDUCE) -> list[Call]:
    return [each.call_log.begin(fingerprint) for each in world.ranks]


# -- numbers ------------------------------------------------------------------------------------------------


def test_calls_are_numbered_in_the_order_in_which_they_are_made() -> None:
    world = World(1)
    entries = [world[0].call_log.begin(ALL_REDUCE) for _ in range(3)]
    assert [entry.name for entry in entries] == ["all_reduce #0", "all_reduce #1", "all_reduce #2"]
    for entry in reversed(entries):
        assert world[0].call_log.end(entry) is None
        assert entry.done
    assert world[0].call_log.stats()["in_flight"] == 0


def test_no_number_is_given_twice_whoever_calls() -> None:
    call_log, numbers = World(1)[0].call_log, list[int]()

    def call() -> None:
        for _ in range(200):
            entry = call_log.begin(ALL_REDUCE)
            numbers.append(entry.sequence)
            call_log.end(entry)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(800))


# -- mismatch -----------------------------------------------------------------------------------------------


def test_who_sees_a_difference_notifies_everybody_and_all_raise_who_did_what() -> None:
    world = World(4, RING)
    entries = [world[rank].call_log.begin(BROADCAST if rank == 1 else ALL_REDUCE) for rank in range(4)]
    world[0].receives(1, 0, BROADCAST)
    world.deliver()
    for rank, entry in enumerate(entries):
        error = world[rank].call_log.end(entry, Cancelled())
        assert isinstance(error, CollectiveMismatch)
        assert error.sequence == 0
        assert error.calls is not None
        assert error.calls.items() >= {0: "all_reduce of float32[8], sum", 1: "broadcast of float32[8], root 0"}.items()
        assert error.expected == error.calls[rank]
        assert error.ranks == ([0] if rank == 1 else [1])


def test_a_difference_is_passed_on_once() -> None:
    world = World(4, RING)
    begin_all(world)
    world[0].receives(1, 0, BROADCAST)
    world[2].receives(1, 0, BROADCAST)
    world.deliver()
    reported = [(source, dest) for source, dest, message in world.said if isinstance(message, CallMismatch)]
    assert len(reported) == len(set(reported)) <= 8
    assert {dest for _, dest in reported} >= {1, 3}


def test_a_rank_that_had_returned_raises_at_its_next_call_and_at_every_later_one() -> None:
    world = World(2)
    done = world[0].call_log.begin(BROADCAST)
    world[0].call_log.end(done)
    entry = world[1].call_log.begin(ALL_REDUCE)
    world[1].receives(0, 0, BROADCAST)
    world.deliver()
    assert isinstance(world[1].call_log.end(entry, Cancelled()), CollectiveMismatch)
    for rank in (0, 1, 0):
        with pytest.raises(CollectiveMismatch, match="#0") as raised:
            world[rank].call_log.begin(ALL_REDUCE)
        assert raised.value.ranks == [1 - rank]


def test_a_frame_that_comes_after_the_call_returned_is_still_reported() -> None:
    world = World(2)
    world[0].call_log.end(world[0].call_log.begin(BROADCAST))
    entry = world[1].call_log.begin(ALL_REDUCE)
    assert not world[0].receives(1, 0, ALL_REDUCE)
    world.deliver()
    assert isinstance(entry.error, CollectiveMismatch)


def test_a_frame_that_came_before_the_call_makes_it_raise() -> None:
    world = World(3)
    world[0].receives(1, 0, LONGER)
    entry = world[0].call_log.begin(ALL_REDUCE)
    error = world[0].call_log.end(entry, entry.error)
    assert isinstance(error, CollectiveMismatch)
    assert (error.expected, error.found) == (ALL_REDUCE.describe(), LONGER.describe())
    world.deliver()
    with pytest.raises(CollectiveMismatch, match="all_reduce of float32\\[8\\], sum here"):
        world[2].call_log.begin(ALL_REDUCE)


def test_a_rank_that_has_not_come_yet_says_so() -> None:
    world = World(3)
    world[2].call_log.receive(Line(world, 2, 0), CallMismatch(3, 1, 5, {0: tuple(ALL_REDUCE), 1: tuple(LONGER)}))
    with pytest.raises(CollectiveMismatch, match="no such call yet here"):
        world[2].call_log.begin(ALL_REDUCE)


def test_calls_in_flight_before_the_one_that_differs_go_on() -> None:
    world = World(2)
    earlier, later = begin_all(world)[0], begin_all(world)[0]
    world[0].receives(1, 1, LONGER)
    assert later.error is not None
    assert earlier.error is None
    assert world[0].call_log.end(earlier) is None


def test_what_two_ranks_would_never_exchange_as_frames_they_declare() -> None:
    world = World(2)
    entries = [
        world[rank].call_log.begin(BROADCAST._replace(root=rooted(1 - rank))) for rank in range(2)
    ]  # both only receive
    world[0].call_log.progress_inquiry.declare(entries[0])
    world.deliver()
    assert all(isinstance(entry.error, CollectiveMismatch) for entry in entries)
    assert not [message for _, _, message in world.said if isinstance(message, ProgressReply)]


# -- giving up ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (KeyboardInterrupt(), Cancelled, ["all_reduce #0", "rank 1", "KeyboardInterrupt"]),
        (Cancelled(operation="all_reduce #0", reason="enough"), Cancelled, ["rank 1", "enough"]),
        (Cancelled(operation="all_reduce #0", reason="it did", rank=2), Cancelled, ["by rank 2", "it did"]),
        (BufferMismatch(expected="4 bytes", found="8 bytes"), Cancelled, ["rank 1", "4 bytes", "8 bytes"]),
        (PeerLost(rank=2, cause="it fell"), PeerLost, ["rank 2", "all_reduce #0", "rank 1", "it fell"]),
        (
            CollectiveTimeout(
                operation="all_reduce",
                sequence=0,
                timeout=30.0,
                waiting_for=[AwaitedPeer(rank=2, missing="all_reduce #0", last_operation="barrier #7")],
            ),
            CollectiveTimeout,
            ["all_reduce #0", "30 s", "rank 2", "last finished barrier #7"],
        ),
        (CollectiveTimeout(operation="x", sequence=0, timeout=3.0, waiting_for="x"), CollectiveTimeout, ["rank 1"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_who_gives_up_ends_the_call_of_the_others_at_once(
    error: BaseException, raised: type[NexarError], words: list[str]
) -> None:
    world = World(4, RING)
    entries = [world[rank].call_log.begin(ALL_REDUCE) for rank in (0, 1, 3)]
    assert world[1].call_log.end(entries[1], error) is error
    world.deliver()
    for rank, entry in ((0, entries[0]), (3, entries[2])):
        mine = world[rank].call_log.end(entry, Cancelled(operation="a send", reason="refused"))
        assert type(mine) is raised
        assert all(word in str(mine) for word in words), mine
    late = world[2].call_log.begin(ALL_REDUCE)
    assert type(late.error) is raised
    world[2].call_log.end(late, late.error)
    again = begin_all(world)
    assert [entry.sequence for entry in again] == [1] * 4
    assert [rank.call_log.end(entry) for rank, entry in zip(world.ranks, again, strict=True)] == [None] * 4


def test_a_call_that_a_change_interrupts_rejects_no_message_of_its_senders() -> None:
    world = World(2)
    entry = world[0].call_log.begin(ALL_REDUCE)
    world[0].call_log.interrupt(Revoked(communicator="3", reason="its members change"))
    assert isinstance(world[0].call_log.end(entry, Cancelled(operation="a send")), Revoked)
    late = world[0].call_log.begin(ALL_REDUCE)
    assert isinstance(world[0].call_log.end(late, late.error), Revoked)
    assert world[0].receives(1, entry.sequence, ALL_REDUCE), "it would be refused"
    assert world[0].receives(1, late.sequence, ALL_REDUCE)
    assert world.said == []


def test_that_a_call_was_given_up_is_passed_on_once() -> None:
    world = World(4)
    entries = begin_all(world)
    for rank in (0, 2):
        world[rank].call_log.end(entries[rank], Cancelled(reason="both at once"))
    world.deliver()
    for rank in (1, 3):
        world[rank].call_log.end(entries[rank], Cancelled())
    reported = [(source, dest) for source, dest, message in world.said if isinstance(message, CallAborted)]
    assert len(reported) == len(set(reported)) <= 12


def test_a_call_that_had_all_it_wanted_is_not_spoiled_by_who_gives_up() -> None:
    world = World(2)
    entries = begin_all(world)
    world[1].call_log.end(entries[1], Cancelled())
    world.deliver()
    assert entries[0].error is not None
    assert world[0].call_log.end(entries[0]) is None


def test_a_lost_link_does_not_keep_the_others_from_being_notified() -> None:
    world = World(3)
    entries = begin_all(world)
    world[0].lines[1].cut = True
    world[0].call_log.end(entries[0], Cancelled())
    world.deliver()
    assert entries[2].error is not None
    assert entries[1].error is not None  # through 2


def test_what_is_remembered_of_calls_given_up_is_bounded() -> None:
    world = World(2)
    for _ in range(ABORTED_KEPT + 10):
        world[0].call_log.end(world[0].call_log.begin(ALL_REDUCE), Cancelled())
    world.deliver()
    assert len(world[0].call_log._aborted) == len(world[1].call_log._aborted) == ABORTED_KEPT


@pytest.mark.parametrize(
    "notice",
    [CallAborted(3, 1, 0, 9, "no such rank"), CallAborted(3, 1, -1, 0, "no such call"), CallMismatch(3, 1, 0, {})],
)
def test_nonsense_of_others_is_dropped(notice: CallAborted | CallMismatch) -> None:
    world = World(2)
    entries = begin_all(world)
    world[0].call_log.receive(Line(world, 0, 1), notice)
    assert not entries[0].done
    world[0].call_log.receive(Line(world, 0, 7), CallAborted(3, 1, 0, 1, "a stranger"))
    assert not entries[0].done


def test_nothing_comes_after_the_close() -> None:
    world = World(2)
    entries = begin_all(world)
    world[0].call_log.close()
    world[0].call_log.close()
    world[1].call_log.end(entries[1], Cancelled())
    world.deliver()
    assert entries[0].error is None


def test_a_difference_that_was_seen_elsewhere_is_reported_like_any_other() -> None:
    world = World(3)
    entries = begin_all(world)
    world[0].call_log.report_mismatch(entries[0].sequence, entries[0].fingerprint, 1, LONGER)
    world.deliver()
    assert all(isinstance(entry.error, CollectiveMismatch) for entry in entries)


# -- facts --------------------------------------------------------------------------------------------------


def test_calls_are_counted_recorded_and_compared() -> None:
    world = World(2)
    call_log = world[0].call_log
    for number in range(3):
        entry = call_log.begin(ALL_REDUCE)
        world[0].receives(1, number, ALL_REDUCE)
        call_log.end(entry)
    call_log.end(call_log.begin(BROADCAST), Cancelled())
    stats = call_log.stats()
    assert (stats["calls"], stats["bytes"], stats["errors"]) == (4, 4 * 32, 1)
    assert stats["operations"]["all_reduce"]["calls"] == 3
    assert stats["errors_by_kind"] == {"Cancelled": 1}
    assert 0 < stats["waiting_for"][1] <= stats["seconds"]
    assert [(record.sequence, record.outcome) for record in call_log.recorder.snapshot()] == [
        (0, ""), (1, ""), (2, ""), (3, "Cancelled"),
    ]  # fmt: skip
    assert [(each.rank, each.times_last) for each in call_log.stragglers()] == [(1, 3), (0, 0)]


def test_arrivals_may_be_reported_by_who_knows_them() -> None:
    call_log = World(3)[0].call_log
    entry = call_log.begin(ALL_REDUCE)
    call_log.end(entry, arrivals={0: entry.began, 1: entry.began + 2.0, 2: entry.began + 1.0})
    assert [each.rank for each in call_log.stragglers()] == [1, 2, 0]
    assert call_log.stats()["waiting_for"] == pytest.approx({1: 2.0, 2: 1.0})


def test_arrivals_that_are_reported_and_those_seen_by_frames_count_together() -> None:
    world = World(3)
    entry = world[0].call_log.begin(ALL_REDUCE)
    world[0].receives(1, entry.sequence, ALL_REDUCE)
    world[0].call_log.end(entry, arrivals={2: entry.began + 1.0})
    assert {each.rank for each in world[0].call_log.stragglers()} == {0, 1, 2}


def test_a_call_log_belongs_to_one_communicator() -> None:
    world = World(2)
    entries = begin_all(world)
    world[0].notices.arrived(Line(world, 0, 1), CallAborted(4, 1, 0, 1, "another one"))
    world[0].notices.arrived(Line(world, 0, 1), CallAborted(3, 2, 0, 1, "another generation"))
    assert not entries[0].done
    assert isinstance(world[0].call_log, CallLog)


def test_who_wants_to_know_of_failures_is_notified_each_that_leaves_a_call() -> None:
    world, reported = World(2), list[BaseException]()
    world[0].call_log.on_failure = reported.append
    entries = begin_all(world)
    error = PeerLost(rank=1, cause="x")
    assert world[0].call_log.end(entries[0], error) is error
    assert reported == [error]
    world[0].receives(1, 1, BROADCAST)
    world[0].call_log.end(world[0].call_log.begin(ALL_REDUCE), None)
    assert isinstance(reported[1], CollectiveMismatch)
    with pytest.raises(CollectiveMismatch):
        world[0].call_log.begin(ALL_REDUCE)
    assert len(reported) == 3, "one that is refused at its beginning is told too"


def test_who_is_waited_for_in_vain_is_notified_although_it_is_in_no_call() -> None:
    world, reported = World(3), list[BaseException]()
    world[2].call_log.on_failure = reported.append
    world[1].call_log.on_failure = reported.append
    entry = world[0].call_log.begin(ALL_REDUCE)
    world[0].call_log.progress_inquiry.declare(entry)  # as every long call does: it carries the fingerprint
    timeout = late([AwaitedPeer(rank=2, missing="all_reduce #0")])
    world[0].call_log.end(entry, timeout)
    world.deliver()
    (error,) = reported
    assert isinstance(error, CollectiveTimeout)
    assert error.operation == "all_reduce"
    assert [peer.rank for peer in error.waiting_for] == [2]


def test_the_calls_in_flight_can_be_seen_while_somebody_holds_the_lock() -> None:
    world = World(1)
    entries = [world[0].call_log.begin(ALL_REDUCE) for _ in range(3)]
    with world[0].lock:
        assert world[0].call_log.in_flight() == entries
    assert not world[0].call_log.closed
    world[0].call_log.close()
    assert world[0].call_log.closed


# -- how far it has come ------------------------------------------------------------------------------------


def test_completed_is_the_last_call_before_which_none_is_open() -> None:
    call_log = World(1)[0].call_log
    assert call_log.completed == -1
    first, second, third = (call_log.begin(ALL_REDUCE) for _ in range(3))
    assert call_log.completed == -1
    call_log.end(third)
    assert call_log.completed == -1, "two before it are open"
    call_log.end(first)
    assert call_log.completed == 0, "one between them is open"
    call_log.end(second)
    assert call_log.completed == 2, "all are done, in whatever order"


def test_completed_counts_calls_that_had_no_entry() -> None:
    call_log = World(1)[0].call_log
    open_one = call_log.begin(ALL_REDUCE)
    taken = call_log.take()
    assert taken == 1
    call_log.note(taken, ALL_REDUCE, 0, 0.0)
    assert call_log.completed == -1
    call_log.end(open_one)
    assert call_log.completed == 1


def test_completed_does_not_fall_when_a_call_without_entry_ends_after_a_later_one() -> None:
    call_log = World(1)[0].call_log
    taken = call_log.take()
    assert taken == 0
    call_log.end(call_log.begin(ALL_REDUCE))
    call_log.note(taken, ALL_REDUCE, 0, 0.0)
    assert call_log.completed == 1


def test_a_difference_that_was_seen_before_a_call_is_adopted_is_what_it_raises_and_reports() -> None:
    world = World(2)
    call_log = world[0].call_log
    sequence = call_log.take()
    assert sequence is not None
    call_log.report_mismatch(sequence, ALL_REDUCE, 1, LONGER)
    entry = call_log.adopt(sequence, ALL_REDUCE, time.monotonic())
    error = call_log.end(entry, Cancelled(operation="all_reduce", rank=1))
    assert isinstance(error, CollectiveMismatch)
    assert (error.ranks, error.sequence) == ([1], sequence)
    assert [type(message) for _, _, message in world.said] == [CallMismatch]


def test_a_call_that_another_rank_has_spoken_of_is_not_taken() -> None:
    world = World(2)
    mine, call_log = world[0].call_log, world[1].call_log
    mine.progress_inquiry.declare(mine.begin(BROADCAST))
    world.deliver()
    assert call_log.take() is None
    assert isinstance(call_log.begin(ALL_REDUCE).error, CollectiveMismatch)


def test_a_call_that_was_given_up_is_not_taken_but_the_next_one_is() -> None:
    world = World(2)
    mine, call_log = world[0].call_log, world[1].call_log
    mine.end(mine.begin(ALL_REDUCE), Cancelled())
    world.deliver()
    assert call_log.take() is None
    call_log.end(call_log.begin(ALL_REDUCE), Cancelled())
    assert call_log.take() == 1


def test_what_is_said_of_a_call_that_was_taken_is_not_kept() -> None:
    world = World(2)
    mine, call_log = world[0].call_log, world[1].call_log
    for _ in range(3):
        entry, sequence = mine.begin(ALL_REDUCE), call_log.take()
        assert sequence is not None
        mine.progress_inquiry.declare(entry)
        world.deliver()
        call_log.note(sequence, ALL_REDUCE, 32, time.monotonic())
        mine.progress_inquiry.declare(entry)
        world.deliver()
        mine.end(entry)
        assert not world[1].matching.mismatch_detector.is_announced(sequence)
    assert call_log.take() == 3


def test_who_has_not_come_is_named_with_what_it_did_last_also_when_that_was_quick() -> None:
    world = World(2)
    for each in world.ranks:
        sequence = each.call_log.take()
        assert sequence is not None
        each.call_log.note(sequence, ALL_REDUCE, 32, time.monotonic())
    entry = world[0].call_log.begin(BROADCAST)
    entry.moved_at -= 5.0
    with pytest.raises(CollectiveTimeout) as raised:
        world[0].call_log.progress_inquiry.extend(entry, late(), 5.0)
    assert [(peer.rank, peer.last_operation) for peer in raised.value.waiting_for] == [(1, "all_reduce #0")]
