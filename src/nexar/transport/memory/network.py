"""What joins the memory transports of one process: who listens where, what time it is, what the weather is like."""

from __future__ import annotations

import itertools
import threading
from typing import Protocol

from nexar.clock import Clock, SystemClock
from nexar.transport.memory.listener import MemoryListener
from nexar.transport.memory.weather import Weather


class Member(Protocol):
    """What a network asks of the transports on it."""

    def look_again(self) -> None:
        """Any thread: what was held back may be due."""

    def drives(self, thread: int) -> bool:
        """Any thread: whether that thread is driving here, and so perhaps inside a sink."""
        ...


class MemoryNetwork:
    """A world of nodes in one process. Every method may be called from any thread."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.weather: Weather | None = None  # written by whoever makes the weather, read by everybody
        self._lock = threading.Lock()  # guards the two below
        self._listeners: dict[str, MemoryListener] = {}
        self._members: set[Member] = set()
        self._numbers = itertools.count(1)  # next() is atomic

    def enter(self, member: Member) -> None:
        """A transport is made."""
        with self._lock:
            self._members.add(member)

    def leave(self, member: Member) -> None:
        """A transport is closed."""
        with self._lock:
            self._members.discard(member)

    def bind(self, address: str, listener: MemoryListener) -> str:
        """Claim `address`: "memory:NAME", where an empty name or 0 asks for any. OSError if it is taken."""
        name = address.removeprefix("memory").removeprefix(":")
        real = f"memory:{name if name not in ('', '0') else f'node-{next(self._numbers)}'}"
        with self._lock:
            if real in self._listeners:
                raise OSError(f"{real} is in use")
            self._listeners[real] = listener
        return real

    def unbind(self, address: str) -> None:
        """Dials to `address` are refused from now on."""
        with self._lock:
            self._listeners.pop(address, None)

    def find(self, address: str) -> MemoryListener | None:
        """Who listens there."""
        with self._lock:
            return self._listeners.get(address)

    def is_driver(self, thread: int) -> bool:
        """Whether that thread drives a node of this network, and so must not wait for the sinks of another."""
        with self._lock:
            return any(member.drives(thread) for member in self._members)

    def changed(self) -> None:
        """Time was moved, or the weather changed: every node looks again at what it holds back."""
        with self._lock:
            members = list(self._members)
        for member in members:
            member.look_again()
