"""Runs the schedules of all ranks in one thread, exactly as the vocabulary says, and no cleverer than that."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from nexar.collectives.schedule import Combine, LocalCopy, LocalFold, Range, Step


class Deadlock(AssertionError):
    """Every rank waits for a message that nobody will send."""


class Arithmetic(Protocol):
    """What ⊕ is. `out` may be one of the operands of `combine`."""

    def combine(self, out, left, right) -> None: ...

    def fold(self, out, inputs) -> None: ...


class Interpreter:
    """`memories[rank]` are the buffers of a rank, flat arrays: they hold the outcome afterwards."""

    def __init__(self, schedules: Sequence[Sequence[Step]], memories, arithmetic: Arithmetic) -> None:
        self._schedules = schedules
        self._memories = memories
        self._arithmetic = arithmetic
        self._next = [0] * len(schedules)
        self._in_flight = {}

    def run(self) -> None:
        """Until all ranks are done; Deadlock when none can go on. No message is left over."""
        ranks = range(len(self._schedules))
        for rank in ranks:
            self._send(rank)
        waiting = [rank for rank in ranks if not self._done(rank)]
        while waiting:
            if not sum(self._go_on(rank) for rank in waiting):
                raise Deadlock(f"ranks {waiting} at steps {[self._next[rank] for rank in waiting]}")
            waiting = [rank for rank in waiting if not self._done(rank)]
        assert not self._in_flight

    def _done(self, rank: int) -> bool:
        return self._next[rank] == len(self._schedules[rank])

    def _go_on(self, rank: int) -> bool:
        """As far as the messages that are there allow."""
        began = self._next[rank]
        while not self._done(rank) and self._receive(rank):
            self._next[rank] += 1
            self._send(rank)
        return self._next[rank] > began

    def _send(self, rank: int) -> None:
        if not self._done(rank):
            for send in self._schedules[rank][self._next[rank]].sends:
                way = rank, send.peer, send.tag
                assert way not in self._in_flight, f"tag used twice: {way}"
                self._in_flight[way] = self._at(rank, send.part).copy()

    def _receive(self, rank: int) -> bool:
        step = self._schedules[rank][self._next[rank]]
        ways = [(receive.peer, rank, receive.tag) for receive in step.receives]
        if not all(way in self._in_flight for way in ways):
            return False
        for way, receive in zip(ways, step.receives, strict=True):
            self._put(self._at(rank, receive.part), self._in_flight.pop(way), receive.how)
        for work in step.then:
            self._do(rank, work)
        return True

    def _do(self, rank: int, work: LocalCopy | LocalFold) -> None:
        into = self._at(rank, work.into)
        if isinstance(work, LocalFold):
            self._arithmetic.fold(into, [self._at(rank, source) for source in work.sources])
        else:
            self._put(into, self._at(rank, work.source), work.how)

    def _put(self, into, data, how: Combine) -> None:
        if how is Combine.COPY:
            np.copyto(into, data)
        elif how is Combine.BEFORE:
            self._arithmetic.combine(into, data, into)
        else:
            self._arithmetic.combine(into, into, data)

    def _at(self, rank: int, part: Range):
        return self._memories[rank][part.buffer][part.start : part.stop]
