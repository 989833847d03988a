"""One call on its way: run to its end by the thread that made it, or advanced by whoever drives the node.

Runs work: in the thread that called, or in the background; and judges, when its time is over, who is to blame.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from time import monotonic
from typing import Any, Final, Self

from nexar.collectives.call import Call, RegionCall
from nexar.collectives.call_log import CallLog
from nexar.collectives.executor import Run
from nexar.collectives.shared_region import SharedRegion
from nexar.errors import Cancelled, OperationTimeout
from nexar.group import Group, deadline_after
from nexar.links.messages import Receive
from nexar.links.operation import Operation
from nexar.links.process_hooks import is_inside
from nexar.links.progress import Progress
from nexar.types import AwaitedPeer

_log = logging.getLogger(__name__)

HALF_WRITTEN: Final = "the array that was to get the result may be partly overwritten; fill it anew"


class PendingCollective:
    """A call that has its sequence number, and has to be run now. `end` is told how it ended, exactly once.

    The error of its `alarm` ends it, whatever it waits for.
    """

    __slots__ = ("_name", "call", "end", "run", "taken", "writes")

    def __init__(
        self,
        run: Run,
        call: RegionCall | None,
        end: Callable[[BaseException | None], BaseException | None],
        name: str | None = None,
    ) -> None:
        """`end(error)` returns the error to raise, which may say more than the one it was given. `name`: of what is no
        call of a collective; None: a message, which is named after what it waits for.
        """
        self._name = name
        self.run = run
        self.call = call
        self.end = end
        self.taken: Sequence[Receive] = ()
        """Receives whose messages are its result, once it ended well: they can be given back while nobody has used
        it."""
        self.writes = False
        """Into memory of the caller's, which a failure may leave half-written: then the error says so. Written by who
        makes the work."""

    @property
    def name(self) -> str | None:
        """As errors call it; None: it has no name of its own."""
        return self._name if self.call is None else self.call.entry.name

    @property
    def alarm(self) -> Call | None:
        """See Journal."""
        return None if self.call is None else self.call.entry

    def map_result(self, result: Callable[[Any], Any], *, writes: bool = False) -> Self:
        """The same work, whose result is made of what it was before. `writes`: see there."""
        run = self.run
        self.writes = self.writes or writes

        def wrapped() -> Run:
            return result((yield from run))

        self.run = wrapped()
        return self

    def failing(self, error: BaseException | None) -> Self:
        """The same work, which raises `error` as soon as it is run; unchanged if there is none. So a call that cannot
        be made has its number, and the other ranks are told why this one left it.
        """
        if error is not None:
            self.run.close()
            self.run = _raise(error)
        return self

    def commit(self, write: Callable[[], None]) -> Self:
        """The same work, which calls `write` when it is known that it ended well, before anybody is told so. What is
        written there and nowhere else is as it was if the call raises; unless it is `write` that fails, as a device
        may: then that is what the call raises, on this rank alone.
        """
        end = self.end

        def ended(error: BaseException | None) -> BaseException | None:
            final = end(error)
            if final is not None:
                return final
            try:
                write()
            except Exception as failure:  # noqa: BLE001 - whoever waits for the call is told, whatever it is
                return failure
            return None

        self.end = ended
        return self

    def finish(self, error: BaseException | None) -> BaseException | None:
        """Every buffer is detached first. Returns the error to raise: MemoryError if messages that it had received
        cannot be given back for want of memory.
        """
        try:
            self.run.close()
        except MemoryError as fault:
            error = fault
        final = self.end(error)
        if final is not None and self.writes:
            final.add_note(HALF_WRITTEN)
        return final


def _raise(error: BaseException) -> Run:
    yield from ()  # waits for nothing
    raise error


class BackgroundCall(Operation):
    """Work in flight. Its legs run one at a time, on whichever thread leads; each posts, and none waits.

    Law: a leg is run by who takes `_turn`, and only while the call is not done; so `cancel`, which takes it too,
    returns when no leg runs and none will. Between two legs the next one is scheduled exactly once: when all that the
    last one waits for is done, or the first of it has failed, or the alarm has.
    """

    __slots__ = ("_awaited", "_due", "_leg", "_missing", "_moved", "_progress", "_result", "_turn", "_work")

    def __init__(self, progress: Progress, work: PendingCollective) -> None:
        super().__init__(progress.lock)
        self._progress = progress
        self._work = work
        self._turn = threading.Lock()  # held by who runs a leg
        self._leg = 0  # written by who has the turn
        self._moved = 0.0  # when the last one was run; likewise
        self._awaited: Sequence[Operation] = ()  # of the leg that was run last; likewise
        self._missing = 0  # of those; under the node's lock
        self._due = True  # a leg is scheduled, or runs; under the node's lock
        self._result: Any = None
        if work.alarm is not None:
            with self.lock:
                work.alarm.when_done(self._schedule)
        self._advance()

    @property
    def name(self) -> str:
        """As errors call it."""
        if self._work.name is not None:
            return self._work.name
        return next((each.name for each in self._awaited if not each.done), "the message")

    @property
    def entry(self) -> Call | None:
        """Of the collective that it is, or that it waits for; None if it does neither."""
        entry = self._work.alarm
        return entry or next((each.entry for each in self._awaited if isinstance(each, BackgroundCall)), None)

    def last_moved(self) -> float:
        """Each leg is progress, and so is that of what it waits for."""
        return max([self._moved, *(each.last_moved() for each in self._awaited)])

    def value(self) -> Any:
        """What the verb returns."""
        return self._result

    def awaited(self) -> AwaitedPeer:
        """Of what it waits for, the first."""
        return next((each.awaited() for each in self._awaited if not each.done), AwaitedPeer())

    def cancel(self) -> None:
        """The call ends here; the other ranks are told that this one gave it up."""
        self.fail(Cancelled(operation=self.name))

    def undo(self) -> None:
        """Cancel it. Messages that it has received already go back, to be received by others."""
        self.cancel()
        with self._turn:
            taken = self._work.taken
            if not taken or self.error is not None:  # a run that was cut off has undone its receives itself
                return
            for receive in taken:
                receive.undo()
            self.settle()
            with self.lock:
                self.error = Cancelled(operation=self.name)

    @property
    def takes(self) -> bool:
        """Whether it has received messages that can be given back."""
        return bool(self._work.taken) and self.error is None

    def settle(self) -> None:
        """Its result is used, or it has none: let go of the memory that it was received into."""
        self._work.taken = ()
        self._awaited = ()

    def retract(self) -> bool:
        """As undo, but only if the order of messages is kept: see Receive. False: it goes on, or keeps what it has."""
        with self._turn:
            every = (*self._work.taken, *self._awaited)
            first = next((each for each in every if isinstance(each, Receive)), None)
            if first is not None and not first.retract():
                return False
        self.undo()
        return True

    def drop(self) -> None:
        """Nobody wants it any more: undo it. Not here if a collector runs this while the thread holds our locks, which
        it can only do inside our code.
        """
        if is_inside(sys._getframe(1).f_back):
            self._progress.run_soon(self._undo_dropped)
        else:
            self._undo_dropped()

    def _undo_dropped(self) -> None:
        """Nobody can be told of an error, and the driving thread, which may run this, must not end with it."""
        try:
            self.undo()
        except MemoryError as fault:
            _log.error("%s was dropped, and its message is lost: there is no memory to keep it (%s)", self.name, fault)

    def fail(self, error: BaseException) -> None:
        """As cancel, for another reason."""
        with self._turn:
            if not self.done:
                self._end(error)

    # -- legs --------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        with self._turn:
            while not self.done:
                failed = self._failure()
                if failed is None:
                    if not self._run_leg():
                        return
                elif self._awaits_word(failed):
                    return
                else:
                    self._end(copy(self._failure() or failed))

    def _run_leg(self) -> bool:
        """True: there is more to do at once."""
        try:
            operations = next(self._work.run)
        except StopIteration as stop:
            self._result = stop.value
            self._end(None)
            return False
        except BaseException as error:
            self._end(error)
            if not isinstance(error, Exception):
                raise  # a signal of the thread that happens to drive: it is told, and so are those who wait for us
            return False
        self._leg += 1
        self._moved = monotonic()
        self._awaited = operations
        return self._subscribe(operations, self._leg)

    def _subscribe(self, operations: Sequence[Operation], leg: int) -> bool:
        """Under the lock, so that none ends unseen. True: the next leg may run at once."""
        with self.lock:
            self._missing = len(operations)
            for operation in operations:
                operation.when_done(partial(self._count, operation, leg))
            self._due = self._missing == 0 or self._failure() is not None
            return self._due

    def _count(self, operation: Operation, leg: int) -> None:
        """One of them has ended. Under the lock."""
        if leg != self._leg:
            return
        self._missing -= 1
        if self._missing == 0 or operation.error is not None:
            self._schedule()

    def _schedule(self) -> None:
        """Under the lock."""
        if not self._due and not self.done:
            self._due = True
            self._progress.run_soon(self._advance)

    def _failure(self) -> BaseException | None:
        alarm = self._work.alarm
        if alarm is not None and alarm.error is not None:
            return alarm.error
        return next((each.error for each in self._awaited if each.error is not None), None)

    def _awaits_word(self, failed: BaseException) -> bool:
        """True: shared memory shows that a rank gave the call up, but not why, nor whether it was the first to. The
        first one tells everybody over its links, so its word comes, or it is lost: both end the alarm.
        """
        alarm = self._work.alarm
        if alarm is None or not isinstance(failed, Cancelled) or failed.rank is None:
            return False
        with self.lock:
            self._due = alarm.error is not None
            return not self._due

    def _end(self, error: BaseException | None) -> None:
        error = self._work.finish(error)
        if error is not None:
            self.settle()
        with self.lock:
            self.finish(error)


DECLARE_AFTER: Final = 0.2
"""Seconds after which a call that waits tells the others what it is: two ranks that wait for each other in different
calls learn of it then, not at their deadlines."""


class CallRunner:
    """Of one communicator. Any thread."""

    def __init__(self, group: Group, call_log: CallLog, region: SharedRegion | None) -> None:
        self._group = group
        self._call_log = call_log
        self._region = region

    def run_blocking(self, work: PendingCollective, timeout: float) -> Any:
        """Run it to its end in this thread. CollectiveTimeout when nobody has made progress for `timeout` seconds."""
        if work.call is not None:
            work.call.spin = True
        try:
            result = self._run(work, timeout)
        except BaseException as error:
            if isinstance(error, Cancelled) and error.rank is not None and work.alarm is not None:
                self._call_log.progress_inquiry.hear(work.alarm)  # who gave it up is about to say why
            final = work.finish(error) or error
            if final is error:
                raise
            raise final from None  # it says all that the first one did, and more
        difference = work.finish(None)
        if difference is not None:
            raise difference
        return result

    def _run(self, work: PendingCollective, timeout: float) -> Any:
        entry = work.alarm
        if entry is not None and entry.error is not None:
            raise entry.error  # it was over before it began
        try:
            while True:
                operations = next(work.run)
                for operation in operations:
                    if not operation.done or operation.error is not None:
                        self._wait(operations, entry, deadline_after(timeout), timeout)
                        break
        except StopIteration as stop:
            return stop.value

    def start(self, work: PendingCollective) -> BackgroundCall:
        """Run it in the background."""
        return BackgroundCall(self._group.progress, work)

    def wait(self, running: BackgroundCall, timeout: float) -> None:
        """For its end, at most so many seconds: OperationTimeout then, and it goes on."""
        self._wait((running,), None, deadline_after(timeout), timeout, final=True)

    def wait_until_done(self, running: BackgroundCall, timeout: float, *, waited: float = 0.0) -> None:
        """Wait until it is done, well or not. When nobody has made progress for `timeout` seconds, of which `waited`
        are over, that is its end: with CollectiveTimeout, of a message OperationTimeout.
        """
        try:
            self._wait((running,), None, deadline_after(max(timeout - waited, 0.0)), timeout)
        except Exception as error:  # noqa: BLE001 - if it is not the operation's yet, it is now
            running.fail(error)

    def _wait(
        self,
        operations: Sequence[Operation],
        entry: Call | None,
        deadline: float,
        timeout: float,
        *,
        final: bool = False,
    ) -> None:
        """`final`: the deadline is the last, whoever makes progress. `entry`: of the call that these are part of."""
        early = min(deadline, monotonic() + DECLARE_AFTER)
        while True:
            try:
                self._group.wait(operations, early, entry, keep=True)
            except OperationTimeout as late:
                call = entry or _entry_of(operations)
                if call is not None and call.error is not None:
                    raise  # not late: over
                if early < deadline:
                    early = deadline
                    if call is not None:
                        call.awaits = operations
                    self.declare(call)
                elif final or call is None:
                    raise self._call_log.progress_inquiry.explain(late, timeout) from None
                else:
                    call.moved_at = max([call.moved_at, *(each.last_moved() for each in operations)])
                    early = deadline = self._call_log.progress_inquiry.extend(call, late, timeout)
            else:
                return

    def declare(self, entry: Call | None) -> None:
        """What this rank does, to those on other ways; and look what those of this host have written down. Nothing of
        what is no collective. Never blocks.
        """
        if entry is None:
            return
        self._call_log.progress_inquiry.declare(entry)
        found = None if self._region is None else self._region.disagreement(entry.sequence)
        if found is not None:
            self._call_log.disagree(entry.sequence, entry.fingerprint, self._group.local_ranks[found[0]], found[1])


def _entry_of(operations: Sequence[Operation]) -> Call | None:
    """Of the first call that is waited for."""
    running = (each for each in operations if isinstance(each, BackgroundCall) and not each.done)
    return next((each.entry for each in running), None)
