"""A connection to an address, for no other purpose than to see whether anybody listens there."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, Self

from nexar.transport.address import parse_address

_AGAIN: Final = 5
"""Connections that were taken and ended at once; more is no process that ends, but one that wants nobody."""
_UNDER_WAY: Final = frozenset({0, errno.EINPROGRESS, errno.EWOULDBLOCK})


class Knock:
    """A `with` block, over which `selector` calls its data (a function) when there is news. Never blocks, but for the
    lookup of an address that is a name.
    """

    def __init__(self, address: str, selector: selectors.BaseSelector) -> None:
        self.address: Final = address
        self._selector = selector
        self._socket: socket.socket | None = None
        self._since: float | None = None  # when the connection was taken
        self._tries = 0
        self.refused = False
        """Nobody listens there."""
        self.failed: str | None = None
        """Why nothing came of it; None: something may, or has."""

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    @property
    def stands(self) -> bool:
        """The connection was taken."""
        return self._since is not None

    def lasts(self, seconds: float) -> bool:
        """It was taken so long ago, and has not ended."""
        return self._since is not None and time.monotonic() - self._since >= seconds

    def _begin(self) -> None:
        self._tries += 1
        try:
            host, port = parse_address(self.address)
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            number = self._socket.connect_ex(place)
        except OSError as error:
            self._fail(error.errno, str(error))
            return
        if number in _UNDER_WAY:
            self._selector.register(self._socket, selectors.EVENT_WRITE, self._connected)
        else:
            self._fail(number, os.strerror(number))

    def _connected(self) -> None:
        assert self._socket is not None
        number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number == errno.ECONNRESET:
            self._ended()
        elif number:
            self._fail(number, os.strerror(number))
        else:
            self._since = time.monotonic()
            self._selector.modify(self._socket, selectors.EVENT_READ, self._ended)

    def _ended(self) -> None:
        """Nothing is ever said to us, so it was closed or reset; what was said is of no interest."""
        self._end()
        if self._tries < _AGAIN:
            self._begin()
        else:
            self._fail(None, "it takes connections and ends them")

    def _fail(self, number: int | None, reason: str) -> None:
        self._end()
        self.refused = number == errno.ECONNREFUSED
        self.failed = reason

    def _end(self) -> None:
        if self._socket is not None:
            if self._socket.fileno() in self._selector.get_map():
                self._selector.unregister(self._socket)
            self._socket.close()
        self._socket, self._since = None, None


def nobody_listens(addresses: Sequence[str], timeout: float) -> bool:
    """Whether every one of them refuses TCP connections. False where one was taken, or is silent for so long."""
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        knocks = [stack.enter_context(Knock(address, selector)) for address in addresses]
        while not any(knock.stands for knock in knocks) and not all(knock.failed for knock in knocks):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in selector.select(left):
                key.data()
        return all(knock.refused for knock in knocks)
