"""The progress engine: waiting threads drive the node's transports, one at a time.

While any operation is pending, exactly one thread is the *driver*. Only it polls, sleeps and runs sinks; it hands over
before it leaves. Other waiting threads sleep until their operations complete, one fails, or the driver lock is free. If
no thread waits, the progress thread drives.

No wake-up is lost: a waiting thread enters the list, then checks for a driver and for the end; a driver releases the
lock, then checks the list; `end` sets the reason, then wakes the list.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from time import monotonic
from types import FrameType
from typing import Any, Final, NoReturn, Self, TypeVar

from nexar.errors import Cancelled, InternalError, NexarError, OperationTimeout, UsageError
from nexar.links import process_hooks
from nexar.links.event_loop import LONGEST_SLEEP, LONGEST_WAIT, EventLoop, Poller, TaskRaised
from nexar.links.operation import Operation, Waiter
from nexar.links.process_hooks import interrupts
from nexar.transport.base import Sleeper, Transport
from nexar.transport.registry import TransportFailed


class DriverElection:
    """Decides which thread of one node drives."""

    def __init__(self, lock: threading.Lock, on_end: Callable[[], None] = lambda: None) -> None:
        """`end` calls `on_end` without the lock. It must not block."""
        self._lock = lock  # the node's
        self._on_end = on_end
        self.driver_lock = threading.Lock()  # held by the driver
        self.takeovers = 0  # times that a waiting thread became driver; written by that thread
        self.waiting_threads: list[Waiter] = []  # each thread appends and removes itself; list methods are atomic
        self.ended: NexarError | None = None  # why waiting is over: closed, forked, or a bug; set once

    def offer(self) -> None:
        """Wake one waiting thread. It drives, or offers again when it leaves."""
        with self._lock:
            for waiter in list(self.waiting_threads):
                if waiter.asleep:
                    waiter.wake()
                    return

    def end(self, reason: NexarError) -> None:
        """Make every wait raise. Wake all threads: one that raises does not offer the lock."""
        self.ended = reason
        with self._lock:
            for waiter in list(self.waiting_threads):
                waiter.wake()
        self._on_end()

    def abandon(self, reason: NexarError) -> None:
        """Without waking: a forked child has no other threads."""
        self.ended = reason
        self.waiting_threads.clear()


NODE_CLOSED: Final = (
    "this node is closed: its `with` block has ended, or close() was called; make all calls before that"
)
OF_THE_PARENT: Final = (
    "belongs to the parent process, and a forked child is not part of the cluster; communicate in the parent"
)
_TICK: Final = 0.002  # seconds without a driver before the progress thread drives
_PARK_AFTER: Final = 10  # ticks under the same driver before it parks


class ProgressThread:
    """Drives while no caller waits. Ends after the event loop stopped and `close` was called.

    It checks every tick whether the driver changed. Under a steady driver it parks; the driver wakes it on leaving.
    """

    def __init__(self, election: DriverElection, event_loop: EventLoop) -> None:
        self._election = election
        self._driver_lock = election.driver_lock
        self._event_loop = event_loop
        self.is_driving = False  # written by the thread
        self.parked = False  # set by the thread, cleared by unpark()
        self._asked = False  # a request to drive at once; cleared by the thread
        self._unpark = threading.Lock()
        self._unpark.acquire()
        self._thread = threading.Thread(target=self._run, name="nexar-progress", daemon=True)
        self._thread.start()

    def drive_now(self) -> None:
        """Drive now. No effect under another driver, which hands over when it leaves. Any thread."""
        if not self._driver_lock.locked():
            self._asked = True
            self.unpark()

    def unpark(self) -> None:
        self.parked = False
        try:
            self._unpark.release()
        except RuntimeError:  # two drivers in a row saw it parked; one wake-up is enough
            return

    def close(self) -> None:
        """Stop the event loop first."""
        self.unpark()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._take_over_when_idle()
        except TransportFailed as broke:
            self._election.end(broke)
        except BaseException as fault:
            self._election.end(InternalError(f"the progress thread ended: {fault!r}"))
            raise

    def _take_over_when_idle(self) -> None:
        seen = -1
        quiet = 0
        while not self._event_loop.stopped:
            takeovers = self._election.takeovers
            asked = self._asked
            if asked:
                self._asked = False
            if (asked or takeovers == seen) and self._driver_lock.acquire(blocking=False):
                self._take_turn()
                seen, quiet = -1, 0
            elif takeovers == seen:
                quiet += 1
            else:
                seen, quiet = takeovers, 0
            self._rest(parked=quiet >= _PARK_AFTER)

    def _take_turn(self) -> None:
        self.is_driving = True
        try:
            self._event_loop.until_thread_waits(self._election.waiting_threads)
        finally:
            self.is_driving = False
            self._driver_lock.release()
            if self._election.waiting_threads:
                self._election.offer()

    def _rest(self, *, parked: bool) -> None:
        if self._event_loop.stopped:
            return
        self.parked = parked
        if parked and not self._driver_lock.locked():
            self.parked = False  # the driver left before it could see that this thread parked
            return
        self._unpark.acquire(timeout=LONGEST_SLEEP if parked else _TICK)


# Longer than a round trip to a sleeping peer, so that two ranks that exchange messages return to spinning.
DEFAULT_SPIN = 200e-6

Outcome = TypeVar("Outcome")


def spin_of(microsecs: int | str) -> float:
    """Return the setting `spin_microsecs` in seconds."""
    return DEFAULT_SPIN if isinstance(microsecs, str) else microsecs / 1e6


class Progress:
    """Drives the transports of one node. Interpreter exit closes it too."""

    def __init__(
        self,
        sleeper: Sleeper,
        transports: Sequence[Transport],
        *,
        spin: float = DEFAULT_SPIN,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_end` runs when driving ends, on close or a fault; `check` then raises the reason. It must not block."""
        # The node's lock: guards every link, matching and operation of this node; never held across a wait.
        self.lock = threading.Lock()
        self.spin = spin
        self._event_loop = EventLoop(sleeper, transports, spin)
        self._wake = sleeper.wake
        self._election = DriverElection(self.lock, on_end)
        self._driver_lock = self._election.driver_lock
        self._waiting_threads = self._election.waiting_threads
        self._closed = False  # set once, by close()
        self.is_abandoned = False  # this process is a forked child; set once, by abandon()
        self._on_fork: dict[object, Callable[[], None]] = {}
        process_hooks.node_opened(self)
        self._progress_thread = ProgressThread(self._election, self._event_loop)

    # -- waiting ---------------------------------------------------------------------------------------

    def wait(
        self,
        operations: Sequence[Operation],
        deadline: float,
        abort_signal: Operation | None = None,
        *,
        keep: bool = False,
    ) -> None:
        """Wait until all are done, and drive if no other thread does. The first error ends the wait, also an error of
        `abort_signal`, which is neither awaited nor cancelled.

        Raise OperationTimeout at the deadline (time.monotonic). Before anything is raised, also by Ctrl-C, pending
        operations are cancelled, so their buffers are free. With `keep` the deadline cancels nothing.
        """
        waiter = Waiter()
        waiter.keeps = keep
        with self.lock:
            for operation in operations:
                if not operation.done:
                    operation.add_waiter(waiter)
                elif operation.error is not None:
                    waiter.pending = 0  # raised below, without waiting for the others
                    break
        if waiter.pending:
            if abort_signal is None:
                self._wait(waiter, operations, deadline)
            else:
                self._wait_or_abort(waiter, operations, deadline, abort_signal)
        for operation in operations:
            if operation.error is not None:
                self._fail(waiter, operations, operation.error)

    def waits(self) -> list[tuple[int, str, float]]:
        """Return thread, operation and start (time.monotonic) of each wait, read from the stacks. Take no lock: the
        caller may be diagnosing why it is held.

        No variable may refer to this call's frame on return: the cycle would keep dropped requests alive.
        """
        found = []
        frames = sys._current_frames()
        while frames:
            thread, frame = frames.popitem()
            for operations, since in self._waits_on(frame):
                name = next((each.name for each in operations if not each.done), None)
                if name is not None:
                    found.append((thread, name, since))
            del frame
        return found

    def _waits_on(self, frame: FrameType | None) -> Iterator[tuple[Sequence[Operation], float]]:
        """A signal handler inside a wait may wait too."""
        while frame is not None:
            if frame.f_code is Progress._wait.__code__ and frame.f_locals["self"] is self:
                yield frame.f_locals["operations"], frame.f_locals.get("begin", monotonic())
            frame = frame.f_back

    def check(self) -> None:
        """Raise what every wait would raise, if closed or forked."""
        if self._election.ended is not None:
            raise copy(self._election.ended)

    def _wait_or_abort(
        self, waiter: Waiter, operations: Sequence[Operation], deadline: float, abort_signal: Operation
    ) -> None:
        """Remove the callback at the end, because an abort signal outlives many waits."""

        def failed() -> None:
            if abort_signal.error is not None:
                waiter.count(abort_signal.error)
                self._wake()  # the waiting thread may be the driver, and asleep

        with self.lock:
            abort_signal.when_done(failed)
        try:
            if waiter.pending:
                self._wait(waiter, operations, deadline)
        finally:
            with self.lock:
                abort_signal.forget(failed)
        if abort_signal.error is not None and not all(operation.done for operation in operations):
            self._fail(waiter, operations, abort_signal.error)

    def _wait(self, waiter: Waiter, operations: Sequence[Operation], deadline: float) -> None:
        begin = monotonic()
        in_main = interrupts.begin(self._wake, waiter)
        try:
            while waiter.pending:
                if self._driver_lock.acquire(False):
                    self._take_turn(waiter, deadline)
                else:
                    self._wait_for_driver(waiter, deadline, LONGEST_WAIT if in_main else LONGEST_SLEEP)
                if waiter.pending:
                    if in_main:
                        interrupts.settle()
                    if monotonic() >= deadline:
                        break
        except BaseException:
            self._give_up(waiter, operations)
            raise
        finally:
            if self._waiting_threads and not self._driver_lock.locked():
                self._election.offer()  # the driver lock was offered to this thread, which no longer needs it
            if in_main:
                interrupts.end()
        if waiter.pending:
            self._expire(waiter, operations, deadline - begin)

    def _take_turn(self, waiter: Waiter, deadline: float) -> None:
        election = self._election
        election.takeovers += 1
        try:
            self.check()
            self._event_loop.until_done(waiter, deadline)
        except (TaskRaised, TransportFailed) as fault:
            election.end(fault)
            raise
        finally:
            self._driver_lock.release()
            if self._waiting_threads:
                election.offer()
            if self._progress_thread.parked:
                self._progress_thread.unpark()

    def _wait_for_driver(self, waiter: Waiter, deadline: float, longest: float) -> None:
        with self.lock:
            if not waiter.pending:
                return
            waiter.prepare()
        self._waiting_threads.append(waiter)
        try:
            self.check()
            if self._progress_thread.is_driving:
                self._wake()
            if self._driver_lock.locked() and not interrupts.pending:  # a signal before prepare() could not wake us
                waiter.sleep(min(max(deadline - monotonic(), 0.0), longest))
        finally:
            self._waiting_threads.remove(waiter)

    # -- other work of the driver ----------------------------------------------------------------------

    def add_poller(self, poller: Poller) -> None:
        """Not under the node's lock."""
        with self.lock:
            self._event_loop.add(poller)

    def remove_poller(self, poller: Poller) -> None:
        """The driver may be polling it on return, but not again. Idempotent. Not under the node's lock."""
        with self.lock:
            self._event_loop.remove(poller)

    def run_soon(self, task: Callable[[], object]) -> None:
        """Run `task` on the driver thread before it sleeps, without the node's lock. `task` must not block; if it
        raises, all waits end with InternalError. Any thread may call this, also under the lock.
        """
        self._event_loop.run_soon(task)

    def drive_in_background(self) -> None:
        """For a caller that posted work and does not wait."""
        self._progress_thread.drive_now()

    def wake(self) -> None:
        """Make the driver poll again. Cheap if it is awake."""
        self._wake()

    def run_inline(self, task: Callable[..., Outcome], *arguments: Any) -> Outcome:
        """Run `task(*arguments)` in this thread, even if another drives. It may poll memory for at most `spin`.

        Signals are deferred. The progress thread pauses meanwhile: asleep, it would ask peers to wake it.
        """
        self.check()
        election = self._election
        election.takeovers += 1
        if not self._progress_thread.is_driving:
            return task(*arguments)
        passing = Waiter()  # a waiting thread that never sleeps, so `offer` skips it
        self._waiting_threads.append(passing)
        self._wake()
        try:
            return task(*arguments)
        finally:
            self._waiting_threads.remove(passing)

    # -- failed waits ----------------------------------------------------------------------------------

    def _fail(self, waiter: Waiter, operations: Sequence[Operation], error: BaseException) -> NoReturn:
        self._give_up(waiter, operations)
        raise copy(error)  # a copy: several operations may share one error

    def _give_up(self, waiter: Waiter, operations: Sequence[Operation]) -> None:
        self._leave(waiter, operations)
        for operation in operations:
            operation.cancel()

    def _leave(self, waiter: Waiter, operations: Sequence[Operation]) -> None:
        with self.lock:
            for operation in operations:
                operation.remove_waiter(waiter)

    def _expire(self, waiter: Waiter, operations: Sequence[Operation], timeout: float) -> None:
        """Give up unfinished operations at the deadline. Raise an operation's own error, else OperationTimeout; nothing
        if all finished before they could be cancelled.
        """
        late = [(operation, operation.name, operation.awaited()) for operation in operations if not operation.done]
        if waiter.keeps:
            self._leave(waiter, operations)
        else:
            self._give_up(waiter, operations)
        missed = [fact for fact in late if not fact[0].done or isinstance(fact[0].error, Cancelled)]
        cancelled = [operation for operation, _, _ in missed]
        for operation in operations:
            if operation.error is not None and operation not in cancelled:
                raise copy(operation.error)
        if missed:
            name = missed[0][1] if len(missed) == 1 else f"{missed[0][1]} and {len(missed) - 1} more"
            raise OperationTimeout(operation=name, waiting_for=[peer for _, _, peer in missed[:8]], timeout=timeout)

    # -- closing ---------------------------------------------------------------------------------------

    def when_forked(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Run `callback` in a forked child. It must not take locks. Return an idempotent unregister function."""
        key = object()
        self._on_fork[key] = callback

        def forget() -> None:
            self._on_fork.pop(key, None)

        return forget

    def close(self) -> None:
        """Close every transport. Close links first. Pending waits raise. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._event_loop.stop()
        self._election.end(UsageError(NODE_CLOSED))
        self._progress_thread.close()
        try:
            with self._driver_lock:  # a waiting thread may still drive; it was woken and leaves
                self._event_loop.close()
        finally:
            process_hooks.node_closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def abandon(self) -> None:
        """In a forked child: release without waiting."""
        self._closed = self.is_abandoned = True
        self._election.abandon(UsageError(f"this node {OF_THE_PARENT}"))
        if self.lock.locked():  # by a thread that does not exist in this process
            self.lock.release()
        for callback in list(self._on_fork.values()):
            callback()
        self._event_loop.abandon()
