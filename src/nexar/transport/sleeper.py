"""The sleep of a node's driving thread, on `select.poll` and a doorbell.

Law of the kick: a kick is never lost, and costs a system call only when somebody sleeps. `kick` first raises the flag,
then looks whether anybody sleeps; `sleep` first says that it sleeps, then looks at the flag. Whichever order the two
threads take, one of them sees the other. The flag falls only when a sleep returns normally, so a Ctrl-C that ends a
sleep leaves the kick for the next one. A bell rung too late is one needless wake, never a missed one.

`poll` copies its list of descriptors when it is entered. Who changes the list while somebody sleeps therefore rings the
bell; the sleep then returns early, which its caller must expect anyway.
"""

from __future__ import annotations

import os
import select
import socket
import time
from threading import RLock
from typing import Final, Protocol

from nexar.errors import InternalError

_LONGEST: Final = 86_400.0
"""Seconds. `poll` counts milliseconds in 32 bits; a longer sleep returns after a day and is simply begun again."""

_CROWDED: Final = 100e-6


class PollSleeper:
    """A `Sleeper` for transports that show all their news on descriptors. One thread sleeps at a time."""

    def __init__(self) -> None:
        self._bell = _make_wakeup()
        self._poll = select.poll()  # changed by any thread under the GIL, entered by the sleeping one
        self._poll.register(self._bell.fileno(), select.POLLIN)
        self._watched: set[int] = set()  # any thread, under _lock
        self._woken = False  # raised by any thread, lowered by the sleeping one
        self._asleep = False  # written by the sleeping thread only
        self._closed = False  # written under _lock
        # Reentrant: a signal handler may kick while its own thread is in here.
        self._lock = RLock()

    def watch(self, descriptor: int, *, readable: bool = True, writable: bool = False) -> None:
        """Wake when the descriptor is ready; watched for neither, it is forgotten."""
        events = (select.POLLIN if readable else 0) | (select.POLLOUT if writable else 0)
        if not events:
            return self.unwatch(descriptor)
        with self._lock:
            self._watched.add(descriptor)
            self._poll.register(descriptor, events)
        return self._ring_if_asleep()

    def unwatch(self, descriptor: int) -> None:
        """Forget the descriptor. One that is not watched is ignored.

        Ends a sleep: as long as that lasts the system holds on to the descriptors it was given, so a socket closed now
        would stay open, and its peer would not hear of it.
        """
        with self._lock:
            if descriptor not in self._watched:
                return
            self._watched.remove(descriptor)
            self._poll.unregister(descriptor)
        self._ring_if_asleep()

    def wake(self) -> None:
        """End this sleep, or the next one if nobody sleeps."""
        self._woken = True
        self._ring_if_asleep()

    def sleep(self, timeout: float, spin: float) -> None:
        """See Sleeper.sleep. While it spins it looks at the descriptors again and again, letting other threads run."""
        self._asleep = True
        try:
            ready = self._look(0.0) if self._woken else self._wait(timeout, spin)
        finally:
            self._asleep = False
        self._woken = False
        for descriptor, event in ready:
            self._attend(descriptor, event)

    def close(self) -> None:
        """Free the doorbell. Nobody may sleep any more; kicks are ignored. Idempotent."""
        with self._lock:
            self._closed = True
            self._bell.close()

    def _wait(self, timeout: float, spin: float) -> list[tuple[int, int]]:
        spin = min(spin, timeout)
        if spin <= 0:
            return self._look(timeout)
        begin = time.monotonic()
        return self._spin(begin + spin) or self._look(begin + timeout - time.monotonic())

    def _spin(self, end: float) -> list[tuple[int, int]]:
        """Until the end, or until a yield takes so long that others seem to need this core more than we do."""
        now = time.monotonic()
        while not (ready := self._poll.poll(0)) and not self._woken and now < end:
            os.sched_yield()
            before, now = now, time.monotonic()
            if now - before > _CROWDED:
                return []
        return ready

    def _look(self, timeout: float) -> list[tuple[int, int]]:
        return self._poll.poll(min(max(timeout, 0.0), _LONGEST) * 1000)

    def _attend(self, descriptor: int, event: int) -> None:
        if descriptor == self._bell.fileno():
            self._bell.silence()
        elif event & select.POLLNVAL:
            self._check_open(descriptor)

    def _check_open(self, descriptor: int) -> None:
        # Unwatched and closed by another thread between the copy of the list and the system call: no fault.
        # Closed but still watched: every further sleep would return at once, so this must not stay hidden.
        with self._lock:
            if descriptor in self._watched and not _is_open(descriptor):
                self.unwatch(descriptor)
                raise InternalError(f"descriptor {descriptor} was closed while it was still watched")

    def _ring_if_asleep(self) -> None:
        if self._asleep:
            with self._lock:
                if not self._closed:
                    self._bell.ring()


class _Wakeup(Protocol):
    def fileno(self) -> int: ...
    def ring(self) -> None: ...
    def silence(self) -> None: ...
    def close(self) -> None: ...


class _EventWakeup:
    """Linux: a counter behind a descriptor."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def silence(self) -> None:
        os.eventfd_read(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _SocketWakeup:
    """Elsewhere: a byte through a pair of sockets."""

    def __init__(self) -> None:
        self._outside, self._inside = socket.socketpair()
        self._outside.setblocking(False)
        self._inside.setblocking(False)

    def fileno(self) -> int:
        return self._inside.fileno()

    def ring(self) -> None:
        try:
            self._outside.send(b"\0")
        except BlockingIOError:
            return  # thousands of bytes are waiting already: it rings loud enough

    def silence(self) -> None:
        self._inside.recv(4096)

    def close(self) -> None:
        self._outside.close()
        self._inside.close()


def _make_wakeup() -> _Wakeup:
    return _EventWakeup() if hasattr(os, "eventfd") else _SocketWakeup()


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
