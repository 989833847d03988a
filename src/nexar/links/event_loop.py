"""The driver thread's event loop: poll transports and pollers, run tasks, sleep.

Polling memory costs far less than a wake-up, so after an event the loop spins for a while and yields to other threads.
Under constant events it never sleeps, so it also reads the clock every few busy rounds.

No task is missed: a thread appends its task, then checks whether the driver sleeps; the driver sets `_sleeps`, then
checks for tasks.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import monotonic
from typing import Final, Protocol

from nexar.errors import InternalError
from nexar.links.operation import Waiter
from nexar.links.process_hooks import interrupts
from nexar.transport.base import Sleeper, Transport
from nexar.transport.registry import TransportFailed

LONGEST_SLEEP: Final = 3600.0
# One wait of a thread that must handle signals: a signal just before a system call begins does not interrupt it, so its
# handler runs only after the call.
LONGEST_WAIT: Final = 0.5
_SLOW_YIELD: Final = 100e-6  # a yield that took longer: other threads need this core, so sleep
_YIELD_EVERY: Final = 4  # polls per yield: a poll is cheaper, and detects an event sooner
_NATIVE_EVERY: Final = 8  # memory polls per poll of the native transport, a system call
_CLOCK_EVERY: Final = 16  # busy rounds per reading of the clock
_MAX_FAULTS: Final = 1000  # more than the connections that a node can lose at a time
_FAULT_WINDOW: Final = 10.0  # seconds
_log = logging.getLogger(__name__)


class Poller(Protocol):
    """Memory that the driver polls. Driver only."""

    def poll(self) -> bool: ...

    @property
    def spins(self) -> bool: ...

    def prepare_sleep(self) -> bool:
        """Return False if there is an event."""


class TaskRaised(InternalError):
    """A task raised. All waits end, because its waiters are unknown."""


class EventLoop:
    """The transports of one node. Driver only, except where stated."""

    def __init__(self, sleeper: Sleeper, transports: Sequence[Transport], spin: float) -> None:
        self.spin = spin
        self.wake = sleeper.wake  # ends the driver's sleep
        self.stopped = False  # set once, when the node closes
        self._sleeper = sleeper
        self._transports = tuple(transports)
        self._native = sleeper if isinstance(sleeper, Transport) else None
        self._memory: tuple[Poller, ...] = tuple(each for each in transports if each is not self._native)
        self._pollers: tuple[Poller, ...] = ()  # also in _memory; both tuples are replaced, never changed
        self._tasks: deque[Callable[[], object]] = deque()  # any thread appends
        self._sleeps = False  # or is about to sleep
        self._pending = interrupts.pending
        self._faults: deque[float] = deque(maxlen=_MAX_FAULTS)  # times at which transports raised

    def until_done(self, waiter: Waiter, deadline: float) -> None:  # noqa: C901 - a call per poll would cost more
        """Drive until `waiter` is done, the deadline passes, a signal handler must run, or the node closes."""
        tasks, pending = self._tasks, self._pending
        rounds = busy_rounds = 0
        now = spin_until = 0.0
        while waiter.pending and not (self.stopped or pending):
            busy = False
            for memory in self._memory:
                try:
                    if memory.poll():
                        busy = True
                except Exception as fault:  # noqa: BLE001 - see _log_fault
                    self._log_fault(fault, memory)
                    busy = True
            if (tasks and self._run_tasks()) or busy:
                rounds = 0
                busy_rounds += 1
                if busy_rounds % _CLOCK_EVERY or monotonic() < deadline:
                    continue
                return
            before, now = now, monotonic()
            if now >= deadline:
                return
            if not rounds:  # more events are likely after one: spin before sleeping
                spin_until = now + self.spin
            elif now - before > _SLOW_YIELD:
                spin_until = now
            rounds += 1
            if now >= spin_until or not self._spin_again(rounds):
                self._sleep(min(deadline - now, LONGEST_WAIT), self.spin if rounds == 1 else 0.0)
                rounds = 0 if rounds == 1 else rounds

    def until_thread_waits(self, waiting_threads: Sequence[Waiter]) -> None:
        """Drive until a thread waits or the node closes. Never spins."""
        while not waiting_threads and not self.stopped:
            busy = False
            for memory in self._memory:
                try:
                    busy = memory.poll() or busy
                except Exception as fault:  # noqa: BLE001 - see _log_fault
                    self._log_fault(fault, memory)
                    busy = True
            if not ((self._tasks and self._run_tasks()) or busy):
                self._sleep(LONGEST_SLEEP, 0.0)

    # -- any thread ------------------------------------------------------------------------------------

    def run_soon(self, task: Callable[[], object]) -> None:
        self._tasks.append(task)
        if self._sleeps:
            self.wake()

    def add(self, poller: Poller) -> None:
        """The caller serialises `add` and `remove`."""
        self._pollers = (*self._pollers, poller)
        self._memory = (*self._memory, poller)
        self.wake()

    def remove(self, poller: Poller) -> None:
        """Idempotent. The driver may still be polling it on return."""
        self._pollers = tuple(each for each in self._pollers if each is not poller)
        self._memory = tuple(each for each in self._memory if each is not poller)

    def stop(self) -> None:
        self.stopped = True
        self.wake()

    # -- closing ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Run the remaining tasks, because threads wait for them, and close all transports. Call `stop` first."""
        with ExitStack() as closing:  # close each, even if another one raises
            for transport in reversed(self._transports):
                closing.callback(transport.close)
            while self._tasks:
                self._run_tasks()

    def abandon(self) -> None:
        self.stopped = True
        for transport in self._transports:
            transport.abandon()

    # -- one round -------------------------------------------------------------------------------------

    def _run_tasks(self) -> bool:
        """Run the present tasks. Tasks that they add run after the next poll."""
        for _ in range(len(self._tasks)):
            try:
                self._tasks.popleft()()
            except BaseException as fault:
                raise TaskRaised(f"a task of the driver thread raised {fault!r}") from fault
        return True

    def _spin_again(self, rounds: int) -> bool:
        for memory in self._memory:
            if memory.spins:
                if rounds % _YIELD_EVERY == 0:
                    if self._native is not None and rounds % _NATIVE_EVERY == 0:
                        self._poll_native(self._native)
                    os.sched_yield()
                return True
        return False

    def _poll_native(self, native: Transport) -> None:
        try:
            native.poll()
        except Exception as fault:  # noqa: BLE001 - see _log_fault
            self._log_fault(fault, native)

    def _sleep(self, timeout: float, spin: float) -> None:
        """`spin`: seconds that the native sleeper polls first."""
        for transport in self._transports:
            if not transport.prepare_sleep():
                return
            due = transport.due()
            if due is not None:
                timeout = min(timeout, due - monotonic())
        for poller in self._pollers:
            if not poller.prepare_sleep():
                return
        self._sleeps = True
        try:
            if not self._tasks:
                self._sleeper.sleep(max(timeout, 0.0), spin)
        except Exception as fault:  # noqa: BLE001 - see _log_fault
            self._log_fault(fault, self._native)
        finally:
            self._sleeps = False

    def _log_fault(self, fault: Exception, raised_by: object) -> None:
        """Log a fault whose connection is closed already. Raise a fault without a connection, and too many faults."""
        if raised_by not in self._transports or isinstance(fault, TransportFailed):
            raise fault
        now = monotonic()
        self._faults.append(now)
        if len(self._faults) == _MAX_FAULTS and now - self._faults[0] < _FAULT_WINDOW:
            often = f"transports raised {_MAX_FAULTS} times within {_FAULT_WINDOW:g} s"
            raise InternalError(f"{often}, the last time {fault!r}") from fault
        _log.error("closed a connection: handling its input raised %r", fault, exc_info=fault)
