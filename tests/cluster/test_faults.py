"""Collectives that go wrong, on real links: everybody is informed what happened, at once, and the next call works.

The collective is the smallest that there is: everybody sends to everybody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nexar.arrays.operators import ReduceCode
from nexar.collectives.call_log import CallLog
from nexar.collectives.fingerprint import Fingerprint, rooted
from nexar.collectives.operations import OperationCode
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import Cancelled, CollectiveMismatch, CollectiveTimeout, NexarError, OperationTimeout
from nexar.group import Group, deadline_after
from nexar.links.messages import collective_tag
from nexar.links.sending import MessageHeader
from nexar.wire.frame import Space
from tests.processes.talk import await_that
from tests.ranks import EVENT_TIMEOUT, on_every

SIZE = 3
ALL_REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 8, 0, ReduceCode.SUM)
SHORTER = ALL_REDUCE._replace(count=4)
BROADCAST = Fingerprint(OperationCode.BROADCAST, 11, 8, rooted(0))


class Caller:
    """One rank."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.call_log = CallLog(group)
        self.rank = group.rank

    def call(
        self, fingerprint: Fingerprint = ALL_REDUCE, *, size_bytes: int = 32, timeout: float = EVENT_TIMEOUT
    ) -> None:
        entry = self.call_log.begin(fingerprint)
        operation, dtype, count, root, reduce_op, way = fingerprint
        about = MessageHeader(
            Space.COLLECTIVE, 0, dtype, entry.sequence, 0, operation, reduce_op, root, count, way,
        )  # fmt: skip
        others = [rank for rank in range(self.group.size) if rank != self.rank]
        posted = []
        try:
            if entry.error is not None:
                raise entry.error
            for rank in others:
                into = memoryview(bytearray(size_bytes))
                tag = collective_tag(entry.sequence, 0)
                posted.append(self.group.post_receive(rank, into, space=Space.COLLECTIVE, tag=tag, dtype=dtype))
            sent = [
                self.group.post_send(rank, memoryview(bytes(size_bytes)), deadline_after(timeout), about=about)
                for rank in others
            ]
            posted.extend(sent)  # type: ignore[arg-type]
            deadline = deadline_after(timeout)
            while True:
                try:
                    self.group.wait(posted, deadline, entry, keep=True)
                    break
                except OperationTimeout as late:
                    deadline = self.call_log.progress_inquiry.extend(entry, late, timeout)
        except NexarError as error:
            for each in posted:
                each.cancel()
            raise self.call_log.end(entry, error) or error from None
        difference = self.call_log.end(entry)
        if difference is not None:
            raise difference


@contextmanager
def callers(size: int = SIZE) -> Iterator[list[Caller]]:
    with local_communicators(size, Config()) as world:
        yield [Caller(communicator._group) for communicator in world]


def outcome(caller: Caller, fingerprint: Fingerprint, **how: float) -> NexarError | None:
    try:
        caller.call(fingerprint, **how)  # type: ignore[arg-type]
    except NexarError as error:
        return error
    return None


@pytest.mark.parametrize("other", [SHORTER, BROADCAST, ALL_REDUCE._replace(dtype=4)])
def test_a_mismatch_raises_on_every_rank_and_says_who_did_what(other: Fingerprint) -> None:
    with callers() as ranks:
        began = time.monotonic()
        size = {SHORTER: 16}.get(other, 32)

        def run(caller: Caller) -> NexarError | None:
            differs = caller.rank == 1
            return outcome(caller, other if differs else ALL_REDUCE, size_bytes=size if differs else 32)

        ends = on_every(ranks, run)
        assert time.monotonic() - began < EVENT_TIMEOUT
        for rank, end in enumerate(ends):
            error = end or outcome(ranks[rank], ALL_REDUCE)  # who had all that it wanted raises at its next call
            assert isinstance(error, CollectiveMismatch), error
            assert error.calls is not None
            assert error.calls[1] == other.describe()
        for caller in ranks:
            assert isinstance(outcome(caller, ALL_REDUCE), CollectiveMismatch)


def test_who_comes_too_late_is_named_on_every_rank_and_the_next_call_works() -> None:
    with callers() as ranks:
        on_every(ranks, lambda caller: caller.call())
        gave_up = threading.Barrier(SIZE)

        def run(caller: Caller) -> NexarError | None:
            if caller.rank == 2:
                gave_up.wait(EVENT_TIMEOUT)
                await_that(lambda: bool(caller.call_log._aborted), "word of it")  # else it might still do its part
            error = outcome(caller, ALL_REDUCE, timeout=0.3)
            if caller.rank != 2:
                gave_up.wait(EVENT_TIMEOUT)
            return error

        for error in on_every(ranks, run):
            assert isinstance(error, CollectiveTimeout), error
            assert error.sequence == 1
            assert [(peer.rank, peer.last_operation) for peer in error.waiting_for] == [(2, "all_reduce #0")]
        on_every(ranks, lambda caller: caller.call())


def test_a_large_message_to_who_gave_up_does_not_keep_its_sender() -> None:
    with callers(2) as ranks:
        left = threading.Event()

        def run(caller: Caller) -> NexarError | None:
            if caller.rank == 0:
                entry = caller.call_log.begin(ALL_REDUCE)
                caller.call_log.end(entry, KeyboardInterrupt())
                left.set()
                return None
            left.wait(EVENT_TIMEOUT)
            return outcome(caller, ALL_REDUCE, size_bytes=1 << 20)

        error = on_every(ranks, run)[1]
        assert isinstance(error, Cancelled)
        assert error.rank == 0
        assert "KeyboardInterrupt" in str(error)
        on_every(ranks, lambda caller: caller.call(size_bytes=1 << 20))


def test_who_gives_up_in_the_middle_ends_the_call_of_those_who_wait() -> None:
    with callers() as ranks:
        waiting = threading.Event()

        def run(caller: Caller) -> NexarError | None:
            if caller.rank == 0:
                waiting.wait(EVENT_TIMEOUT)
                entry = caller.call_log.begin(ALL_REDUCE)
                caller.call_log.end(entry, Cancelled(operation=entry.name, reason="enough"))
                return None
            if caller.rank == 1:
                waiting.set()
            return outcome(caller, ALL_REDUCE)

        for error in on_every(ranks, run)[1:]:
            assert isinstance(error, Cancelled)
            assert (error.rank, error.reason) == (0, "enough")


def test_a_rank_that_makes_steps_is_waited_for_beyond_the_deadline() -> None:
    with callers(2) as ranks:
        finish = threading.Event()

        def run(caller: Caller) -> NexarError | None:
            if caller.rank == 0:
                error = outcome(caller, ALL_REDUCE, timeout=0.2)
                finish.set()
                return error
            entry = caller.call_log.begin(ALL_REDUCE)
            while not finish.wait(0.05):
                entry.moved()
                if entry.step == 15:  # three times the deadline of the other
                    about = MessageHeader(Space.COLLECTIVE, 0, 11, 0, 0, 2, 1, 0, 8)
                    caller.group.post_send(0, memoryview(bytes(32)), deadline_after(EVENT_TIMEOUT), about=about)
            caller.call_log.end(entry)
            return None

        assert on_every(ranks, run) == [None, None]


def test_what_it_cost_is_counted_on_every_rank() -> None:
    with callers() as ranks:
        for _ in range(10):
            on_every(ranks, lambda caller: caller.call())
        for caller in ranks:
            stats = caller.call_log.stats()
            assert stats["operations"]["all_reduce"]["calls"] == 10
            assert stats["bytes"] == 10 * 32
            assert {each.rank for each in caller.call_log.stragglers()} == set(range(SIZE))
            assert len(caller.call_log.recorder.snapshot()) == 10
