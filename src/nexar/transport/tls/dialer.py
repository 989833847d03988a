"""Dialing: both connections of a carrier, to all targets in parallel, in the calling thread.

Nothing is shared with other threads before success.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from functools import partial
from typing import Final, TypeAlias

from nexar.transport.base import ConnectRefused, Expected, Peer
from nexar.transport.parallel_dial import TargetFailed, dial_in_parallel
from nexar.transport.tls.handshake import (
    TOKEN_BYTES,
    ConnectionHello,
    Half,
    HandshakeFailed,
    HandshakeSteps,
    TlsIdentity,
    dial,
)
from nexar.transport.tls.sockets import Channel, SocketAddress, TlsChannel, address_text, begin_dial, resolve
from nexar.transport.unverified import certificate_advice

TlsTarget: TypeAlias = tuple[int, SocketAddress]
Found: TypeAlias = tuple[Peer, list[Channel]]


CLOSED: Final = "this side's transport is closed"


class _Ended(Exception): ...


def dial_peer(
    address: str, expected: Expected, deadline: float, identity: TlsIdentity, *, plain: bool, ending: int
) -> Found:
    """Return the peer and its two channels, control first.

    Raises ConnectRefused on failure or when the descriptor `ending` is readable, TimeoutError at the deadline.
    """
    try:
        method = _TlsDialMethod(expected, identity, plain=plain, ending=ending)
        _, found = dial_in_parallel(
            address, deadline, resolve, method, certificate_advice(expected, identity.credentials)
        )
    except _Ended as error:
        raise ConnectRefused(address, CLOSED) from error
    return found


class _TlsDialMethod:
    """A DialMethod. One poll object holds the sockets of all attempts."""

    def __init__(self, expected: Expected, identity: TlsIdentity, *, plain: bool, ending: int) -> None:
        self._expected = expected
        self._identity = identity
        self._plain = plain
        self._ending = ending
        self._poller = select.poll()
        self._poller.register(ending, select.POLLIN)
        self._attempts: dict[int, _Attempt] = {}  # by descriptor, two per attempt
        self._ended: deque[tuple[TlsTarget, Found | TargetFailed]] = deque()

    def begin(self, target: TlsTarget) -> None:
        attempt = _Attempt(target, self._expected, self._identity, plain=self._plain)
        try:
            waits = attempt.begin()
        except (HandshakeFailed, OSError) as error:
            attempt.close()
            raise _failure(error) from error
        except BaseException:
            attempt.close()
            raise
        for descriptor, events in waits:
            self._attempts[descriptor] = attempt
            self._poller.register(descriptor, events)

    def wait(self, timeout: float) -> tuple[TlsTarget, Found | TargetFailed] | None:
        if not self._ended:
            for descriptor, _ in self._poller.poll(max(timeout, 0.0) * 1000):
                self._resume(descriptor)
        return self._ended.popleft() if self._ended else None

    def describe(self, target: TlsTarget) -> str:
        return address_text(target[1])

    def cancel_all(self) -> None:
        for attempt in self._attempts.values():
            attempt.close()
        for _, outcome in self._ended:
            if not isinstance(outcome, TargetFailed):
                for channel in outcome[1]:
                    channel.socket.close()

    def _resume(self, descriptor: int) -> None:
        if descriptor == self._ending:
            raise _Ended
        attempt = self._attempts.get(descriptor)
        if attempt is None:
            return  # its other half has just failed
        try:
            events = attempt.resume(descriptor)
            if events is not None:
                self._poller.modify(descriptor, events)
                return
            self._poller.unregister(descriptor)
            if not attempt.is_whole:
                return
            outcome: Found | TargetFailed = attempt.found()
        except (HandshakeFailed, OSError) as error:
            outcome = _failure(error)
        self._forget(attempt, close=isinstance(outcome, TargetFailed))
        self._ended.append((attempt.target, outcome))

    def _forget(self, attempt: _Attempt, *, close: bool) -> None:
        for descriptor in attempt.descriptors:
            del self._attempts[descriptor]
            if not attempt.has_settled(descriptor):
                self._poller.unregister(descriptor)
        if close:
            attempt.close()


class _Attempt:
    """Both connections to one socket address."""

    def __init__(self, target: TlsTarget, expected: Expected, identity: TlsIdentity, *, plain: bool) -> None:
        self.target = target
        self._expected = expected
        self._identity = identity
        self._plain = plain
        self._token = os.urandom(TOKEN_BYTES)
        self._sockets: list[socket.socket] = []  # closed if the attempt fails
        self._begun: list[TlsChannel] = []
        self._handshakes: dict[int, HandshakeSteps[Channel]] = {}
        self._settled: dict[int, Channel] = {}

    def begin(self) -> list[tuple[int, int]]:
        for half in Half:
            self._begin(half)
        return [(descriptor, next(handshake)) for descriptor, handshake in self._handshakes.items()]

    def resume(self, descriptor: int) -> int | None:
        """Return the events to wait for, None when this half is done. Raises HandshakeFailed."""
        try:
            return next(self._handshakes[descriptor])
        except StopIteration as end:
            self._settled[descriptor] = end.value
            return None

    @property
    def descriptors(self) -> list[int]:
        return list(self._handshakes)

    def has_settled(self, descriptor: int) -> bool:
        return descriptor in self._settled

    @property
    def is_whole(self) -> bool:
        return len(self._settled) == len(Half)

    def found(self) -> Found:
        """Return the peer and the channels. Raises HandshakeFailed."""
        first, second = (channel.engine.getpeercert(True) for channel in self._begun)
        if first != second:
            raise HandshakeFailed("its two connections show different certificates", verification=True)
        peer = self._identity.dialed_peer(self._expected, first, address_text(self.target[1]))
        return peer, [self._settled[descriptor] for descriptor in self._handshakes]

    def close(self) -> None:
        for dialing in self._sockets:
            dialing.close()

    def _begin(self, half: Half) -> None:
        context, name = self._identity.client(self._expected)
        family, target = self.target
        dialing = socket.socket(family, socket.SOCK_STREAM)
        self._sockets.append(dialing)
        begin_dial(dialing, target)
        channel = TlsChannel(dialing, context, server_side=False, server_name=name)
        self._begun.append(channel)
        check = partial(self._identity.check_dialed, self._expected)
        self._handshakes[dialing.fileno()] = dial(channel, ConnectionHello(half, self._token, self._plain), check)


def _failure(error: HandshakeFailed | OSError) -> TargetFailed:
    if isinstance(error, HandshakeFailed):
        return TargetFailed(error.reason, verification=error.verification)
    return TargetFailed(error.strerror or str(error))
