"""Memory for what is received before it is reduced: kept between calls, because fresh pages cost more than copying."""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_LEAST_BYTES: Final = 4 << 10
_KEPT_BYTES: Final = 64 << 20


class Scratch:
    """Of one communicator. Any thread takes and gives back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # over both below
        self._free: dict[int, list[NDArray[Any]]] = {}  # by size, a power of two
        self._kept_bytes = 0
        self._most = _KEPT_BYTES  # that are kept

    def take(self, size_bytes: int) -> NDArray[Any]:
        """At least that many bytes, aligned for every dtype; anything may be in them."""
        size = max(_LEAST_BYTES, 1 << (size_bytes - 1).bit_length()) if size_bytes else _LEAST_BYTES
        with self._lock:
            free = self._free.get(size)
            if free:
                self._kept_bytes -= size
                return free.pop()
        return np.empty(size, np.uint8)

    def give_back(self, memory: NDArray[Any]) -> None:
        """Nobody writes there any more."""
        with self._lock:
            if self._kept_bytes + memory.nbytes <= self._most:
                self._kept_bytes += memory.nbytes
                self._free.setdefault(memory.nbytes, []).append(memory)

    def close(self) -> None:
        """Keep nothing from now on: a communicator that is over may be garbage for long before anybody collects it.
        Idempotent.
        """
        with self._lock:
            self._most = self._kept_bytes = 0
            self._free.clear()
