"""When a carrier ends, and who may then free what the driving thread might be using."""

from __future__ import annotations

import threading

from nexar.transport.base import CarrierLost


class Lifetime:
    """Open until `end`; the driving thread announces itself by `enter` and `leave`, everybody else asks."""

    __slots__ = ("_acquire", "_driver", "_quiet", "_release", "ended")

    def __init__(self) -> None:
        gate = threading.Lock()  # over everything below; bound once, it is taken twice for every delivery
        self._acquire = gate.acquire
        self._release = gate.release
        self._driver = 0  # the thread inside, 0 for none
        self._quiet: threading.Event | None = None  # set when the driver has left an ended carrier
        self.ended: CarrierLost | None = None  # written once; read without the gate to refuse verbs

    def enter(self) -> bool:
        """By the driving thread: False if the carrier has ended, else nothing is freed before `leave`."""
        self._acquire()
        try:
            if self.ended is not None:
                return False
            self._driver = threading.get_ident()
            return True
        finally:
            self._release()

    def leave(self) -> bool:
        """By the driving thread: True if the carrier has ended meanwhile; the caller frees, then calls `settle`."""
        self._acquire()
        try:
            self._driver = 0
            return self.ended is not None
        finally:
            self._release()

    def settle(self) -> None:
        """Let those in `wait_outside` go."""
        self._acquire()
        try:
            quiet = self._quiet
        finally:
            self._release()
        if quiet is not None:
            quiet.set()

    def end(self, error: CarrierLost) -> bool:
        """Mark it ended; False if it was."""
        self._acquire()
        try:
            if self.ended is not None:
                return False
            self.ended = error
            return True
        finally:
            self._release()

    def driven(self) -> bool:
        """Whether the driving thread is inside. Of an ended carrier this never turns true again."""
        return self._driver != 0

    def wait_outside(self) -> None:
        """Of an ended carrier: return when the driving thread is outside, or at once if that is the caller."""
        self._acquire()
        try:
            if self._driver in (0, threading.get_ident()):
                return
            self._quiet = quiet = self._quiet or threading.Event()
        finally:
            self._release()
        quiet.wait()
