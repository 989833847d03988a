"""The call log of one communicator: numbers, records and ends its collective calls.

Ranks match calls by sequence number only, so all ranks must make the same calls in the same order, across threads. A
rank that detects a mismatch or aborts a call notifies the others over open links; each forwards the notice once. A
mismatch ends that call and all later ones on all ranks; an abort ends one call. A skipped call followed by an identical
one cannot be detected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from copy import copy
from functools import cache
from time import monotonic
from typing import Any, Final

from nexar.arrays.dtypes import dtype_of
from nexar.collectives.call import Call, call_name
from nexar.collectives.call_notices import (
    AbortedCalls,
    AbortReason,
    ClosingNotice,
    NoticeSender,
    error_of,
    mismatch_of,
    peers_of,
    timeout_caused_here,
    with_call_name,
)
from nexar.collectives.fingerprint import Fingerprint, operation_name
from nexar.collectives.statistics import KEPT, CallTotals, RecentCalls, Straggler, StragglerEstimate
from nexar.collectives.timeouts import ProgressInquiry
from nexar.errors import Cancelled, CollectiveMismatch, NexarError
from nexar.group import Group
from nexar.links.link import Link
from nexar.links.mismatch_detector import CallFacts
from nexar.links.router import Notice
from nexar.types import NodeId, Rank
from nexar.wire.control import CallAborted, CallMismatch, ProgressQuery, ProgressReply

_REPORTED: Final = 64  # calls in one mismatch notice


@cache
def item_bytes(dtype: int) -> int:
    """Returns the item size; 0 for unknown dtypes."""
    found = dtype_of(dtype)
    return 0 if found is None else found.itemsize


class CallLog:
    """The call log of one communicator generation. Thread-safe."""

    def __init__(
        self,
        group: Group,
        *,
        kept: int = KEPT,
        other_activity: Callable[[int, int], tuple[str, float] | None] = lambda *_: None,
    ) -> None:
        """`other_activity(communicator, generation)` returns what this node does elsewhere and since when, or None. It
        takes no lock.
        """
        self._other_activity = other_activity
        self._group = group
        self._notice_sender = NoticeSender(group)
        self.progress_inquiry: Final = ProgressInquiry(group, self._notice_sender)
        self._rank = group.rank
        self._about: Final = group.communicator, group.matching.generation
        self._lock: threading.Lock = group.matching.lock  # guards all fields below
        self._deferred_io = group.router.deferred_io
        self._mismatch_detector = group.matching.mismatch_detector
        self._mismatch_detector.on_mismatch = self._on_difference
        self._next = 0
        self._open: dict[int, Call] = {}
        self._last_success: tuple[int, int, float] | None = None  # last successful call: operation, sequence, end
        self._highest = -1  # highest successful sequence number; calls may end out of order
        self._aborted = AbortedCalls()
        self._closing_notice: ClosingNotice | None = None  # set once the user has closed the communicator here
        self._mismatched_calls: dict[Rank, CallFacts] | None = None  # of the first mismatch, which ends all later calls
        self._mismatch_sequence = 0  # sequence number of that mismatch
        self._interrupted_by: NexarError | None = None  # the error of all further calls, because the membership changes
        self._totals = CallTotals()
        self._straggler_estimate = StragglerEstimate(group.membership.members[self._rank].node)
        self.recorder: Final = RecentCalls(kept)
        self.on_failure: Callable[[BaseException], None] | None = None
        """Called without the lock with each error that a call raises or that this rank causes elsewhere. Written once,
        before the first call.
        """
        self.closed = False  # written by close()
        self._idle_since = monotonic()  # when a call last failed, or the creation time
        group.matching.peers.update(peers_of(group.membership))
        group.router.notices.open(*self._about, self.receive)

    # -- calls ---------------------------------------------------------------------------------------------

    def begin(self, fingerprint: Fingerprint) -> Call:
        """The caller must end the call, at once if it has an error. Raises CollectiveMismatch after a mismatch."""
        with self._lock:
            if self._mismatched_calls is None:
                sequence = self._next
                self._next = sequence + 1
                entry = Call(self._lock, sequence, fingerprint)
                self._enter(entry)
                return entry
            error = self._mismatch_at(self._next, fingerprint)
        self._failed(error)
        raise error

    def take(self) -> int | None:
        """Returns the number of a call that should succeed at once, for `note` or `adopt`. None: the call has an error
        or a notice; use `begin`.
        """
        with self._lock:
            sequence = self._next
            amiss = self._mismatched_calls is not None or self._interrupted_by is not None
            if (
                amiss
                or (self._aborted and self._aborted.find(sequence))
                or self._mismatch_detector.is_announced(sequence)
            ):
                return None
            self._next = sequence + 1
            return sequence

    def note(self, sequence: int, fingerprint: Fingerprint, size_bytes: int, began: float) -> None:
        ended = monotonic()
        operation = fingerprint[0]
        self.recorder.record((sequence, fingerprint, began, ended, size_bytes, ""))
        with self._lock:
            self._last_success = operation, sequence, ended
            if sequence > self._highest:  # noqa: PLR1730 - max() would be a call on the fastest path
                self._highest = sequence
            self._totals.count(operation, size_bytes, ended - began, 0.0, "")

    def adopt(self, sequence: int, fingerprint: Fingerprint, began: float) -> Call:
        with self._lock:
            entry = Call(self._lock, sequence, fingerprint)
            entry.began = began
            self._enter(entry)
        return entry

    def _enter(self, entry: Call) -> None:
        """Requires the lock."""
        sequence = entry.sequence
        self._open[sequence] = entry
        entry.arrivals = self._mismatch_detector.begin(sequence, entry.fingerprint)
        if self._mismatched_calls is not None and sequence >= self._mismatch_sequence:
            # the mismatch was seen between take() and adopt()
            entry.finish(self._mismatch_at(sequence, entry.fingerprint))
        elif self._interrupted_by is not None:
            entry.finish(copy(self._interrupted_by))
        elif self._aborted and (notice := self._aborted.find(sequence)):
            entry.finish(error_of(notice, entry, self._notice_sender.known, self._rank))

    def end(
        self, entry: Call, error: BaseException | None = None, arrivals: Mapping[Rank, float] | None = None
    ) -> BaseException | None:
        """End a call without posted operations. Returns the error to raise, or None.

        Another rank's error takes precedence; else the others are notified of `error`. A completed call that mismatched
        fails with CollectiveMismatch, because its result is wrong. `arrivals` replace the less precise times of frames.
        """
        if error is None and isinstance(entry.error, CollectiveMismatch):
            error = entry.error
        if error is not None:
            return self._end_failed(entry, error)
        ended = monotonic()
        with self._lock:
            entry.finish()
            del self._open[entry.sequence]
            self._mismatch_detector.end(entry.sequence)
            self._last_success = entry.fingerprint.operation, entry.sequence, ended
            self._highest = max(self._highest, entry.sequence)
            self._count(entry, ended, "", arrivals)
        return None

    def interrupt(self, error: NexarError) -> None:
        """End all open and later calls with `error`: the membership changes. Notifies no rank. Not under the lock."""
        with self._lock:
            self._interrupted_by = self._interrupted_by or error
            for entry in list(self._open.values()):
                entry.finish(copy(error))
        self._deferred_io.flush()

    @property
    def completed(self) -> int:
        """The last call that succeeded with all before it; -1 if none."""
        with self._lock:
            return min(self._highest, *(sequence - 1 for sequence in self._open)) if self._open else self._highest

    def _end_failed(self, entry: Call, error: BaseException) -> BaseException:
        with self._lock:
            if entry.error is not None:
                error, mine = copy(entry.error), None
            else:
                error = with_call_name(error, entry)
                mine = self._abort_notice(entry, error)
        if mine is not None:
            # Before this rank rejects their messages: they should raise this error instead.
            self._notice_sender.send_all(mine)
        with self._lock:
            entry.finish(error)
            del self._open[entry.sequence]
            if self._interrupted_by is None:
                self._mismatch_detector.give_up(entry.sequence, f"rank {self._rank} has left {entry.name}")
            # Otherwise the group closes next and drops the messages. A refusal could reach a sender before the change
            # does, and would end its call as cancelled, which has no successor.
            self._idle_since = monotonic()
            self._count(entry, monotonic(), type(error).__name__)
        self._deferred_io.flush()
        self._failed(error)
        return error

    def _failed(self, error: BaseException) -> None:
        if self.on_failure is not None:
            self.on_failure(error)

    def report_mismatch(self, sequence: int, ours: Fingerprint, rank: Rank, theirs: Fingerprint) -> None:
        """Record a mismatch found without a frame. Not under the lock."""
        with self._lock:
            if self._mismatched_calls is None:
                self._revoke(sequence, {rank: theirs, self._rank: ours}, None)
        self._deferred_io.flush()

    def _count(self, entry: Call, ended: float, outcome: str, arrivals: Mapping[Rank, float] | None = None) -> None:
        operation, dtype, count, *_ = entry.fingerprint
        began, size_bytes = entry.began, count * item_bytes(dtype)
        self.recorder.record((entry.sequence, entry.fingerprint, began, ended, size_bytes, outcome))
        came = entry.arrivals
        if arrivals:
            members = self._group.membership.members
            told = {members[rank].node: when for rank, when in arrivals.items() if rank != self._rank}
            came = {**came, **told}
        waiting = self._straggler_estimate.add_call(began, came, operation) if came else 0.0
        self._totals.count(operation, size_bytes, ended - began, waiting, outcome)

    # -- notices from other ranks: the driver, without the lock ----------------------------------------------------

    def receive(self, sender: Link, notice: Notice) -> None:
        """Drops invalid messages and those of non-members."""
        rank = self._group.membership.rank_of(sender.peer)
        if rank is None:
            return
        if isinstance(notice, CallMismatch):
            self._on_mismatch(rank, notice)
        elif isinstance(notice, CallAborted):
            self._on_abort(rank, notice)
        elif isinstance(notice, ProgressQuery):
            self._on_query(sender, notice)
        elif isinstance(notice, ProgressReply):
            self.progress_inquiry.answered(rank, notice)
        self._deferred_io.flush()

    def _on_mismatch(self, sender: Rank, notice: CallMismatch) -> None:
        size = self._group.membership.size
        with self._lock:
            calls = {rank: call for rank, call in notice.calls.items() if 0 <= rank < size}
            if self._mismatched_calls is None and calls and notice.sequence >= 0:
                self._revoke(notice.sequence, calls, sender)

    def _on_abort(self, sender: Rank, notice: CallAborted) -> None:
        size = self._group.membership.size
        ranks = [notice.rank, *(culprit.rank for culprit in notice.culprits)]
        with self._lock:
            invalid = notice.sequence < 0 or not all(0 <= rank < size for rank in ranks)
            if invalid or not self._aborted.add(notice):
                return
            entry = self._open.get(notice.sequence)
            operation = self._mismatch_detector.operation_of(notice.sequence)
            for each in list(self._open.values()):
                if each is entry or (notice.closed and each.sequence > notice.sequence):
                    each.finish(error_of(notice, each, self._notice_sender.known, self._rank))
        self._notice_sender.send_all(notice, sender)
        if entry is None and notice.timeout and any(culprit.rank == self._rank for culprit in notice.culprits):
            # The user's code computes or hangs; the dump shows where.
            self._failed(timeout_caused_here(notice, self._rank, operation))

    def _on_query(self, sender: Link, notice: ProgressQuery) -> None:
        if self._closing_notice is not None:
            return self._notice_sender.send(sender, self._closing_notice.answer(notice))
        entry = self._open.get(notice.sequence)
        if entry is not None and notice.number:
            self.progress_inquiry.count_link_bytes(entry)
        with self._lock:
            if notice.call[0] and not self._was_taken(notice.sequence):
                self._mismatch_detector.check_call(sender.peer, notice.sequence, notice.call)
            report = self._report(notice)
        return self._notice_sender.send(sender, report) if notice.number else None

    def _was_taken(self, sequence: int) -> bool:
        """Whether the number is used without a call: the mismatch detector would keep it as a future call forever."""
        return sequence < self._next and self._mismatch_detector.call_of(sequence) is None

    def _report(self, notice: ProgressQuery) -> ProgressReply:
        entry, finished, now = self._open.get(notice.sequence), self._last_success, monotonic()
        last = None if finished is None else call_name(*finished[:2])
        if entry is not None:
            age = max(0.0, now - entry.moved_at)
            return ProgressReply(*self._about, notice.number, self._rank, "in", entry.step, age, finished=last)
        come = "failed" if notice.sequence in self._aborted else "done"
        state: Any = "absent" if notice.sequence >= self._next else come
        other = next(iter(self._open.values()), None)
        idle = self._idle_since if finished is None else max(self._idle_since, finished[2])
        doing, began = (
            (other.name, other.began) if other is not None else self._other_activity(*self._about) or ("", idle)
        )
        return ProgressReply(*self._about, notice.number, self._rank, state, 0, 0.0, doing, last, now - began)

    # -- ending a call on all ranks: with the lock -------------------------------------------

    def _on_difference(self, sequence: int, source: NodeId, theirs: CallFacts, ours: CallFacts) -> None:
        if self._mismatched_calls is None:
            self._revoke(sequence, {self._group.rank_of(source): theirs, self._rank: ours}, None)

    def _revoke(self, sequence: int, calls: dict[Rank, CallFacts], sender: Rank | None) -> None:
        own = self._mismatch_detector.call_of(sequence)
        if own is not None:
            calls[self._rank] = own
        self._mismatched_calls, self._mismatch_sequence = calls, sequence
        for entry in list(self._open.values()):
            if entry.sequence >= sequence:
                entry.finish(mismatch_of(sequence, calls, self._rank))
        told = dict(list(calls.items())[:_REPORTED])
        self._deferred_io.add(self._notice_sender.send_all, CallMismatch(*self._about, sequence, told), sender)

    def _mismatch_at(self, sequence: int, fingerprint: Fingerprint) -> CollectiveMismatch:
        assert self._mismatched_calls is not None
        if sequence == self._mismatch_sequence:
            self._mismatched_calls.setdefault(self._rank, fingerprint)
        return mismatch_of(self._mismatch_sequence, self._mismatched_calls, self._rank)

    def _abort_notice(self, entry: Call, error: BaseException) -> CallAborted | None:
        """None if one exists. The notice names the first rank that aborted."""
        if entry.sequence in self._aborted:
            return None
        abort_reason = AbortReason(error, self._group.membership.rank_of)
        first = error.rank if isinstance(error, Cancelled) else None
        rank = self._rank if first is None else first
        notice = CallAborted(
            *self._about, entry.sequence, rank, abort_reason.reason, abort_reason.timeout, abort_reason.culprits
        )
        self._aborted.add(notice)
        return notice

    # -- facts ---------------------------------------------------------------------------------------------

    def in_flight(self) -> list[Call]:
        """Open calls in order. Takes no lock."""
        return sorted(self._open.copy().values(), key=lambda entry: entry.sequence)

    @property
    def about(self) -> tuple[int, int]:
        return self._about

    @property
    def communicator(self) -> int:
        return self._about[0]

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(member.node for member in self._group.membership.members)

    @property
    def last_finished(self) -> tuple[str, float] | None:
        """Takes no lock."""
        finished = self._last_success
        return None if finished is None else (call_name(*finished[:2]), finished[2])

    def totals(self) -> tuple[int, int, int, float]:
        """Calls, bytes, errors, seconds waiting."""
        with self._lock:
            return self._totals.totals()

    def stats(self) -> dict[str, Any]:
        with self._lock:
            arrivals = self._straggler_estimate.arrivals(self._group.rank_of)
            return {
                **self._totals.stats(),
                "arrivals": {operation_name(operation): ranks for operation, ranks in arrivals.items()},
                "waiting_for": self._straggler_estimate.waiting(self._group.rank_of),
                "in_flight": len(self._open),
                "messages_dropped": self._mismatch_detector.dropped,
            }

    def stragglers(self) -> list[Straggler]:
        with self._lock:
            return self._straggler_estimate.stragglers(self._group.rank_of)

    def leave(self) -> None:
        """The user closes the communicator. Ranks that wait for a later call are notified, now or when they ask."""
        if self.closed:
            return
        with self._lock:
            self._closing_notice = closing_notice = ClosingNotice(*self._about, self._rank, self._next)
            awaited = self._mismatch_detector.is_announced(closing_notice.sequence)
        if awaited:
            self._notice_sender.send_all(closing_notice.message)

    def close(self) -> None:
        """Drop further control messages; after `leave`, still answer queries. Idempotent."""
        self.closed = True
        self._group.router.notices.close(*self._about, self._closing_notice and self._closing_notice.answer)
