"""A dial: both connections of a carrier, made at the same time, by the thread that wants them.

Nothing here is shared with other threads until the dial has succeeded.
"""

from __future__ import annotations

import os
import select
import socket
import time
from functools import partial

from nexar.transport.attempts import Failed, try_each
from nexar.transport.base import ConnectRefused, Expected, Peer
from nexar.transport.tls.channel import Channel, TlsChannel
from nexar.transport.tls.handshake import HandshakeFailed, Story, dial
from nexar.transport.tls.hello import TOKEN_BYTES, Half, Hello
from nexar.transport.tls.sockets import SocketAddress, begin_dial, resolve
from nexar.transport.tls.trust import Believer


def dial_peer(
    address: str, expected: Expected, deadline: float, believer: Believer, *, plain: bool
) -> tuple[Peer, list[Channel]]:
    """The peer and its two channels, control first. ConnectRefused, or TimeoutError at the deadline."""

    def attempt(place: tuple[int, SocketAddress], until: float) -> tuple[Peer, list[Channel]]:
        try:
            return _Dial(address, expected, believer, plain=plain).run(*place, until)
        except HandshakeFailed as failure:
            if failure.verification:
                raise ConnectRefused(address, failure.reason, verification=True) from failure
            raise Failed(failure.reason) from failure
        except _OutOfTime:
            raise TimeoutError from None
        except OSError as error:
            raise Failed(error.strerror or str(error)) from error

    return try_each(address, _resolve(address), deadline, attempt)


def _resolve(address: str) -> list[tuple[int, SocketAddress]]:
    try:
        return resolve(address)
    except OSError as error:
        raise ConnectRefused(address, error.strerror or str(error)) from error


class _OutOfTime(Exception):
    """No answer so far. (Not a TimeoutError: the system has one of its own, for a dial it has given up.)"""


class _Dial:
    """One attempt at one socket address."""

    def __init__(self, address: str, expected: Expected, believer: Believer, *, plain: bool) -> None:
        self._address = address
        self._expected = expected
        self._believer = believer
        self._plain = plain
        self._token = os.urandom(TOKEN_BYTES)
        self._sockets: list[socket.socket] = []  # closed if it comes to nothing
        self._begun: list[TlsChannel] = []

    def run(self, family: int, place: SocketAddress, deadline: float) -> tuple[Peer, list[Channel]]:
        try:
            stories = [self._begin(family, place, half) for half in Half]
            channels = _run_all(dict(zip(self._descriptors(), stories, strict=True)), deadline)
        except BaseException:
            for dialing in self._sockets:
                dialing.close()
            raise
        return self._peer(), [channels[descriptor] for descriptor in self._descriptors()]

    def _begin(self, family: int, place: SocketAddress, half: Half) -> Story[Channel]:
        context, name = self._believer.client(self._expected)
        dialing = socket.socket(family, socket.SOCK_STREAM)
        self._sockets.append(dialing)
        begin_dial(dialing, place)
        channel = TlsChannel(dialing, context, server_side=False, server_name=name)
        self._begun.append(channel)
        check = partial(self._believer.check_dialed, self._expected)
        return dial(channel, Hello(half, self._token, self._plain), check)

    def _descriptors(self) -> list[int]:
        return [channel.socket.fileno() for channel in self._begun]

    def _peer(self) -> Peer:
        first, second = (channel.engine.getpeercert(True) for channel in self._begun)
        if first != second:
            raise HandshakeFailed("its two connections show different certificates", verification=True)
        return self._believer.dialed_peer(self._expected, first, self._address)


def _run_all(stories: dict[int, Story[Channel]], deadline: float) -> dict[int, Channel]:
    """Run stories to their ends, side by side; what each returned."""
    poller, results = select.poll(), dict[int, Channel]()
    ready = list(stories)
    while len(results) < len(stories):
        for descriptor in ready:
            try:
                poller.register(descriptor, next(stories[descriptor]))
            except StopIteration as end:
                results[descriptor] = end.value
                poller.unregister(descriptor)
        if len(results) < len(stories):
            ready = _wait(poller, deadline)
    return results


def _wait(poller: select.poll, deadline: float) -> list[int]:
    remaining = deadline - time.monotonic()
    ready = poller.poll(max(remaining, 0.0) * 1000)
    if not ready and remaining <= 0:
        raise _OutOfTime
    return [descriptor for descriptor, _ in ready]
