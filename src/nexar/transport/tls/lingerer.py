"""Seeing off connections that were refused, so that they learn why.

A socket closed while unread bytes lie in it sends a reset, and a reset makes the other side forget what it has not read
yet: our reason. So the socket is only half-closed, what still comes is thrown away, and it is closed when the peer has
closed its side or a moment has passed.
"""

from __future__ import annotations

import socket
import time
from functools import partial
from typing import Final

from nexar.transport.tls.reactor import Reactor

MOMENT: Final = 1.0
_SCRAP_BYTES: Final = 64 << 10


class Lingerer:
    """Sockets on their way out. Belongs to the driving thread."""

    def __init__(self, reactor: Reactor, limit: int) -> None:
        """At most `limit` at a time; beyond that the oldest goes without ceremony."""
        self._reactor = reactor
        self._limit = limit
        self._leaving: dict[socket.socket, float] = {}  # socket → when it is closed at the latest, oldest first

    def __len__(self) -> int:
        return len(self._leaving)

    def see_off(self, leaving: socket.socket) -> None:
        """Close `leaving`, politely."""
        try:
            leaving.shutdown(socket.SHUT_WR)
        except OSError:
            leaving.close()  # the peer has gone: nobody is left to be told
            return
        if len(self._leaving) >= self._limit:
            self._close(next(iter(self._leaving)))
        self._leaving[leaving] = time.monotonic() + MOMENT
        self._reactor.add(leaving.fileno(), partial(self._drain, leaving))

    def due(self) -> float | None:
        """When `expire` has something to do."""
        return next(iter(self._leaving.values()), None)

    def expire(self, now: float) -> None:
        """Close those whose moment has passed."""
        for leaving in [leaving for leaving, deadline in self._leaving.items() if deadline <= now]:
            self._close(leaving)

    def close(self) -> None:
        """Close all."""
        for leaving in list(self._leaving):
            self._close(leaving)

    def abandon(self) -> None:
        """In a forked child: close the descriptors."""
        for leaving in self._leaving:
            leaving.close()

    def _drain(self, leaving: socket.socket, _events: int) -> bool:
        try:
            if leaving.recv(_SCRAP_BYTES):
                return True
        except BlockingIOError:
            return False
        except OSError:
            self._close(leaving)
            return True
        self._close(leaving)
        return True

    def _close(self, leaving: socket.socket) -> None:
        del self._leaving[leaving]
        self._reactor.remove(leaving.fileno())
        leaving.close()
