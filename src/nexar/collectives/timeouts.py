"""Deadlines of calls: asks the other ranks for their progress, then extends the deadline or names the missing ranks.

Drivers answer at once. A rank without an answer is stopped, holds the GIL, or is gone.
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
from nexar.collectives.call_notices import NoticeSender
from nexar.errors import CollectiveTimeout, NexarError, OperationTimeout
from nexar.group import Group
from nexar.links.operation import Operation
from nexar.types import AwaitedPeer, Rank, format_seconds
from nexar.wire.control import ProgressQuery, ProgressReply

USER_CODE: Final = "user code"
"""Shown for a rank that is in no call."""
_MAX_SECONDS: Final = 1e9  # limit for a duration in seconds that a peer reports; a peer may send any number


class InquiryAnswers(Operation):
    """Replies to one progress inquiry. Done when all have arrived."""

    __slots__ = ("asked", "reports")

    def __init__(self, lock: threading.Lock, asked: Mapping[Rank, AwaitedPeer]) -> None:
        super().__init__(lock)
        self.asked = asked
        self.reports: dict[Rank, ProgressReply] = {}

    @property
    def name(self) -> str:
        return "asking the other ranks"

    def awaited(self) -> AwaitedPeer:
        return next((peer for rank, peer in self.asked.items() if rank not in self.reports), AwaitedPeer())

    def cancel(self) -> None:
        """Does nothing: there are no buffers."""

    def answer(self, rank: Rank, report: ProgressReply) -> None:
        """Requires the node's lock."""
        if rank in self.asked:
            self.reports[rank] = report
            if len(self.reports) == len(self.asked):
                self.finish()


def decide(
    entry: Call, asked: Mapping[Rank, AwaitedPeer], reports: Mapping[Rank, ProgressReply], *, now: float, timeout: float
) -> float | tuple[AwaitedPeer, ...]:
    """Returns a later deadline if any rank made a step within the timeout, else the ranks to blame. Pure.

    No rank to blame: another rank knows the missing one. Entering the call is a step; being alive or having finished is
    not.
    """
    ages = [report.progress_age for report in reports.values() if report.state == "in"]
    newest = max([entry.moved_at, *(now - age for age in ages if age >= 0)])
    if newest + timeout > now:
        return newest + timeout
    blamed = [_missing_peer(entry.name, known, reports.get(rank)) for rank, known in asked.items()]
    return tuple(each for each in blamed if each is not None)


def _missing_peer(call: str, known: AwaitedPeer, report: ProgressReply | None) -> AwaitedPeer | None:
    if report is None:
        return replace(known, missing=f"{call}, it did not answer")
    if report.state in ("in", "done"):
        return None
    missing = f"{call} (it aborted the call)" if report.state == "failed" else call
    return replace(with_reply(known, report), missing=missing)


def with_reply(known: AwaitedPeer, report: ProgressReply) -> AwaitedPeer:
    """The peer with the facts of its reply."""
    return replace(known, last_heard=0.0, last_operation=report.finished, current_operation=_activity(report))


def _activity(report: ProgressReply) -> str:
    doing = report.doing or USER_CODE
    return f"{doing} for {format_seconds(report.since)}" if 0 < report.since < _MAX_SECONDS else doing


_INQUIRY_TIMEOUT: Final = 0.5  # seconds to wait for replies, and for a notice from a better-informed rank
_FIRST_NOTICE: Final = 5.0  # seconds to wait for an abort notice; it was sent, but its process may get no CPU
_CONTROL_BYTES: Final = 64 << 10  # bytes that links carry without a transfer in progress
_NO_CALL: Final = -1  # in place of a sequence number


class ProgressInquiry:
    """Progress inquiries of one communicator generation. Any thread, without the node's lock."""

    def __init__(self, group: Group, notice_sender: NoticeSender) -> None:
        self._group = group
        self._notice_sender = notice_sender
        self._about: Final = group.communicator, group.matching.generation
        self._lock: threading.Lock = group.matching.lock
        self._inquiries: dict[int, InquiryAnswers] = {}  # guarded by the lock
        self._numbers = itertools.count(1)

    def declare(self, entry: Call) -> None:
        """Send the fingerprint of a long call, so that two ranks that only receive detect a mismatch. Never blocks.
        From now on bytes on the links count as progress, because a step may be one large message.
        """
        entry.carried = self._group.carried_bytes()
        for link in self._notice_sender.links().values():
            self._notice_sender.send(link, ProgressQuery(*self._about, entry.sequence, 0, entry.fingerprint))

    def extend(self, entry: Call, late: OperationTimeout, timeout: float) -> float:
        """Returns the next deadline if a rank made a step within `timeout` seconds; else raises CollectiveTimeout or
        the error that ended the call. Blocks for half a second at most.
        """
        if entry.error is not None:
            raise copy(entry.error)
        self.count_link_bytes(entry)
        limit = monotonic() + _INQUIRY_TIMEOUT
        inquiry = self._ask(
            ProgressQuery(*self._about, entry.sequence, 0, entry.fingerprint), limit, abort_signal=entry
        )
        outcome = decide(entry, inquiry.asked, inquiry.reports, now=monotonic(), timeout=timeout)
        if isinstance(outcome, float):
            return outcome
        if not outcome:
            self._wait(entry, limit, entry)  # the rank that waits for the missing one sends a notice
        raise CollectiveTimeout(
            operation=entry.operation,
            sequence=entry.sequence,
            waiting_for=outcome or late.waiting_for or "ranks that it has no link to",
            timeout=timeout,
        ) from late

    def explain(self, late: OperationTimeout, waited: float | None = None) -> OperationTimeout:
        """Returns the timeout of another operation with the awaited ranks' reports. Blocks for half a second at most.
        `waited`: total seconds.
        """
        if isinstance(late.waiting_for, str) or isinstance(late, CollectiveTimeout):
            return late
        ranks = {peer.rank for peer in late.waiting_for if peer.rank is not None}
        with suppress(NexarError):  # for example while the node closes: return what is known
            inquiry = self._ask(ProgressQuery(*self._about, _NO_CALL), monotonic() + _INQUIRY_TIMEOUT, ranks)
            waiting = [_with_report(peer, inquiry) for peer in late.waiting_for]
            return OperationTimeout(operation=late.operation, waiting_for=waiting, timeout=waited or late.timeout)
        return late

    def await_notice(self, entry: Call) -> None:
        """Wait at most five seconds for the notice of a rank that aborted this call."""
        with suppress(NexarError):  # the error is in `entry`
            self._group.wait((entry,), monotonic() + _FIRST_NOTICE)

    def answered(self, rank: Rank, report: ProgressReply) -> None:
        """The driver calls this."""
        with self._lock:
            inquiry = self._inquiries.get(report.number)
            if inquiry is not None:
                inquiry.answer(rank, report)

    def count_link_bytes(self, entry: Call) -> None:
        """Counts a slow transfer as progress."""
        carried = self._group.carried_bytes()
        if entry.carried is not None and carried - entry.carried > _CONTROL_BYTES:
            entry.moved_at = monotonic()
        entry.carried = carried

    def _ask(
        self, question: ProgressQuery, deadline: float, ranks: set[Rank] | None = None, abort_signal: Call | None = None
    ) -> InquiryAnswers:
        """Returns when all have replied, or at the deadline. Raises the error that ended the call."""
        links = {rank: link for rank, link in self._notice_sender.links().items() if ranks is None or rank in ranks}
        number = next(self._numbers)
        inquiry = InquiryAnswers(self._lock, {rank: self._notice_sender.known(rank) for rank in links})
        with self._lock:
            self._inquiries[number] = inquiry
        for link in links.values():
            self._notice_sender.send(link, ProgressQuery(*self._about, question.sequence, number, question.call))
        try:
            if links:
                self._wait(inquiry, deadline, abort_signal)
        finally:
            with self._lock:
                del self._inquiries[number]
        return inquiry

    def _wait(self, operation: Operation, deadline: float, abort_signal: Call | None) -> None:
        with suppress(OperationTimeout):  # a missing reply is a result too
            self._group.wait((operation,), deadline, abort_signal)
        if abort_signal is not None and abort_signal.error is not None:
            raise copy(abort_signal.error)


def _with_report(peer: AwaitedPeer, inquiry: InquiryAnswers) -> AwaitedPeer:
    if peer.rank is None or peer.rank not in inquiry.asked:
        return peer
    report = inquiry.reports.get(peer.rank)
    if report is not None:
        return with_reply(peer, report)
    return replace(peer, missing=f"{peer.missing}, it did not answer", last_heard=inquiry.asked[peer.rank].last_heard)
