"""Progress by the waiter: whoever waits drives the node's transports for everybody.

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
from typing import Any, NoReturn, Self, TypeVar

from nexar.errors import Cancelled, OperationTimeout, UsageError
from nexar.links import nodes
from nexar.links.background import Background
from nexar.links.drive import LONGEST_SLEEP, LONGEST_WAIT, Drive, Poller, TaskRaised
from nexar.links.interrupt import interrupts
from nexar.links.leadership import Leadership
from nexar.links.operation import Operation
from nexar.links.waiter import Waiter
from nexar.transport.base import Sleeper, Transport
from nexar.transport.foreign import TransportBroke

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
        self._drive = Drive(sleeper, transports, spin)
        self._kick = sleeper.kick
        self._leadership = Leadership(self.lock, on_end)
        self._lead = self._leadership.lead
        self._followers = self._leadership.followers
        self._closed = False  # written once, by who closes
        self._on_fork: dict[object, Callable[[], None]] = {}
        nodes.opened(self)
        self._background = Background(self._leadership, self._drive)

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
        if self._leadership.ended is not None:
            raise copy(self._leadership.ended)

    def _wait_alarmed(self, waiter: Waiter, operations: Sequence[Operation], deadline: float, alarm: Operation) -> None:
        """An alarm outlives many waits, so each takes its callback back."""

        def ring() -> None:
            if alarm.error is not None:
                waiter.count(alarm.error)
                self._kick()  # who waits may be leading, and asleep

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
        in_main = interrupts.begin(self._kick, waiter)
        try:
            while waiter.pending:
                if self._lead.acquire(False):
                    self._take_turn(waiter, deadline)
                else:
                    self._follow(waiter, deadline, LONGEST_WAIT if in_main else LONGEST_SLEEP)
                if waiter.pending:
                    if in_main:
                        interrupts.settle()
                    if monotonic() >= deadline:
                        break
        except BaseException:
            self._give_up(waiter, operations)
            raise
        finally:
            if self._followers and not self._lead.locked():
                self._leadership.offer()  # leadership was offered to us and we need it no more
            if in_main:
                interrupts.end()
        if waiter.pending:
            self._expire(waiter, operations, deadline - begin)

    def _take_turn(self, waiter: Waiter, deadline: float) -> None:
        leadership = self._leadership
        leadership.turns += 1
        try:
            self.check()
            self._drive.until_done(waiter, deadline)
        except (TaskRaised, TransportBroke) as fault:
            leadership.end(fault)
            raise
        finally:
            self._lead.release()
            if self._followers:
                leadership.offer()
            if self._background.parked:
                self._background.unpark()

    def _follow(self, waiter: Waiter, deadline: float, longest: float) -> None:
        with self.lock:
            if not waiter.pending:
                return
            waiter.prepare()
        self._followers.append(waiter)
        try:
            self.check()
            if self._background.leads:
                self._kick()
            if self._lead.locked() and not interrupts.pending:  # a signal before prepare() could not wake us
                waiter.sleep(min(max(deadline - monotonic(), 0.0), longest))
        finally:
            self._followers.remove(waiter)

    # -- what is driven besides the transports ---------------------------------------------------------

    def add_poller(self, poller: Poller) -> None:
        """Let who leads look at it too, from now on and until it is removed. Not under the node's lock."""
        with self.lock:
            self._drive.add(poller)

    def remove_poller(self, poller: Poller) -> None:
        """Who leads may be in the middle of a look at it, and does not begin another. Idempotent. Not under the node's
        lock.
        """
        with self.lock:
            self._drive.remove(poller)

    def run_soon(self, task: Callable[[], None]) -> None:
        """Whoever leads runs `task`, outside the node's lock: after its next look at the transports, in any case before
        it sleeps. From any thread, also under the node's lock. It must not block. What it raises is our bug, and ends
        all waiting with an InternalError.
        """
        self._drive.run_soon(task)

    def leave_behind(self) -> None:
        """The caller has posted work and does not wait: the progress thread leads from now on, unless somebody does.
        Otherwise it would look only after some milliseconds in which nobody led.
        """
        self._background.step_in()

    def kick(self) -> None:
        """Let who leads look again before it sleeps on. Costs little where nobody sleeps."""
        self._kick()

    def attempt(self, task: Callable[..., Outcome], *facts: Any) -> Outcome:
        """Run `task(*facts)` now, in this thread, whoever leads: a shortcut past the queue of something that is driven.

        It may look at memory for as long as `spin`, no longer. Signals are put off meanwhile, as in every verb, and the
        progress thread neither takes the lead nor keeps it: asleep it would ask peers to ring for it.
        """
        self.check()
        leadership = self._leadership
        leadership.turns += 1
        if not self._background.leads:
            return task(*facts)
        passing = Waiter()  # a follower that never sleeps: whoever offers the lead passes it by
        self._followers.append(passing)
        self._kick()
        try:
            return task(*facts)
        finally:
            self._followers.remove(passing)

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
        self._drive.stop()
        self._leadership.end(UsageError("this node is closed; nothing drives its links any more"))
        self._background.close()
        try:
            with self._lead:  # a waiting thread may still lead; it was kicked and leaves
                self._drive.close()
        finally:
            nodes.closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def abandon(self) -> None:
        """In a forked child: see nodes."""
        self._closed = True
        self._leadership.abandon(
            UsageError("this node belongs to the parent process; a forked child must make its own with nexar.init()")
        )
        if self.lock.locked():  # by a thread that has no part in this process: nobody else would ever release it
            self.lock.release()
        for callback in list(self._on_fork.values()):
            callback()
        self._drive.abandon()
