"""Dials under way, each in the thread of its caller, and how closing the transport ends them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from nexar.transport.base import ConnectRefused
from nexar.transport.tls.dialer import CLOSED


class DialsUnderWay:
    """Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pipes: dict[int, int] = {}  # writing end → reading end; under _lock
        self._ended = False  # under _lock

    @contextmanager
    def one_more(self, address: str) -> Iterator[int]:
        """Dial inside. Gives a descriptor that becomes readable when the dial is to end; ConnectRefused if none may
        begin any more.
        """
        reading, writing = os.pipe()
        try:
            self._enter(address, reading, writing)
            yield reading
        finally:
            self._leave(writing)
            os.close(reading)

    def end(self) -> None:
        """Those under way are to end, and none begins any more. Idempotent."""
        with self._lock:
            self._ended = True
            pipes, self._pipes = self._pipes, {}
            for writing in pipes:
                os.write(writing, b"\0")  # closing alone would not do: a forked child may have a copy
                os.close(writing)

    def abandon(self) -> None:
        """In a forked child: close the descriptors."""
        for writing, reading in self._pipes.items():
            os.close(writing)
            os.close(reading)
        self._pipes = {}

    def _enter(self, address: str, reading: int, writing: int) -> None:
        with self._lock:
            self._pipes[writing] = reading
            if self._ended:
                raise ConnectRefused(address, CLOSED)

    def _leave(self, writing: int) -> None:
        with self._lock:
            ended = self._pipes.pop(writing, None) is None
        if not ended:
            os.close(writing)
