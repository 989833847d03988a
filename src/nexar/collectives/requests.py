"""Runs collective calls, in the calling thread or in the background."""

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

HALF_WRITTEN: Final = "the output array may be partly overwritten; fill it again before you use it"


class PendingCollective:
    """A call with a sequence number, to be run now. Calls `end` exactly once. An error of `abort_signal` ends it."""

    __slots__ = ("_name", "call", "end", "run", "taken", "writes")

    def __init__(
        self,
        run: Run,
        call: RegionCall | None,
        end: Callable[[BaseException | None], BaseException | None],
        name: str | None = None,
    ) -> None:
        """`end(error)` returns the error to raise. `name`: None for a message, which is named after its awaited
        operation.
        """
        self._name = name
        self.run = run
        self.call = call
        self.end = end
        self.taken: Sequence[Receive] = ()
        """Receives whose messages are its result, returnable while it is unused."""
        self.writes = False
        """It writes to the caller's memory, which an error may leave half-written."""

    @property
    def name(self) -> str | None:
        return self._name if self.call is None else self.call.entry.name

    @property
    def abort_signal(self) -> Call | None:
        return None if self.call is None else self.call.entry

    def map_result(self, result: Callable[[Any], Any], *, writes: bool = False) -> Self:
        run = self.run
        self.writes = self.writes or writes

        def wrapped() -> Run:
            return result((yield from run))

        self.run = wrapped()
        return self

    def failing(self, error: BaseException | None) -> Self:
        """Raise `error` when run. An invalid call takes a number too: the others learn why this rank left it."""
        if error is not None:
            self.run.close()
            self.run = _raise(error)
        return self

    def commit(self, write: Callable[[], None]) -> Self:
        """Call `write` once success is certain, before the call is done. If `write` fails, only this rank raises."""
        end = self.end

        def ended(error: BaseException | None) -> BaseException | None:
            final = end(error)
            if final is not None:
                return final
            try:
                write()
            except Exception as failure:  # noqa: BLE001 - the waiter must get any error
                return failure
            return None

        self.end = ended
        return self

    def finish(self, error: BaseException | None) -> BaseException | None:
        """Detach every buffer, then end the call. Returns the error to raise."""
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
    """A call in progress. Its stages post operations and never block.

    Invariant: a stage runs only under `_stage_lock`, while the call is not done. `cancel` takes that lock, so no stage
    runs after it. The next stage is scheduled exactly once: when all operations of the last one are done, or when one
    of them or the abort signal fails.
    """

    __slots__ = ("_awaited", "_due", "_missing", "_moved", "_progress", "_result", "_stage", "_stage_lock", "_work")

    def __init__(self, progress: Progress, work: PendingCollective) -> None:
        super().__init__(progress.lock)
        self._progress = progress
        self._work = work
        self._stage_lock = threading.Lock()  # held while a stage runs
        self._stage = 0  # guarded by `_stage_lock`
        self._moved = 0.0  # when the last stage ran; guarded by `_stage_lock`
        self._awaited: Sequence[Operation] = ()  # operations of the last stage; guarded by `_stage_lock`
        self._missing = 0  # how many of these are not done; guarded by the node's lock
        self._due = True  # a stage is scheduled or runs; guarded by the node's lock
        self._result: Any = None
        if work.abort_signal is not None:
            with self.lock:
                work.abort_signal.when_done(self._schedule)
        self._advance()

    @property
    def name(self) -> str:
        if self._work.name is not None:
            return self._work.name
        return next((each.name for each in self._awaited if not each.done), "the message")

    @property
    def entry(self) -> Call | None:
        """The call that this is or waits for."""
        entry = self._work.abort_signal
        return entry or next((each.entry for each in self._awaited if isinstance(each, BackgroundCall)), None)

    def last_moved(self) -> float:
        return max([self._moved, *(each.last_moved() for each in self._awaited)])

    def value(self) -> Any:
        return self._result

    def awaited(self) -> AwaitedPeer:
        return next((each.awaited() for each in self._awaited if not each.done), AwaitedPeer())

    def awaited_peers(self) -> list[AwaitedPeer]:
        pending = [each for each in self._awaited if not each.done]
        return [
            peer
            for each in pending
            for peer in (each.awaited_peers() if isinstance(each, BackgroundCall) else [each.awaited()])
        ]

    def cancel(self) -> None:
        self.fail(Cancelled(operation=self.name))

    def undo(self) -> None:
        self.cancel()
        with self._stage_lock:
            taken = self._work.taken
            if not taken or self.error is not None:  # a run that was interrupted has undone its receives
                return
            for receive in taken:
                receive.undo()
            self.settle()
            with self.lock:
                self.error = Cancelled(operation=self.name)

    @property
    def takes(self) -> bool:
        return bool(self._work.taken) and self.error is None

    def settle(self) -> None:
        self._work.taken = ()
        self._awaited = ()

    def retract(self) -> bool:
        """Undo the call if the message order is preserved; else return False."""
        with self._stage_lock:
            every = (*self._work.taken, *self._awaited)
            first = next((each for each in every if isinstance(each, Receive)), None)
            if first is not None and not first.retract():
                return False
        self.undo()
        return True

    def drop(self) -> None:
        """Undo the call when its last reference is gone. The driver does it later if this thread may hold our locks."""
        if is_inside(sys._getframe(1).f_back):
            self._progress.run_soon(self._undo_dropped)
        else:
            self._undo_dropped()

    def _undo_dropped(self) -> None:
        try:
            self.undo()
        except MemoryError as fault:
            _log.error("%s was dropped and its message is lost: out of memory (%s)", self.name, fault)

    def fail(self, error: BaseException) -> None:
        with self._stage_lock:
            if not self.done:
                self._end(error)

    # -- stages --------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        with self._stage_lock:
            while not self.done:
                failed = self._failure()
                if failed is None:
                    if not self._run_stage():
                        return
                elif self._awaits_notice(failed):
                    return
                else:
                    self._end(copy(self._failure() or failed))

    def _run_stage(self) -> bool:
        """True: the next stage can run at once."""
        try:
            operations = next(self._work.run)
        except StopIteration as stop:
            self._result = stop.value
            self._end(None)
            return False
        except BaseException as error:
            self._end(error)
            if not isinstance(error, Exception):
                raise  # a signal of the driving thread: it is raised there, and our waiters get it too
            return False
        self._stage += 1
        self._moved = monotonic()
        self._awaited = operations
        return self._subscribe(operations, self._stage)

    def _subscribe(self, operations: Sequence[Operation], stage: int) -> bool:
        """Under the lock, so that no end is missed. True: the next stage can run at once."""
        with self.lock:
            self._missing = len(operations)
            for operation in operations:
                operation.when_done(partial(self._count, operation, stage))
            self._due = self._missing == 0 or self._failure() is not None
            return self._due

    def _count(self, operation: Operation, stage: int) -> None:
        """Requires the lock."""
        if stage != self._stage:
            return
        self._missing -= 1
        if self._missing == 0 or operation.error is not None:
            self._schedule()

    def _schedule(self) -> None:
        """Requires the lock."""
        if not self._due and not self.done:
            self._due = True
            self._progress.run_soon(self._advance)

    def _failure(self) -> BaseException | None:
        abort_signal = self._work.abort_signal
        if abort_signal is not None and abort_signal.error is not None:
            return abort_signal.error
        return next((each.error for each in self._awaited if each.error is not None), None)

    def _awaits_notice(self, failed: BaseException) -> bool:
        """Whether to wait for the notice of a rank that aborted in shared memory. The notice, or the loss of that rank,
        ends the abort signal.
        """
        abort_signal = self._work.abort_signal
        if abort_signal is None or not isinstance(failed, Cancelled) or failed.rank is None:
            return False
        with self.lock:
            self._due = abort_signal.error is not None
            return not self._due

    def _end(self, error: BaseException | None) -> None:
        error = self._work.finish(error)
        if error is not None:
            self.settle()
        with self.lock:
            self.finish(error)


DECLARE_AFTER: Final = 0.2
"""Seconds after which a waiting call announces itself, so that mismatches are found before the deadline."""


class CallRunner:
    """Runs the calls of one communicator. Thread-safe."""

    def __init__(self, group: Group, call_log: CallLog, region: SharedRegion | None) -> None:
        self._group = group
        self._call_log = call_log
        self._region = region

    def run_blocking(self, work: PendingCollective, timeout: float) -> Any:
        """Raises CollectiveTimeout when no rank has made progress for `timeout` seconds."""
        if work.call is not None:
            work.call.spin = True
        try:
            result = self._run(work, timeout)
        except BaseException as error:
            if isinstance(error, Cancelled) and error.rank is not None and work.abort_signal is not None:
                self._call_log.progress_inquiry.await_notice(work.abort_signal)  # it has the reason
            final = work.finish(error) or error
            if final is error:
                raise
            raise final from None  # it includes the facts of the first error
        difference = work.finish(None)
        if difference is not None:
            raise difference
        return result

    def _run(self, work: PendingCollective, timeout: float) -> Any:
        entry = work.abort_signal
        if entry is not None and entry.error is not None:
            raise entry.error  # it ended before it began
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
        return BackgroundCall(self._group.progress, work)

    def wait(self, running: BackgroundCall, timeout: float) -> None:
        """Raises OperationTimeout after `timeout` seconds; the call continues."""
        self._wait((running,), None, deadline_after(timeout), timeout, final=True)

    def wait_until_done(self, running: BackgroundCall, timeout: float, *, waited: float = 0.0) -> None:
        """Fails the call when no rank has made progress for `timeout` seconds, of which `waited` have passed."""
        try:
            self._wait((running,), None, deadline_after(max(timeout - waited, 0.0)), timeout)
        except Exception as error:  # noqa: BLE001 - the error becomes the operation's, unless it has one
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
        """`final`: progress does not extend the deadline."""
        early = min(deadline, monotonic() + DECLARE_AFTER)
        while True:
            try:
                self._group.wait(operations, early, entry, keep=True)
            except OperationTimeout as late:
                call = entry or _entry_of(operations)
                if call is not None and call.error is not None:
                    raise  # the call has ended
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
        """Send the fingerprint to other hosts and compare it with this host's. Never blocks."""
        if entry is None:
            return
        self._call_log.progress_inquiry.declare(entry)
        found = None if self._region is None else self._region.disagreement(entry.sequence)
        if found is not None:
            self._call_log.report_mismatch(
                entry.sequence, entry.fingerprint, self._group.local_ranks[found[0]], found[1]
            )


def _entry_of(operations: Sequence[Operation]) -> Call | None:
    running = (each for each in operations if isinstance(each, BackgroundCall) and not each.done)
    return next((each.entry for each in running), None)
