"""The deadline of a call has come: is somebody missing, or is it only slow? The others are asked.

Each answers at once, on the thread that drives its node, so that it does so while its user computes. Who does not is
stopped, or holds the GIL, or its machine is gone.

What a rank does about a call that lasts: it tells the others, asks them, and judges whether to wait any longer.

Who is slow is waited for, who is missing is named: see `extend`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import replace
from time import monotonic
from typing import Final

from nexar.collectives.call import Call
from nexar.collectives.call_notices import GroupView, NoticeSender
from nexar.errors import CollectiveTimeout, NexarError, OperationTimeout
from nexar.links.operation import Operation
from nexar.types import AwaitedPeer, Rank, format_seconds
from nexar.wire.control import ProgressQuery, ProgressReply

USER_CODE: Final = "user code"
"""Where a rank is that is in no call of ours."""
_LONGEST: Final = 1e9  # seconds that a rank can say it has been somewhere; a peer may write anything


class InquiryAnswers(Operation):
    """Done when all have answered."""

    __slots__ = ("asked", "reports")

    def __init__(self, lock: threading.Lock, asked: Mapping[Rank, AwaitedPeer]) -> None:
        """`asked`: with what is known of each."""
        super().__init__(lock)
        self.asked = asked
        self.reports: dict[Rank, ProgressReply] = {}

    @property
    def name(self) -> str:
        """As errors call it."""
        return "asking the other ranks"

    def awaited(self) -> AwaitedPeer:
        """One that has not answered."""
        return next((peer for rank, peer in self.asked.items() if rank not in self.reports), AwaitedPeer())

    def cancel(self) -> None:
        """Nothing is borrowed."""

    def answer(self, rank: Rank, report: ProgressReply) -> None:
        """Under the node's lock."""
        if rank in self.asked:
            self.reports[rank] = report
            if len(self.reports) == len(self.asked):
                self.finish()


def decide(
    entry: Call, asked: Mapping[Rank, AwaitedPeer], reports: Mapping[Rank, ProgressReply], *, now: float, timeout: float
) -> float | tuple[AwaitedPeer, ...]:
    """Pure. A later deadline, if this rank or another has made a step of the call within the timeout; else those to
    blame. Empty: all who were asked are in it, so whoever is missing is known to somebody else.

    Coming to the call is a step of it. Being alive is none, nor having finished it.
    """
    ages = [report.progress_age for report in reports.values() if report.state == "in"]
    newest = max([entry.moved_at, *(now - age for age in ages if age >= 0)])
    if newest + timeout > now:
        return newest + timeout
    blamed = [_blame(entry.name, known, reports.get(rank)) for rank, known in asked.items()]
    return tuple(each for each in blamed if each is not None)


def _blame(call: str, known: AwaitedPeer, report: ProgressReply | None) -> AwaitedPeer | None:
    if report is None:
        return replace(known, missing=f"{call} and any answer")
    if report.state in ("in", "done"):
        return None
    missing = f"{call} (it gave it up)" if report.state == "failed" else call
    return replace(explained(known, report), missing=missing)


def explained(known: AwaitedPeer, report: ProgressReply) -> AwaitedPeer:
    """With what it has just said of itself: so it is alive, wherever it is."""
    return replace(known, last_heard=0.0, last_operation=report.finished, current_operation=_place(report))


def _place(report: ProgressReply) -> str:
    doing = report.doing or USER_CODE
    return f"{doing} for {format_seconds(report.since)}" if 0 < report.since < _LONGEST else doing


_INQUIRY_TIMEOUT: Final = 0.5  # seconds for answers, and for word from somebody who knows more
_FIRST_NOTICE: Final = 5.0  # seconds for the word of who gave a call up: it is sent, but its process may get no core
_CONTROL_BYTES: Final = 64 << 10  # that links carry without a transfer being under way
_NO_CALL: Final = -1  # in place of a sequence


class ProgressInquiry:
    """Of one generation of one communicator. Any thread, without the node's lock."""

    def __init__(self, group: GroupView, notice_sender: NoticeSender) -> None:
        self._group = group
        self._notice_sender = notice_sender
        self._about: Final = group.communicator, group.matching.generation
        self._lock: threading.Lock = group.matching.lock
        self._inquiries: dict[int, InquiryAnswers] = {}  # under the lock
        self._numbers = itertools.count(1)

    def declare(self, entry: Call) -> None:
        """Tell the others what this call is. For one that lasts: a rank that only receives, from one that only
        receives, would not hear of a difference before the deadline. Never blocks.

        From now on the bytes of its links count as progress too: one step may be one large message.
        """
        entry.carried = self._group.carried_bytes()
        for link in self._notice_sender.links().values():
            self._notice_sender.say(link, ProgressQuery(*self._about, entry.sequence, 0, entry.fingerprint))

    def extend(self, entry: Call, late: OperationTimeout, timeout: float) -> float:
        """The deadline of the call has come, as `late` says. Returns the next one if somebody has made a step of the
        call since `timeout` ago; else raises CollectiveTimeout, or what ended the call meanwhile. Takes half a second
        at most.

        Those for whom this rank waits are named only if nobody who was asked is to blame.
        """
        if entry.error is not None:
            raise copy(entry.error)
        self.look_at_bytes(entry)
        limit = monotonic() + _INQUIRY_TIMEOUT
        inquiry = self._ask(ProgressQuery(*self._about, entry.sequence, 0, entry.fingerprint), limit, alarm=entry)
        outcome = decide(entry, inquiry.asked, inquiry.reports, now=monotonic(), timeout=timeout)
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
            inquiry = self._ask(ProgressQuery(*self._about, _NO_CALL), monotonic() + _INQUIRY_TIMEOUT, ranks)
            waiting = [_with_report(peer, inquiry) for peer in late.waiting_for]
            return OperationTimeout(operation=late.operation, waiting_for=waiting, timeout=waited or late.timeout)
        return late

    def hear(self, entry: Call) -> None:
        """Another rank has given up this call, as shared memory shows: wait until it says why, or is lost; for five
        seconds at most.
        """
        with suppress(NexarError):  # what it says is the entry's
            self._group.wait((entry,), monotonic() + _FIRST_NOTICE)

    def answered(self, rank: Rank, report: ProgressReply) -> None:
        """Of who was asked. On the driving thread."""
        with self._lock:
            inquiry = self._inquiries.get(report.number)
            if inquiry is not None:
                inquiry.answer(rank, report)

    def look_at_bytes(self, entry: Call) -> None:
        """A slow transfer is not a dead one."""
        carried = self._group.carried_bytes()
        if entry.carried is not None and carried - entry.carried > _CONTROL_BYTES:
            entry.moved_at = monotonic()
        entry.carried = carried

    def _ask(
        self, question: ProgressQuery, deadline: float, ranks: set[Rank] | None = None, alarm: Call | None = None
    ) -> InquiryAnswers:
        """Returns when all have answered (those of `ranks`, if they are given), or at the deadline. Raises what ended
        the call meanwhile.
        """
        links = {rank: link for rank, link in self._notice_sender.links().items() if ranks is None or rank in ranks}
        number = next(self._numbers)
        inquiry = InquiryAnswers(self._lock, {rank: self._notice_sender.known(rank) for rank in links})
        with self._lock:
            self._inquiries[number] = inquiry
        for link in links.values():
            self._notice_sender.say(link, ProgressQuery(*self._about, question.sequence, number, question.call))
        try:
            if links:
                self._wait(inquiry, deadline, alarm)
        finally:
            with self._lock:
                del self._inquiries[number]
        return inquiry

    def _wait(self, operation: Operation, deadline: float, alarm: Call | None) -> None:
        with suppress(OperationTimeout):  # an answer that does not come is an answer
            self._group.wait((operation,), deadline, alarm)
        if alarm is not None and alarm.error is not None:
            raise copy(alarm.error)


def _with_report(peer: AwaitedPeer, inquiry: InquiryAnswers) -> AwaitedPeer:
    if peer.rank is None or peer.rank not in inquiry.asked:
        return peer
    report = inquiry.reports.get(peer.rank)
    if report is not None:
        return explained(peer, report)
    return replace(peer, missing=f"{peer.missing} and any answer", last_heard=inquiry.asked[peer.rank].last_heard)
