"""What the leading thread does: look for news in every transport, and sleep when there is none.

Looking at memory costs far less than a sleep and the waking from it, so after news it looks again for a while
(`spin`), letting other threads run in between. Under constant news it never gets to the point of sleeping, where the
clock is read, so it reads the clock every few rounds of news too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import monotonic
from typing import Final

from nexar.links.interrupt import interrupts
from nexar.links.waiter import Waiter
from nexar.transport.base import Sleeper, Transport

LONGEST_SLEEP: Final = 3600.0
LONGEST_WAIT: Final = 0.5
"""At one go, for a thread that must hear of signals: one that comes in the instant before a system call begins does not
end it, so its handler runs only after the call.
"""
_CROWDED: Final = 100e-6  # a yield that took longer: others need this core more than we do, so sleep
_YIELD_EVERY: Final = 4  # looks at memory for one yield: a look is cheaper, and what comes is seen sooner
_NATIVE_EVERY: Final = 8  # rounds of looking at memory for one round of asking the system
_CLOCK_EVERY: Final = 16  # rounds of news for one look at the clock


class Drive:
    """The transports of one node. Only the leading thread calls in here, but for `stop` and `kick`."""

    def __init__(self, sleeper: Sleeper, transports: Sequence[Transport], spin: float) -> None:
        self.spin = spin
        self.kick = sleeper.kick
        """Ends the sleep of who leads."""
        self.stopped = False  # written once, by who closes the node
        self._sleeper = sleeper
        self._transports = tuple(transports)
        self._native = sleeper if isinstance(sleeper, Transport) else None
        self._memory = tuple(transport for transport in transports if transport is not self._native)
        self._pending = interrupts.pending

    def until_done(self, waiter: Waiter, deadline: float) -> None:
        """Until nothing is pending, the deadline has come, a signal wants its handler run, or the node closes."""
        memory, pending = self._memory, self._pending
        rounds = news = 0
        now = spin_until = 0.0
        while waiter.pending and not (self.stopped or pending):
            busy = False
            for transport in memory:
                if transport.poll():
                    busy = True
            if busy:
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

    def until_followed(self, followers: Sequence[Waiter]) -> None:
        """Until somebody else wants to, or the node closes. Never spins: nobody waits."""
        while not followers and not self.stopped:
            busy = False
            for transport in self._memory:
                busy = transport.poll() or busy
            if not busy:
                self._sleep(LONGEST_SLEEP, 0.0)

    def stop(self) -> None:
        """Nobody drives any more; who does now leaves."""
        self.stopped = True
        self.kick()

    def close(self) -> None:
        """By who holds the lead, after `stop`."""
        for transport in self._transports:
            transport.close()

    def abandon(self) -> None:
        """In a forked child."""
        self.stopped = True
        for transport in self._transports:
            transport.abandon()

    def _look_again(self, rounds: int) -> bool:
        """Is there memory worth looking at again? Then let others run for a moment, and look."""
        for transport in self._memory:
            if transport.spins:
                if rounds % _YIELD_EVERY == 0:
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
                timeout = min(timeout, due - monotonic())
        self._sleeper.sleep(max(timeout, 0.0), spin)
