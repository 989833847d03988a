"""Who drives a node: one thread at a time, and those that would if it left.

Why no wake-up is lost: a follower first enters the list and then looks whether somebody leads, and whether waiting is
over; a leader first gives up leadership and then looks at the list, and who ends all waiting says so first and then
wakes the list. Of each pair, one sees the other.

The waiter of last resort: a thread that drives a node while nobody who waits does.

It looks on every tick whether leadership was taken since the last one. Where it never changes hands for long
(one thread leads, and sleeps while it does), ticks would only burn power: the thread parks, and who gives leadership
up wakes it. Who leaves work behind and will not wait for it asks it to `step_in` at once.

Progress by the waiter: whoever waits drives the node's transports for everybody.

Law: while any operation is pending, exactly one thread *leads* — it alone calls `poll()` and `sleep()`, and so
it alone runs sinks — and it hands leadership over before it leaves. The others *follow*: each sleeps on a
signal of its own, which is given when its operations are done, when one has failed, or when leadership is free. A
thread that computes without calling us leads nothing; then the node's progress thread takes over.
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
    """The lead of one node."""

    def __init__(self, lock: threading.Lock, on_end: Callable[[], None] = lambda: None) -> None:
        """`on_end` is called whenever `end` is: by whichever thread, not under the lock, and must not block."""
        self._lock = lock  # the node's
        self._on_end = on_end
        self.driver_lock = threading.Lock()  # held by the leading thread
        self.takeovers = 0  # how often a waiting thread took the lead; written by who takes it
        self.waiting_threads: list[Waiter] = []  # each appends and removes itself; list methods are atomic
        self.ended: NexarError | None = None  # why waiting is over: closed, forked, or a bug; each writes it once

    def offer(self) -> None:
        """The lead is free: wake one follower that still waits; it leads, or offers in its turn when it leaves."""
        with self._lock:
            for follower in list(self.waiting_threads):
                if follower.asleep:
                    follower.wake()
                    return

    def end(self, reason: NexarError) -> None:
        """Every wait raises `reason`, now and later. All are woken: one that raises has nothing to offer to the next,
        while who closes the node holds the lead.
        """
        self.ended = reason
        with self._lock:
            for follower in list(self.waiting_threads):
                follower.wake()
        self._on_end()

    def abandon(self, reason: NexarError) -> None:
        """In a forked child: those who followed or led are not here."""
        self.ended = reason
        self.waiting_threads.clear()


_TICK: Final = 0.002  # how long nobody must have led before this thread does
_CLOSE_TIMEOUT: Final = 10  # ticks under one and the same leader before it parks


class ProgressThread:
    """The progress thread of one node. Ends when the drive is stopped and `close` is called."""

    def __init__(self, election: DriverElection, event_loop: EventLoop) -> None:
        self._election = election
        self._driver_lock = election.driver_lock
        self._event_loop = event_loop
        self.is_driving = False  # written by the thread
        self.parked = False  # written by the thread, cleared by who unparks it
        self._asked = False  # to lead at once, if nobody does; written by who asks, cleared by the thread
        self._unpark = threading.Lock()
        self._unpark.acquire()
        self._thread = threading.Thread(target=self._run, name="nexar-progress", daemon=True)
        self._thread.start()

    def step_in(self) -> None:
        """Lead now, if nobody does. From any thread."""
        if not self.is_driving:
            self._asked = True
            self.unpark()

    def unpark(self) -> None:
        """Leadership was given up: look again."""
        self.parked = False
        try:
            self._unpark.release()
        except RuntimeError:  # two leaders in a row saw it parked; one wake-up is enough
            return

    def close(self) -> None:
        """Returns when the thread has ended. The drive was stopped before."""
        self.unpark()
        self._thread.join()

    def _run(self) -> None:
        """Ends with the node, or with a bug, ours or of who made a transport: every wait raises it then."""
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
            self._rest(parked=quiet >= _CLOSE_TIMEOUT)

    def _take_turn(self) -> None:
        self.is_driving = True
        try:
            self._event_loop.until_followed(self._election.waiting_threads)
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
            self.parked = False  # it became free before its leader could see that we parked
            return
        self._unpark.acquire(timeout=LONGEST_SLEEP if parked else _TICK)


DEFAULT_SPIN = 200e-6
"""Longer than a round trip to a peer that sleeps: two that talk thereby find back to spinning, whoever slept first."""

Outcome = TypeVar("Outcome")


def spin_of(microsecs: int | str) -> float:
    """Seconds, of the setting `spin_microsecs`."""
    return DEFAULT_SPIN if isinstance(microsecs, str) else microsecs / 1e6


class Progress:
    """Drives the transports of one node. Close it, or leave its `with` block; interpreter exit closes it too."""

    def __init__(
        self,
        sleeper: Sleeper,
        transports: Sequence[Transport],
        *,
        spin: float = DEFAULT_SPIN,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_end`, which must not block, is called when nobody drives any more: the node closes, or something broke.
        Who waits for the node elsewhere hears of it so, and asks `check` why.
        """
        self.lock = threading.Lock()
        """The node's lock: every link, matching and operation of this node changes under it; never held across a
        wait.
        """
        self.spin = spin
        self._event_loop = EventLoop(sleeper, transports, spin)
        self._wake = sleeper.wake
        self._election = DriverElection(self.lock, on_end)
        self._driver_lock = self._election.driver_lock
        self._waiting_threads = self._election.waiting_threads
        self._closed = False  # written once, by who closes
        self._on_fork: dict[object, Callable[[], None]] = {}
        process_hooks.node_opened(self)
        self._progress_thread = ProgressThread(self._election, self._event_loop)

    # -- waiting ---------------------------------------------------------------------------------------

    def wait(
        self, operations: Sequence[Operation], deadline: float, alarm: Operation | None = None, *, keep: bool = False
    ) -> None:
        """Drive until all are done (or follow a thread that does). The first error among them ends it at once, and so
        does that of `alarm`, which is not waited for otherwise, and not cancelled.

        At the deadline (time.monotonic) raises OperationTimeout. Whatever is raised, also by Ctrl-C: operations not
        done by then are cancelled first, so their buffers are free. `keep`: not so at the deadline, which only ends the
        waiting then; the caller waits for them again, or cancels them.
        """
        waiter = Waiter()
        waiter.keeps = keep
        with self.lock:
            for operation in operations:
                if not operation.done:
                    operation.join(waiter)
                elif operation.error is not None:
                    waiter.pending = 0  # raised below, without waiting for those that joined
                    break
        if waiter.pending:
            if alarm is None:
                self._wait(waiter, operations, deadline)
            else:
                self._wait_alarmed(waiter, operations, deadline, alarm)
        for operation in operations:
            if operation.error is not None:
                self._fail(waiter, operations, operation.error)

    def waits(self) -> list[tuple[int, str, float]]:
        """Which thread waits for what, by its name, and since when (time.monotonic). It is read off the stacks of the
        threads, so a wait pays nothing for it. Takes no lock: who asks may want to know why it is held.

        The frame of this call is among them. No variable may refer to it when this returns: such a cycle would keep
        every frame below alive, and so a request that its user has dropped, until the collector runs.
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
        """A thread may be in several waits: a signal handler that runs in one may wait in its turn."""
        while frame is not None:
            if frame.f_code is Progress._wait.__code__ and frame.f_locals["self"] is self:
                yield frame.f_locals["operations"], frame.f_locals.get("begin", monotonic())
            frame = frame.f_back

    def check(self) -> None:
        """For what needs no waiting: raise what every wait would raise, once the node is closed or was forked."""
        if self._election.ended is not None:
            raise copy(self._election.ended)

    def _wait_alarmed(self, waiter: Waiter, operations: Sequence[Operation], deadline: float, alarm: Operation) -> None:
        """An alarm outlives many waits, so each takes its callback back."""

        def ring() -> None:
            if alarm.error is not None:
                waiter.count(alarm.error)
                self._wake()  # who waits may be leading, and asleep

        with self.lock:
            alarm.when_done(ring)
        try:
            if waiter.pending:
                self._wait(waiter, operations, deadline)
        finally:
            with self.lock:
                alarm.forget(ring)
        if alarm.error is not None and not all(operation.done for operation in operations):
            self._fail(waiter, operations, alarm.error)

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
                self._election.offer()  # leadership was offered to us and we need it no more
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

    # -- what is driven besides the transports ---------------------------------------------------------

    def add_poller(self, poller: Poller) -> None:
        """Let who leads look at it too, from now on and until it is removed. Not under the node's lock."""
        with self.lock:
            self._event_loop.add(poller)

    def remove_poller(self, poller: Poller) -> None:
        """Who leads may be in the middle of a look at it, and does not begin another. Idempotent. Not under the node's
        lock.
        """
        with self.lock:
            self._event_loop.remove(poller)

    def run_soon(self, task: Callable[[], None]) -> None:
        """Whoever leads runs `task`, outside the node's lock: after its next look at the transports, in any case before
        it sleeps. From any thread, also under the node's lock. It must not block. What it raises is our bug, and ends
        all waiting with an InternalError.
        """
        self._event_loop.run_soon(task)

    def leave_behind(self) -> None:
        """The caller has posted work and does not wait: the progress thread leads from now on, unless somebody does.
        Otherwise it would look only after some milliseconds in which nobody led.
        """
        self._progress_thread.step_in()

    def wake(self) -> None:
        """Let who leads look again before it sleeps on. Costs little where nobody sleeps."""
        self._wake()

    def run_inline(self, task: Callable[..., Outcome], *facts: Any) -> Outcome:
        """Run `task(*facts)` now, in this thread, whoever leads: a shortcut past the queue of something that is driven.

        It may look at memory for as long as `spin`, no longer. Signals are put off meanwhile, as in every verb, and the
        progress thread neither takes the lead nor keeps it: asleep it would ask peers to ring for it.
        """
        self.check()
        election = self._election
        election.takeovers += 1
        if not self._progress_thread.is_driving:
            return task(*facts)
        passing = Waiter()  # a follower that never sleeps: whoever offers the lead passes it by
        self._waiting_threads.append(passing)
        self._wake()
        try:
            return task(*facts)
        finally:
            self._waiting_threads.remove(passing)

    # -- waits that fail -------------------------------------------------------------------------------

    def _fail(self, waiter: Waiter, operations: Sequence[Operation], error: BaseException) -> NoReturn:
        self._give_up(waiter, operations)
        raise copy(error)  # its own: several operations may have failed for one reason

    def _give_up(self, waiter: Waiter, operations: Sequence[Operation]) -> None:
        self._leave(waiter, operations)
        for operation in operations:
            operation.cancel()

    def _leave(self, waiter: Waiter, operations: Sequence[Operation]) -> None:
        with self.lock:
            for operation in operations:
                operation.part(waiter)

    def _expire(self, waiter: Waiter, operations: Sequence[Operation], timeout: float) -> None:
        """The deadline has come. Others may still finish what we give up, up to the moment in which cancel() returns:
        only what has been cancelled then was missed, and a failure of its own says more than that it was late.
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

    # -- the end ---------------------------------------------------------------------------------------

    def when_forked(self, callback: Callable[[], None]) -> Callable[[], None]:
        """`callback` runs in a forked child, which has one thread and must not take locks.

        Call what is returned to unregister it (idempotent), or it is kept for as long as the node.
        """
        key = object()
        self._on_fork[key] = callback

        def forget() -> None:
            self._on_fork.pop(key, None)

        return forget

    def close(self) -> None:
        """Stop the progress thread, then close every transport.

        Links must have been closed before; pending waits raise. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        self._event_loop.stop()
        self._election.end(UsageError("this node is closed; nothing drives its links any more"))
        self._progress_thread.close()
        try:
            with self._driver_lock:  # a waiting thread may still lead; it was kicked and leaves
                self._event_loop.close()
        finally:
            process_hooks.node_closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def abandon(self) -> None:
        """In a forked child: see nodes."""
        self._closed = True
        self._election.abandon(
            UsageError("this node belongs to the parent process; a forked child must make its own with nexar.init()")
        )
        if self.lock.locked():  # by a thread that has no part in this process: nobody else would ever release it
            self.lock.release()
        for callback in list(self._on_fork.values()):
            callback()
        self._event_loop.abandon()
