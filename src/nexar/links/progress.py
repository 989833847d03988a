"""Progress by the waiter: whoever waits drives the node's transports for everybody.

Law: while any operation is pending, exactly one thread *leads* — it alone calls `poll()` and `sleep()`, and so
it alone runs sinks — and it hands leadership over before it leaves. The others *follow*: each sleeps on a
signal of its own, which is given when its operations are done or when leadership is free. A thread that computes
without calling us leads nothing; then the node's progress thread, the waiter of last resort, takes over.

Why no wake-up is lost: a follower first enters the list and then looks whether somebody leads; a leader
first gives up leadership and then looks at the list. One of the two sees the other.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import Self

from nexar.errors import InternalError, NexarError, OperationTimeout, UsageError
from nexar.links.interrupt import interrupts
from nexar.links.operation import Operation, Waiter
from nexar.transport.base import Sleeper, Transport

DEFAULT_SPIN = 200e-6
"""Longer than a round trip to a peer that sleeps: two that talk thereby find back to spinning, whoever slept first."""
_CROWDED = 100e-6  # a yield that took longer: others need this core more than we do, so sleep
_TICK = 0.002  # how long nobody must have led before the progress thread does
_PATIENCE = 10  # ticks under one and the same leader before the progress thread parks
_LONGEST_SLEEP = 3600.0
_NATIVE_EVERY = 8  # rounds of looking at memory for one round of asking the system


class Progress:
    """Drives the transports of one node. Close it, or leave its `with` block; interpreter exit closes it too."""

    def __init__(self, sleeper: Sleeper, transports: Sequence[Transport], *, spin: float = DEFAULT_SPIN) -> None:
        self.lock = threading.Lock()
        """The node's lock: every link, matching and operation of this node changes under it; never held across a
        wait.
        """
        self.spin = spin
        self._sleeper = sleeper
        self._kick = sleeper.kick
        self._transports = tuple(transports)
        self._native = sleeper if isinstance(sleeper, Transport) else None
        self._memory = tuple(transport for transport in transports if transport is not self._native)
        self._leading = threading.Lock()  # held by the leading thread
        self._turns = 0  # how often leadership was taken; written by who takes it
        self._followers: list[
            Waiter
        ] = []  # appended and removed by followers, read by leaders; list methods are atomic
        self._background_leads = False  # written by the progress thread
        self._parked = False  # written by the progress thread, cleared by who unparks it
        self._unpark = threading.Lock()
        self._unpark.acquire()
        self._closed = False  # written once, by close()
        self._ended: NexarError | None = None  # why waiting is over: closed, forked, or a bug; each writes it once
        self._on_fork: list[Callable[[], None]] = []
        _register(self)
        self._thread = threading.Thread(target=self._watch, name="nexar-progress", daemon=True)
        self._thread.start()

    # -- waiting ---------------------------------------------------------------------------------------

    def wait(self, operations: Sequence[Operation], deadline: float) -> None:
        """Drive until all are done (or follow a thread that does), then raise the first error among them.

        At the deadline (time.monotonic) raises OperationTimeout. Whatever is raised, also by Ctrl-C: operations not
        done by then are cancelled first, so their buffers are free.
        """
        waiter = Waiter()
        with self.lock:
            for operation in operations:
                if not operation.done:
                    operation.join(waiter)
        if waiter.pending:
            self._wait(waiter, operations, deadline)
        for operation in operations:
            if operation.error is not None:
                raise copy(operation.error)

    def _wait(self, waiter: Waiter, operations: Sequence[Operation], deadline: float) -> None:
        begin = time.monotonic()
        in_main = interrupts.begin(self._kick, waiter.wake)
        try:
            while waiter.pending:
                if self._leading.acquire(False):
                    self._take_turn(waiter, deadline)
                else:
                    self._follow(waiter, deadline)
                if waiter.pending:
                    if in_main:
                        interrupts.settle()
                    if time.monotonic() >= deadline:
                        raise self._timeout(operations, deadline - begin)
        except BaseException:
            self._give_up(waiter, operations)
            raise
        finally:
            if self._followers and not self._leading.locked():
                self._offer()  # leadership was offered to us and we need it no more
            if in_main:
                interrupts.end()

    def _give_up(self, waiter: Waiter, operations: Sequence[Operation]) -> None:
        with self.lock:
            for operation in operations:
                operation.part(waiter)
        for operation in operations:
            operation.cancel()

    def _timeout(self, operations: Sequence[Operation], timeout: float) -> OperationTimeout:
        pending = [operation for operation in operations if not operation.done]
        name = pending[0].name if len(pending) == 1 else f"{pending[0].name} and {len(pending) - 1} more"
        return OperationTimeout(operation=name, waiting_for=[p.awaited() for p in pending[:8]], timeout=timeout)

    def _follow(self, waiter: Waiter, deadline: float) -> None:
        if self._ended is not None:
            raise copy(self._ended)
        with self.lock:
            if not waiter.pending:
                return
            waiter.prepare()
        self._followers.append(waiter)
        try:
            if self._background_leads:
                self._sleeper.kick()
            if self._leading.locked():
                waiter.sleep(min(max(deadline - time.monotonic(), 0.0), _LONGEST_SLEEP))
        finally:
            self._followers.remove(waiter)

    # -- leading ---------------------------------------------------------------------------------------

    def _take_turn(self, waiter: Waiter, deadline: float) -> None:
        self._turns += 1
        try:
            if self._ended is not None:
                raise copy(self._ended)
            self._lead(waiter, deadline)
        finally:
            self._leading.release()
            if self._followers:
                self._offer()
            if self._parked:
                self._wake_background()

    def _lead(self, waiter: Waiter, deadline: float) -> None:
        memory = self._memory
        rounds = 0
        now = spin_until = 0.0
        while waiter.pending and not (self._closed or interrupts.pending):
            busy = False
            for transport in memory:
                if transport.poll():
                    busy = True
            if busy:
                rounds = 0
                continue
            before, now = now, time.monotonic()
            if now >= deadline:
                return
            if not rounds:  # after news, more is likely: look again for a while before sleeping
                spin_until = now + self.spin
            elif now - before > _CROWDED:
                spin_until = now
            rounds += 1
            if now >= spin_until or not self._look_again(rounds):
                self._sleep(deadline - now, self.spin if rounds == 1 else 0.0)
                rounds = 0 if rounds == 1 else rounds

    def _look_again(self, rounds: int) -> bool:
        """Is there memory worth looking at again? Then let others run for a moment, and look."""
        for transport in self._memory:
            if transport.spins:
                if self._native is not None and rounds % _NATIVE_EVERY == 0:
                    self._native.poll()
                os.sched_yield()
                return True
        return False

    def _sleep(self, timeout: float, spin: float) -> None:
        """One sleep, ended by news. Spinning inside is for the native sleeper, which can look while it spins."""
        for transport in self._transports:
            if not transport.arm():
                return
            due = transport.due()
            if due is not None:
                timeout = min(timeout, due - time.monotonic())
        self._sleeper.sleep(min(max(timeout, 0.0), _LONGEST_SLEEP), spin)

    def _offer(self) -> None:
        """Leadership is free: wake one follower that still waits; it leads, or offers in its turn when it leaves."""
        with self.lock:
            for follower in list(self._followers):
                if follower.asleep:
                    follower.wake()
                    return

    # -- the waiter of last resort ---------------------------------------------------------------------

    def _watch(self) -> None:
        """Ends with close(), or with a bug: then every wait raises it rather than hang."""
        try:
            self._take_over_when_idle()
        except BaseException as fault:
            self._ended = InternalError(f"the progress thread ended: {fault!r}")
            with self.lock:
                for follower in list(self._followers):
                    follower.wake()
            raise

    def _take_over_when_idle(self) -> None:
        seen = -1
        quiet = 0
        while not self._closed:
            if self._turns == seen and self._leading.acquire(blocking=False):
                self._lead_in_background()
                seen, quiet = -1, 0
            elif self._turns == seen:
                quiet += 1
            else:
                seen, quiet = self._turns, 0
            self._rest(parked=quiet >= _PATIENCE)

    def _rest(self, *, parked: bool) -> None:
        if self._closed:
            return
        self._parked = parked
        if parked and not self._leading.locked():
            self._parked = False  # it became free before it could see that we parked
            return
        self._unpark.acquire(timeout=_LONGEST_SLEEP if parked else _TICK)

    def _wake_background(self) -> None:
        self._parked = False
        try:
            self._unpark.release()
        except RuntimeError:  # two leaders in a row saw it parked; one wake-up is enough
            return

    def _lead_in_background(self) -> None:
        """Drive until somebody else wants to, or the node closes."""
        self._background_leads = True
        try:
            while not self._followers and not self._closed:
                busy = False
                for transport in self._memory:
                    busy = transport.poll() or busy
                if not busy:
                    self._sleep(_LONGEST_SLEEP, 0.0)
        finally:
            self._background_leads = False
            self._leading.release()
            if self._followers:
                self._offer()

    # -- the end ---------------------------------------------------------------------------------------

    def when_forked(self, callback: Callable[[], None]) -> None:
        """`callback` runs in a forked child, which has one thread and must not take locks."""
        self._on_fork.append(callback)

    def close(self) -> None:
        """Stop the progress thread, then close every transport.

        Links must have been closed before; pending waits raise. Idempotent.
        """
        if self._closed:
            return
        self._ended = UsageError("this node is closed; nothing drives its links any more")
        self._closed = True
        _live.pop(id(self), None)
        self._sleeper.kick()
        self._wake_background()
        self._thread.join()
        with self._leading:  # a waiting thread may still lead; it was kicked and leaves
            for transport in self._transports:
                transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _abandon(self) -> None:
        self._closed = True
        self._ended = UsageError(
            "this node belongs to the parent process; a forked child must make its own with nexar.init()"
        )
        if self.lock.locked():  # by a thread that has no part in this process: nobody else would ever release it
            self.lock.release()
        for callback in self._on_fork:
            callback()
        for transport in self._transports:
            transport.abandon()


_live: dict[int, Progress] = {}  # nodes of this process that are open; written by their makers and closers


def _register(progress: Progress) -> None:
    """At exit the hook registered last runs first: nodes must close before the packages that they stand on."""
    _live[id(progress)] = progress
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    for progress in list(_live.values()):
        progress.close()


def _abandon_all() -> None:
    for progress in list(_live.values()):
        progress._abandon()
    _live.clear()


os.register_at_fork(after_in_child=_abandon_all)
