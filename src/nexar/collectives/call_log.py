"""Every collective call of one communicator: its number, what becomes of it, and what the others say of theirs.

Numbers   A call takes the next sequence number when it is made. Ranks agree on calls by number alone, so each must make
          the same calls in the same order; with several threads, the order in which they call.
Mismatch  Who sees a difference (see links.ledger) tells the others, who pass it on: each once, along the links that are
          open. The call and all later ones raise, on every rank; the communicator is of no use any more. A call that
          one rank skipped, followed by an identical one, cannot be seen.
Giving up A rank that leaves a call without its result tells the others likewise. They raise at once, or when they come
          to that call; earlier and later calls are not touched. One that has closed the communicator takes no part in
          any call to come: see farewell.
Deadline  See patience: who is slow is waited for, who is missing is named.
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
    GroupView,
    NoticeSender,
    awaited_here,
    error_of,
    mismatch_of,
    named,
    peers_of,
)
from nexar.collectives.fingerprint import Fingerprint, operation_name
from nexar.collectives.statistics import KEPT, CallTotals, RecentCalls, Straggler, StragglerEstimate
from nexar.collectives.timeouts import ProgressInquiry
from nexar.errors import Cancelled, CollectiveMismatch, NexarError
from nexar.links.mismatch_detector import CallFacts
from nexar.links.router import Notice, NoticeTarget
from nexar.types import NodeId, Rank
from nexar.wire.control import CallAborted, CallMismatch, ProgressQuery, ProgressReply

_REPORTED: Final = 64  # calls that one message names


@cache
def item_bytes(dtype: int) -> int:
    """Of a dtype number; 0 for what has none."""
    found = dtype_of(dtype)
    return 0 if found is None else found.itemsize


class CallLog:
    """Of one generation of one communicator. Any thread. Close it with the communicator."""

    def __init__(
        self,
        group: GroupView,
        *,
        kept: int = KEPT,
        beside: Callable[[int, int], tuple[str, float] | None] = lambda *_: None,
    ) -> None:
        """`kept`: calls that are remembered. `beside`: what this node does that is no call of this communicator and
        generation, and since when; None: it is in user code. It takes no lock.
        """
        self._beside = beside
        self._group = group
        self._notice_sender = NoticeSender(group)
        self.progress_inquiry: Final = ProgressInquiry(group, self._notice_sender)
        self._rank = group.rank
        self._about: Final = group.communicator, group.matching.generation
        self._lock: threading.Lock = group.matching.lock  # over everything below
        self._deferred_io = group.router.deferred_io
        self._mismatch_detector = group.matching.mismatch_detector
        self._mismatch_detector.on_disagreement = self._differs
        self._next = 0
        self._open: dict[int, Call] = {}
        self._finished: tuple[int, int, float] | None = None  # the last that went well: operation, sequence, end
        self._highest = -1  # sequence of all that went well: they need not end in the order of their numbers
        self._aborted = AbortedCalls()
        self._closing_notice: ClosingNotice | None = None  # once this rank's user has closed it
        self._calls: dict[Rank, CallFacts] | None = None  # of the mismatch that ended it all
        self._differing = 0  # its sequence
        self._over: NexarError | None = None  # the members change: what every call raises from now on
        self._totals = CallTotals()
        self._straggler_estimate = StragglerEstimate(group.membership.members[self._rank].node)
        self.recorder: Final = RecentCalls(kept)
        self.on_failure: Callable[[BaseException], None] | None = None
        """Told of each error that leaves a call, and of each that this rank is to blame for; without the lock, in
        whichever thread it comes. Written once, before the first call."""
        self.closed = False  # written by close
        self._left = monotonic()  # when a call was last left without its result, or it all began
        group.matching.peers.update(peers_of(group.membership))
        group.router.notices.open(*self._about, self.receive)

    # -- calls ---------------------------------------------------------------------------------------------

    def begin(self, fingerprint: Fingerprint) -> Call:
        """A call is made. Whoever gets the entry ends it; at once if it has an error: another rank has given up this
        very call, or is known to call something else.

        CollectiveMismatch: the communicator is of no use any more.
        """
        with self._lock:
            if self._calls is None:
                sequence = self._next
                self._next = sequence + 1
                entry = Call(self._lock, sequence, fingerprint)
                self._enter(entry)
                return entry
            error = self._mismatch_at(self._next, fingerprint)
        self._failed(error)
        raise error

    def take(self) -> int | None:
        """The number of a call that is expected to end at once, and well: by `note`. If it does not, `adopt` it.

        None: something is amiss, or another rank has spoken of this call; what that means, only `begin` can say.
        """
        with self._lock:
            sequence = self._next
            amiss = self._calls is not None or self._over is not None
            if (
                amiss
                or (self._aborted and self._aborted.find(sequence))
                or self._mismatch_detector.is_told_of(sequence)
            ):
                return None
            self._next = sequence + 1
            return sequence

    def note(self, sequence: int, fingerprint: Fingerprint, size_bytes: int, began: float) -> None:
        """A call that was taken has ended well."""
        ended = monotonic()
        operation = fingerprint[0]
        self.recorder.record((sequence, fingerprint, began, ended, size_bytes, ""))
        with self._lock:
            self._finished = operation, sequence, ended
            if sequence > self._highest:  # noqa: PLR1730 - max() is a call, in the shortest way of all
                self._highest = sequence
            self._totals.count(operation, size_bytes, ended - began, 0.0, "")

    def adopt(self, sequence: int, fingerprint: Fingerprint, began: float) -> Call:
        """A call that was taken lasts: from now on it is one like any other. Whoever gets the entry ends it."""
        with self._lock:
            entry = Call(self._lock, sequence, fingerprint)
            entry.began = began
            self._enter(entry)
        return entry

    def _enter(self, entry: Call) -> None:
        """Under the lock."""
        sequence = entry.sequence
        self._open[sequence] = entry
        entry.arrivals = self._mismatch_detector.begin(sequence, entry.fingerprint)
        if self._calls is not None and sequence >= self._differing:
            entry.finish(self._mismatch_at(sequence, entry.fingerprint))  # seen between its number and its entry
        elif self._over is not None:
            entry.finish(copy(self._over))
        elif self._aborted and (notice := self._aborted.find(sequence)):
            entry.finish(error_of(notice, entry, self._notice_sender.known, self._rank))

    def end(
        self, entry: Call, error: BaseException | None = None, arrivals: Mapping[Rank, float] | None = None
    ) -> BaseException | None:
        """The call is over, and nothing of it is posted any more. Returns the error that it has to raise: if others
        ended it, that says more. With an error of its own, the others are told. One that has all it wanted, and has
        seen that another rank called something else, has got a wrong result: it raises that.

        `arrivals`: when ranks came (time.monotonic), where that is known better than from their frames.
        """
        if error is None and isinstance(entry.error, CollectiveMismatch):
            error = entry.error
        if error is not None:
            return self._end_badly(entry, error)
        ended = monotonic()
        with self._lock:
            entry.finish()
            del self._open[entry.sequence]
            self._mismatch_detector.end(entry.sequence)
            self._finished = entry.fingerprint.operation, entry.sequence, ended
            self._highest = max(self._highest, entry.sequence)
            self._count(entry, ended, "", arrivals)
        return None

    def interrupt(self, error: NexarError) -> None:
        """The members change: every call in flight, and each that is still made, ends with this. The others are not
        told: they hear of it as we did. Without the lock. The first word stands.
        """
        with self._lock:
            self._over = self._over or error
            for entry in list(self._open.values()):
                entry.finish(copy(error))
        self._deferred_io.flush()

    @property
    def completed(self) -> int:
        """The number of the last call that went well here, with all before it; -1: there is none."""
        with self._lock:
            return min(self._highest, *(sequence - 1 for sequence in self._open)) if self._open else self._highest

    def _end_badly(self, entry: Call, error: BaseException) -> BaseException:
        with self._lock:
            if entry.error is not None:
                error, mine = copy(entry.error), None
            else:
                error = named(error, entry)
                mine = self._give_up(entry, error)
        if mine is not None:
            self._notice_sender.spread(
                mine
            )  # before those who still send to us are refused: this is what they should raise
        with self._lock:
            entry.finish(error)
            del self._open[entry.sequence]
            self._mismatch_detector.give_up(entry.sequence, f"rank {self._rank} has left {entry.name}")
            self._left = monotonic()
            self._count(entry, monotonic(), type(error).__name__)
        self._deferred_io.flush()
        self._failed(error)
        return error

    def _failed(self, error: BaseException) -> None:
        if self.on_failure is not None:
            self.on_failure(error)

    def disagree(self, sequence: int, ours: Fingerprint, rank: Rank, theirs: Fingerprint) -> None:
        """This rank has seen by other means than a frame that another one calls something else. Without the lock; the
        call raises, and is to be ended.
        """
        with self._lock:
            if self._calls is None:
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
        waiting = self._straggler_estimate.saw(began, came, operation) if came else 0.0
        self._totals.count(operation, size_bytes, ended - began, waiting, outcome)

    # -- what others say: the driving thread, without the lock ----------------------------------------------------

    def receive(self, speaker: NoticeTarget, notice: Notice) -> None:
        """A control message about this communicator; those of strangers, and nonsense, are dropped."""
        rank = self._group.membership.rank_of(speaker.peer)
        if rank is None:
            return
        if isinstance(notice, CallMismatch):
            self._heard_disagreed(rank, notice)
        elif isinstance(notice, CallAborted):
            self._heard_gave_up(rank, notice)
        elif isinstance(notice, ProgressQuery):
            self._asked(speaker, notice)
        elif isinstance(notice, ProgressReply):
            self.progress_inquiry.answered(rank, notice)
        self._deferred_io.flush()

    def _heard_disagreed(self, speaker: Rank, notice: CallMismatch) -> None:
        size = self._group.membership.size
        with self._lock:
            calls = {rank: call for rank, call in notice.calls.items() if 0 <= rank < size}
            if self._calls is None and calls and notice.sequence >= 0:
                self._revoke(notice.sequence, calls, speaker)

    def _heard_gave_up(self, speaker: Rank, notice: CallAborted) -> None:
        size = self._group.membership.size
        ranks = [notice.rank, *(culprit.rank for culprit in notice.culprits)]
        with self._lock:
            nonsense = notice.sequence < 0 or not all(0 <= rank < size for rank in ranks)
            if nonsense or not self._aborted.add(notice):
                return
            entry = self._open.get(notice.sequence)
            for each in list(self._open.values()):
                if each is entry or (notice.closed and each.sequence > notice.sequence):
                    each.finish(error_of(notice, each, self._notice_sender.known, self._rank))
        self._notice_sender.spread(notice, speaker)
        if entry is None and notice.timeout and any(culprit.rank == self._rank for culprit in notice.culprits):
            self._failed(awaited_here(notice, self._rank))  # the user's code computes, or hangs: where, is of interest

    def _asked(self, speaker: NoticeTarget, notice: ProgressQuery) -> None:
        if self._closing_notice is not None:
            return self._notice_sender.say(speaker, self._closing_notice.answer(notice))
        entry = self._open.get(notice.sequence)
        if entry is not None and notice.number:
            self.progress_inquiry.look_at_bytes(entry)
        with self._lock:
            if notice.call[0] and not self._was_taken(notice.sequence):
                self._mismatch_detector.told(speaker.peer, notice.sequence, notice.call)
            report = self._report(notice)
        return self._notice_sender.say(speaker, report) if notice.number else None

    def _was_taken(self, sequence: int) -> bool:
        """It has no entry, or none yet: to the ledger it would for ever be a call to come."""
        return sequence < self._next and self._mismatch_detector.call_of(sequence) is None

    def _report(self, notice: ProgressQuery) -> ProgressReply:
        entry, finished, now = self._open.get(notice.sequence), self._finished, monotonic()
        last = None if finished is None else call_name(*finished[:2])
        if entry is not None:
            age = max(0.0, now - entry.moved_at)
            return ProgressReply(*self._about, notice.number, self._rank, "in", entry.step, age, finished=last)
        come = "failed" if notice.sequence in self._aborted else "done"
        state: Any = "absent" if notice.sequence >= self._next else come
        other = next(iter(self._open.values()), None)
        idle = self._left if finished is None else max(self._left, finished[2])
        doing, began = (other.name, other.began) if other is not None else self._beside(*self._about) or ("", idle)
        return ProgressReply(*self._about, notice.number, self._rank, state, 0, 0.0, doing, last, now - began)

    # -- what ends a call on all ranks: under the lock -------------------------------------------

    def _differs(self, sequence: int, source: NodeId, theirs: CallFacts, ours: CallFacts) -> None:
        """See Ledger."""
        if self._calls is None:
            self._revoke(sequence, {self._group.rank_of(source): theirs, self._rank: ours}, None)

    def _revoke(self, sequence: int, calls: dict[Rank, CallFacts], speaker: Rank | None) -> None:
        own = self._mismatch_detector.call_of(sequence)
        if own is not None:
            calls[self._rank] = own
        self._calls, self._differing = calls, sequence
        for entry in list(self._open.values()):
            if entry.sequence >= sequence:
                entry.finish(mismatch_of(sequence, calls, self._rank))
        told = dict(list(calls.items())[:_REPORTED])
        self._deferred_io.add(self._notice_sender.spread, CallMismatch(*self._about, sequence, told), speaker)

    def _mismatch_at(self, sequence: int, fingerprint: Fingerprint) -> CollectiveMismatch:
        """What a call raises that comes after the mismatch, or is the one that differs."""
        assert self._calls is not None
        if sequence == self._differing:
            self._calls.setdefault(self._rank, fingerprint)
        return mismatch_of(self._differing, self._calls, self._rank)

    def _give_up(self, entry: Call, error: BaseException) -> CallAborted | None:
        """None: the others know. Who gave up because another did names that one: shared memory may be quicker than its
        word.
        """
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
        """The calls that this rank is in, in their order. Takes no lock: who asks may want to know why it is held."""
        return sorted(self._open.copy().values(), key=lambda entry: entry.sequence)

    @property
    def about(self) -> tuple[int, int]:
        """Its communicator and generation."""
        return self._about

    @property
    def communicator(self) -> int:
        """Its id."""
        return self._about[0]

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """Of its ranks, in their order: for who knows nodes by their ranks elsewhere."""
        return tuple(member.node for member in self._group.membership.members)

    @property
    def last_finished(self) -> tuple[str, float] | None:
        """The last call that went well, and when it ended. Takes no lock."""
        finished = self._finished
        return None if finished is None else (call_name(*finished[:2]), finished[2])

    def totals(self) -> tuple[int, int, int, float]:
        """Calls, bytes, errors, and seconds waiting: what `stats` has in all, for who asks every second."""
        with self._lock:
            return self._totals.totals()

    def stats(self) -> dict[str, Any]:
        """Calls, bytes, seconds, seconds waiting and errors: in all, and by operation; waiting by rank; when ranks
        came, by operation and rank, of calls that did not end at once.
        """
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
        """Who keeps the others waiting, the worst first: see lateness.py."""
        with self._lock:
            return self._straggler_estimate.stragglers(self._group.rank_of)

    def leave(self) -> None:
        """This rank's user closes it, and makes no call any more: who waits for one is told, now or when it asks. To be
        closed next.
        """
        if self.closed:
            return
        with self._lock:
            self._closing_notice = farewell = ClosingNotice(*self._about, self._rank, self._next)
            awaited = self._mismatch_detector.is_told_of(farewell.sequence)
        if awaited:
            self._notice_sender.spread(farewell.message)

    def close(self) -> None:
        """Control messages about this generation are dropped from now on; after `leave`, questions are answered.
        Idempotent.
        """
        self.closed = True
        self._group.router.notices.close(*self._about, self._closing_notice and self._closing_notice.answer)
