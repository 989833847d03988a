"""What a rank does about a call that lasts: it tells the others, asks them, and judges whether to wait any longer.

Who is slow is waited for, who is missing is named: see `extend`.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from copy import copy
from dataclasses import replace
from time import monotonic
from typing import Final

from nexar.collectives.entry import Entry
from nexar.collectives.inquiry import Inquiry, explained, verdict
from nexar.collectives.voice import Members, Voice
from nexar.errors import CollectiveTimeout, NexarError, OperationTimeout
from nexar.links.operation import Operation
from nexar.types import AwaitedPeer, Rank
from nexar.wire.messages import Inquire, Report

_PATIENCE: Final = 0.5  # seconds for answers, and for word from somebody who knows more
_FIRST_WORD: Final = 5.0  # seconds for the word of who gave a call up: it is sent, but its process may get no core
_CHATTER_BYTES: Final = 64 << 10  # that links carry without a transfer being under way
_NO_CALL: Final = -1  # in place of a sequence


class Patience:
    """Of one generation of one communicator. Any thread, without the node's lock."""

    def __init__(self, group: Members, voice: Voice) -> None:
        self._group = group
        self._voice = voice
        self._about: Final = group.communicator, group.matching.generation
        self._lock: threading.Lock = group.matching.lock
        self._inquiries: dict[int, Inquiry] = {}  # under the lock
        self._numbers = itertools.count(1)

    def declare(self, entry: Entry) -> None:
        """Tell the others what this call is. For one that lasts: a rank that only receives, from one that only
        receives, would not hear of a difference before the deadline. Never blocks.

        From now on the bytes of its links count as progress too: one step may be one large message.
        """
        entry.carried = self._group.carried_bytes()
        for link in self._voice.links().values():
            self._voice.say(link, Inquire(*self._about, entry.sequence, 0, entry.fingerprint))

    def extend(self, entry: Entry, late: OperationTimeout, timeout: float) -> float:
        """The deadline of the call has come, as `late` says. Returns the next one if somebody has made a step of the
        call since `timeout` ago; else raises CollectiveTimeout, or what ended the call meanwhile. Takes half a second
        at most.

        Those for whom this rank waits are named only if nobody who was asked is to blame.
        """
        if entry.error is not None:
            raise copy(entry.error)
        self.look_at_bytes(entry)
        limit = monotonic() + _PATIENCE
        inquiry = self._ask(Inquire(*self._about, entry.sequence, 0, entry.fingerprint), limit, alarm=entry)
        outcome = verdict(entry, inquiry.asked, inquiry.reports, now=monotonic(), timeout=timeout)
        if isinstance(outcome, float):
            return outcome
        if not outcome:
            self._wait(entry, limit, entry)  # somebody else waits for who is missing, and will say so
        raise CollectiveTimeout(
            operation=entry.operation,
            sequence=entry.sequence,
            waiting_for=outcome or late.waiting_for or "ranks that it has no link to",
            timeout=timeout,
        ) from late

    def explain(self, late: OperationTimeout, waited: float | None = None) -> OperationTimeout:
        """The same, of what is no collective, with what those who were waited for say of themselves. Takes half a
        second at most; a rank that does not answer is named as before. `waited`: all the seconds, where `late` tells
        only of the last of them.
        """
        if isinstance(late.waiting_for, str) or isinstance(late, CollectiveTimeout):
            return late
        ranks = {peer.rank for peer in late.waiting_for if peer.rank is not None}
        with suppress(NexarError):  # the node is closing, say: what is known already must do
            inquiry = self._ask(Inquire(*self._about, _NO_CALL), monotonic() + _PATIENCE, ranks)
            waiting = [_with_report(peer, inquiry) for peer in late.waiting_for]
            return OperationTimeout(operation=late.operation, waiting_for=waiting, timeout=waited or late.timeout)
        return late

    def hear(self, entry: Entry) -> None:
        """Another rank has given up this call, as shared memory shows: wait until it says why, or is lost; for five
        seconds at most.
        """
        with suppress(NexarError):  # what it says is the entry's
            self._group.wait((entry,), monotonic() + _FIRST_WORD)

    def answered(self, rank: Rank, report: Report) -> None:
        """Of who was asked. On the driving thread."""
        with self._lock:
            inquiry = self._inquiries.get(report.number)
            if inquiry is not None:
                inquiry.answer(rank, report)

    def look_at_bytes(self, entry: Entry) -> None:
        """A slow transfer is not a dead one."""
        carried = self._group.carried_bytes()
        if entry.carried is not None and carried - entry.carried > _CHATTER_BYTES:
            entry.moved_at = monotonic()
        entry.carried = carried

    def _ask(
        self, question: Inquire, deadline: float, ranks: set[Rank] | None = None, alarm: Entry | None = None
    ) -> Inquiry:
        """Returns when all have answered (those of `ranks`, if they are given), or at the deadline. Raises what ended
        the call meanwhile.
        """
        links = {rank: link for rank, link in self._voice.links().items() if ranks is None or rank in ranks}
        number = next(self._numbers)
        inquiry = Inquiry(self._lock, {rank: self._voice.known(rank) for rank in links})
        with self._lock:
            self._inquiries[number] = inquiry
        for link in links.values():
            self._voice.say(link, Inquire(*self._about, question.sequence, number, question.call))
        try:
            if links:
                self._wait(inquiry, deadline, alarm)
        finally:
            with self._lock:
                del self._inquiries[number]
        return inquiry

    def _wait(self, operation: Operation, deadline: float, alarm: Entry | None) -> None:
        with suppress(OperationTimeout):  # an answer that does not come is an answer
            self._group.wait((operation,), deadline, alarm)
        if alarm is not None and alarm.error is not None:
            raise copy(alarm.error)


def _with_report(peer: AwaitedPeer, inquiry: Inquiry) -> AwaitedPeer:
    if peer.rank is None or peer.rank not in inquiry.asked:
        return peer
    report = inquiry.reports.get(peer.rank)
    if report is not None:
        return explained(peer, report)
    return replace(peer, missing=f"{peer.missing} and any answer", last_heard=inquiry.asked[peer.rank].last_heard)
