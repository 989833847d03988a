"""When a carrier ends, and who may then free what the driving thread might be using.

The driver says "inside", then looks whether the carrier has ended; who ends it says "ended", then looks whether the
driver is inside. Attributes of an object are stored and loaded one at a time, in one order for all threads of the
process, so at least one of the two sees the other, and no lock is needed on the way of every frame:
  the driver sees "ended"   it stays outside, and whoever ended the carrier frees
  it was inside before      whoever ended the carrier leaves the freeing to the driver, and may wait for it
"""

from __future__ import annotations

import threading

from nexar.transport.base import CarrierLost


class Lifetime:
    """Open until `end`. `enter` and `leave` are the driving thread's, the rest is for any thread."""

    __slots__ = ("_lock", "_quiet", "driver", "ended")

    def __init__(self) -> None:
        self.driver = 0  # the thread inside, 0 for none; the driving thread writes
        self.ended: CarrierLost | None = None  # written once, under the lock
        self._quiet: threading.Event | None = (
            None  # set when the driver has left an ended carrier; written under the lock
        )
        self._lock = threading.Lock()

    def enter(self) -> bool:
        """False if the carrier has ended; else nothing is freed before `leave`."""
        self.driver = threading.get_ident()
        if self.ended is None:
            return True
        self.leave()
        self.settle()
        return False

    def leave(self) -> bool:
        """True if the carrier has ended meanwhile: the caller frees, then calls `settle`."""
        self.driver = 0
        return self.ended is not None

    def settle(self) -> None:
        """Let those in `wait_outside` go."""
        with self._lock:
            quiet = self._quiet
        if quiet is not None:
            quiet.set()

    def end(self, error: CarrierLost) -> bool:
        """Mark it ended; False if it was."""
        with self._lock:
            if self.ended is not None:
                return False
            self.ended = error
            return True

    def wait_outside(self) -> None:
        """Of an ended carrier: return when the driving thread is outside, or at once if that is the caller."""
        if self.driver in (0, threading.get_ident()):
            return
        with self._lock:
            self._quiet = quiet = self._quiet or threading.Event()
        if self.driver:  # if not, it may have left before there was something to set
            quiet.wait()
