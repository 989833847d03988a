"""The sleep of a node's driver, with `select.poll` and a wakeup descriptor.

No wake is lost, and a wake costs a system call only if a thread sleeps: `wake` sets the flag, then checks for a
sleeper; `sleep` announces itself, then checks the flag. Only a sleep that returns normally clears the flag, so Ctrl-C
leaves the wake for the next sleep.

`poll` copies its list of descriptors on entry, so a change of the list ends the sleep.
"""

from __future__ import annotations

import os
import select
import socket
import time
from threading import RLock
from typing import Final, Protocol

from nexar.errors import InternalError

# seconds; `poll` counts milliseconds in 32 bits, and a sleep that returns early is started again
_MAX_SLEEP: Final = 86_400.0

_BUSY_CORE: Final = 100e-6


class PollSleeper:
    """A Sleeper for transports whose work always shows on descriptors."""

    def __init__(self) -> None:
        self._wakeup = _make_wakeup()
        self._poll = select.poll()  # changed by any thread under the GIL, used by the sleeping one
        self._poll.register(self._wakeup.fileno(), select.POLLIN)
        self._watched: set[int] = set()  # any thread, under _lock
        self._woken = False  # set by any thread, cleared by the sleeping one
        self._asleep = False  # written by the sleeping thread only
        self._closed = False  # written under _lock
        # Reentrant: a signal handler may call wake() while its thread is in here.
        self._lock = RLock()

    def watch(self, descriptor: int, *, readable: bool = True, writable: bool = False) -> None:
        """Unwatches the descriptor if no event is given."""
        events = (select.POLLIN if readable else 0) | (select.POLLOUT if writable else 0)
        if not events:
            return self.unwatch(descriptor)
        with self._lock:
            self._watched.add(descriptor)
            self._poll.register(descriptor, events)
        return self._signal_if_asleep()

    def unwatch(self, descriptor: int) -> None:
        """Ends a sleep: poll() holds the descriptors, so a socket closed now would stay open for its peer."""
        with self._lock:
            if descriptor not in self._watched:
                return
            self._watched.remove(descriptor)
            self._poll.unregister(descriptor)
        self._signal_if_asleep()

    def wake(self) -> None:
        self._woken = True
        self._signal_if_asleep()

    def sleep(self, timeout: float, spin: float) -> None:
        self._asleep = True
        try:
            ready = self._poll_once(0.0) if self._woken else self._wait(timeout, spin)
        finally:
            self._asleep = False
        self._woken = False
        for descriptor, event in ready:
            self._handle(descriptor, event)

    def close(self) -> None:
        """No thread may sleep now or later; wakes are ignored. Idempotent."""
        with self._lock:
            self._closed = True
            self._wakeup.close()

    def _wait(self, timeout: float, spin: float) -> list[tuple[int, int]]:
        spin = min(spin, timeout)
        if spin <= 0:
            return self._poll_once(timeout)
        begin = time.monotonic()
        return self._spin(begin + spin) or self._poll_once(begin + timeout - time.monotonic())

    def _spin(self, end: float) -> list[tuple[int, int]]:
        """Stops early if a long yield shows that other threads need this core."""
        now = time.monotonic()
        while not (ready := self._poll.poll(0)) and not self._woken and now < end:
            os.sched_yield()
            before, now = now, time.monotonic()
            if now - before > _BUSY_CORE:
                return []
        return ready

    def _poll_once(self, timeout: float) -> list[tuple[int, int]]:
        return self._poll.poll(min(max(timeout, 0.0), _MAX_SLEEP) * 1000)

    def _handle(self, descriptor: int, event: int) -> None:
        if descriptor == self._wakeup.fileno():
            self._wakeup.clear()
        elif event & select.POLLNVAL:
            self._check_open(descriptor)

    def _check_open(self, descriptor: int) -> None:
        # Unwatched and closed by another thread between the copy of the list and the system call: not an error. Closed
        # but still watched: every further sleep would return at once, so raise.
        with self._lock:
            if descriptor in self._watched and not _is_open(descriptor):
                self.unwatch(descriptor)
                raise InternalError(f"descriptor {descriptor} was closed while it was still watched")

    def _signal_if_asleep(self) -> None:
        if self._asleep:
            with self._lock:
                if not self._closed:
                    self._wakeup.signal()


class _Wakeup(Protocol):
    def fileno(self) -> int: ...
    def signal(self) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


class _EventWakeup:
    """Linux."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._descriptor

    def signal(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        os.eventfd_read(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _SocketWakeup:
    """Systems without eventfd."""

    def __init__(self) -> None:
        self._outside, self._inside = socket.socketpair()
        self._outside.setblocking(False)
        self._inside.setblocking(False)

    def fileno(self) -> int:
        return self._inside.fileno()

    def signal(self) -> None:
        try:
            self._outside.send(b"\0")
        except BlockingIOError:
            return  # the buffer is full, so a wakeup is pending

    def clear(self) -> None:
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
