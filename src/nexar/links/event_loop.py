"""What the leading thread does: look for news in every transport, and sleep when there is none.

Looking at memory costs far less than a sleep and the waking from it, so after news it looks again for a while
(`spin`), letting other threads run in between. Under constant news it never gets to the point of sleeping, where the
clock is read, so it reads the clock every few rounds of news too.

Besides transports it looks at *pollers* (memory that somebody else writes), and runs *tasks* that were handed to it.
Who hands over a task appends it and then looks whether the leader sleeps; the leader says that it is going to and then
looks for tasks: of the two, one sees the other.
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
LONGEST_WAIT: Final = 0.5
"""At one go, for a thread that must hear of signals: one that comes in the instant before a system call begins does not
end it, so its handler runs only after the call.
"""
_CROWDED: Final = 100e-6  # a yield that took longer: others need this core more than we do, so sleep
_YIELD_EVERY: Final = 4  # looks at memory for one yield: a look is cheaper, and what comes is seen sooner
_NATIVE_EVERY: Final = 8  # rounds of looking at memory for one round of asking the system
_CLOCK_EVERY: Final = 16  # rounds of news for one look at the clock
_MOST_FAULTS: Final = 1000  # more than a node has connections to lose at a time
_FAULTS_WITHIN: Final = 10.0  # seconds
_log = logging.getLogger(__name__)


class Poller(Protocol):
    """Memory that is looked at as a memory transport is. Called by the leading thread only."""

    def poll(self) -> bool:
        """Look, and go on with what can go on. True if anything could."""

    @property
    def spins(self) -> bool:
        """Whether looking again soon beats sleeping."""

    def prepare_sleep(self) -> bool:
        """About to sleep: will a descriptor end it? False: there is news. The transports have been armed before."""


class TaskRaised(InternalError):
    """Nobody knows who waits for what a task left undone, so all waiting ends."""


class EventLoop:
    """The transports of one node. Only the leading thread calls in here, but for what says otherwise."""

    def __init__(self, sleeper: Sleeper, transports: Sequence[Transport], spin: float) -> None:
        self.spin = spin
        self.wake = sleeper.wake
        """Ends the sleep of who leads."""
        self.stopped = False  # written once, by who closes the node
        self._sleeper = sleeper
        self._transports = tuple(transports)
        self._native = sleeper if isinstance(sleeper, Transport) else None
        self._memory: tuple[Poller, ...] = tuple(each for each in transports if each is not self._native)
        self._pollers: tuple[Poller, ...] = ()  # these are in _memory too; both are replaced, never changed
        self._tasks: deque[Callable[[], None]] = deque()  # any thread appends
        self._sleeps = False  # or is about to
        self._pending = interrupts.pending
        self._faults: deque[float] = deque(maxlen=_MOST_FAULTS)  # when transports raised

    def until_done(self, waiter: Waiter, deadline: float) -> None:  # noqa: C901 - a call for each look would cost more
        """Until nothing is pending, the deadline has come, a signal wants its handler run, or the node closes."""
        tasks, pending = self._tasks, self._pending
        rounds = news = 0
        now = spin_until = 0.0
        while waiter.pending and not (self.stopped or pending):
            busy = False
            for memory in self._memory:
                try:
                    if memory.poll():
                        busy = True
                except Exception as fault:  # noqa: BLE001 - see _go_on_after
                    self._go_on_after(fault, memory)
                    busy = True
            if (tasks and self._run_tasks()) or busy:
                rounds = 0
                news += 1
                if news % _CLOCK_EVERY or monotonic() < deadline:
                    continue
                return
            before, now = now, monotonic()
            if now >= deadline:
                return
            if not rounds:  # after news, more is likely: look again for a while before sleeping
                spin_until = now + self.spin
            elif now - before > _CROWDED:
                spin_until = now
            rounds += 1
            if now >= spin_until or not self._look_again(rounds):
                self._sleep(min(deadline - now, LONGEST_WAIT), self.spin if rounds == 1 else 0.0)
                rounds = 0 if rounds == 1 else rounds

    def until_followed(self, waiting_threads: Sequence[Waiter]) -> None:
        """Until somebody else wants to, or the node closes. Never spins: nobody waits."""
        while not waiting_threads and not self.stopped:
            busy = False
            for memory in self._memory:
                try:
                    busy = memory.poll() or busy
                except Exception as fault:  # noqa: BLE001 - see _go_on_after
                    self._go_on_after(fault, memory)
                    busy = True
            if not ((self._tasks and self._run_tasks()) or busy):
                self._sleep(LONGEST_SLEEP, 0.0)

    # -- any thread ------------------------------------------------------------------------------------

    def run_soon(self, task: Callable[[], None]) -> None:
        """See Progress.run_soon."""
        self._tasks.append(task)
        if self._sleeps:
            self.wake()

    def add(self, poller: Poller) -> None:
        """One change at a time: the caller sees to that."""
        self._pollers = (*self._pollers, poller)
        self._memory = (*self._memory, poller)
        self.wake()

    def remove(self, poller: Poller) -> None:
        """One change at a time. Who leads may be looking at it just now. Idempotent."""
        self._pollers = tuple(each for each in self._pollers if each is not poller)
        self._memory = tuple(each for each in self._memory if each is not poller)

    def stop(self) -> None:
        """Nobody drives any more; who does now leaves."""
        self.stopped = True
        self.wake()

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """By who holds the lead, after `stop`. What was handed over and not run yet still is: somebody waits for it."""
        with ExitStack() as closing:  # each, whatever another one raises
            for transport in reversed(self._transports):
                closing.callback(transport.close)
            while self._tasks:
                self._run_tasks()

    def abandon(self) -> None:
        """In a forked child."""
        self.stopped = True
        for transport in self._transports:
            transport.abandon()

    # -- one look --------------------------------------------------------------------------------------

    def _run_tasks(self) -> bool:
        """Those that are here now. What they hand over in their turn comes after the next look at the transports."""
        for _ in range(len(self._tasks)):
            try:
                self._tasks.popleft()()
            except BaseException as fault:
                raise TaskRaised(f"a task of the driving thread raised {fault!r}") from fault
        return True

    def _look_again(self, rounds: int) -> bool:
        """Is there memory worth looking at again? Then let others run for a moment, and look."""
        for memory in self._memory:
            if memory.spins:
                if rounds % _YIELD_EVERY == 0:
                    if self._native is not None and rounds % _NATIVE_EVERY == 0:
                        self._ask(self._native)
                    os.sched_yield()
                return True
        return False

    def _ask(self, native: Transport) -> None:
        try:
            native.poll()
        except Exception as fault:  # noqa: BLE001 - see _go_on_after
            self._go_on_after(fault, native)

    def _sleep(self, timeout: float, spin: float) -> None:
        """One sleep, ended by news. Spinning inside is for the native sleeper, which can look while it spins."""
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
        except Exception as fault:  # noqa: BLE001 - see _go_on_after
            self._go_on_after(fault, self._native)
        finally:
            self._sleeps = False

    def _go_on_after(self, fault: Exception, raised_by: object) -> None:
        """What a transport raises has already cost the connection that it concerned, and the operations on it have
        their error (see transport.base: Sinks). So it is logged, and the other connections go on. Raises what is
        nobody's connection, and what comes so often that going on would be a loop.
        """
        if raised_by not in self._transports or isinstance(fault, TransportFailed):
            raise fault
        now = monotonic()
        self._faults.append(now)
        if len(self._faults) == _MOST_FAULTS and now - self._faults[0] < _FAULTS_WITHIN:
            often = f"transports raised {_MOST_FAULTS} times within {_FAULTS_WITHIN:g} s"
            raise InternalError(f"{often}, the last time {fault!r}") from fault
        _log.error("a connection was closed, because handling what came on it raised %r", fault, exc_info=fault)
