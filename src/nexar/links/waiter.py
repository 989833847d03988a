"""One thread that waits: how many of its operations are not done yet, and the sleep that their end ends."""

from __future__ import annotations

import threading


class Waiter:
    """Counts down to zero, or falls to zero at the first error: a wait that has failed waits for nothing more.

    Written under the node's lock, but for the sleep itself, which is a lock that whoever wakes us releases.
    """

    __slots__ = ("_signal", "asleep", "keeps", "pending")

    def __init__(self) -> None:
        self.pending = 0
        self.keeps = False  # at its deadline the operations go on without it; set before it waits
        self.asleep = False
        self._signal: threading.Lock | None = None

    def count(self, error: BaseException | None) -> None:
        """One operation has ended. Those that end after an error find zero, and leave it so."""
        if error is None and self.pending > 1:
            self.pending -= 1
        else:
            self.pending = 0
            if self.asleep:
                self.wake()

    def prepare(self) -> None:
        """The next wake() ends the next sleep(), also if it comes first."""
        if self._signal is None:
            self._signal = threading.Lock()
            self._signal.acquire()
        self.asleep = True

    def sleep(self, timeout: float) -> None:
        """Until woken or timed out; at times for no reason, when two woke the sleep before."""
        signal = self._signal
        if signal is not None:
            signal.acquire(timeout=timeout)

    def wake(self) -> None:
        """At most one release for each prepare(). Under the lock, or in a signal handler of the waiting thread."""
        if self.asleep and self._signal is not None:
            self.asleep = False
            try:
                self._signal.release()
            except RuntimeError:  # a signal handler and a finished operation woke it at the same moment
                return
