"""A dial: both connections of a carrier, at each place of the peer, all side by side, by the thread that wants them.

Nothing here is shared with other threads until the dial has succeeded; one descriptor tells that it is to end.
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


class _Ended(Exception):
    """The transport was closed."""


def dial_peer(
    address: str, expected: Expected, deadline: float, believer: TlsIdentity, *, plain: bool, ending: int
) -> Found:
    """The peer and its two channels, control first. ConnectRefused, or TimeoutError at the deadline; ConnectRefused
    too once the descriptor `ending` is readable.
    """
    try:
        course = _TlsDialMethod(expected, believer, plain=plain, ending=ending)
        _, found = dial_in_parallel(
            address, deadline, resolve, course, certificate_advice(expected, believer.credentials)
        )
    except _Ended as error:
        raise ConnectRefused(address, CLOSED) from error
    return found


class _TlsDialMethod:
    """See Course. Every socket of every attempt is in one poll."""

    def __init__(self, expected: Expected, believer: TlsIdentity, *, plain: bool, ending: int) -> None:
        self._expected = expected
        self._believer = believer
        self._plain = plain
        self._ending = ending
        self._poller = select.poll()
        self._poller.register(ending, select.POLLIN)
        self._attempts: dict[int, _Attempt] = {}  # by descriptor, two each
        self._ended: deque[tuple[TlsTarget, Found | TargetFailed]] = deque()

    def begin(self, place: TlsTarget) -> None:
        """See Course."""
        attempt = _Attempt(place, self._expected, self._believer, plain=self._plain)
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
        """See Course."""
        if not self._ended:
            for descriptor, _ in self._poller.poll(max(timeout, 0.0) * 1000):
                self._resume(descriptor)
        return self._ended.popleft() if self._ended else None

    def show(self, place: TlsTarget) -> str:
        """See Course."""
        return address_text(place[1])

    def call_off(self) -> None:
        """See Course."""
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
        self._ended.append((attempt.place, outcome))

    def _forget(self, attempt: _Attempt, *, close: bool) -> None:
        for descriptor in attempt.descriptors:
            del self._attempts[descriptor]
            if not attempt.has_settled(descriptor):
                self._poller.unregister(descriptor)
        if close:
            attempt.close()


class _Attempt:
    """Both connections to one socket address."""

    def __init__(self, place: TlsTarget, expected: Expected, believer: TlsIdentity, *, plain: bool) -> None:
        self.place = place
        self._expected = expected
        self._believer = believer
        self._plain = plain
        self._token = os.urandom(TOKEN_BYTES)
        self._sockets: list[socket.socket] = []  # closed if it comes to nothing
        self._begun: list[TlsChannel] = []
        self._stories: dict[int, HandshakeSteps[Channel]] = {}
        self._settled: dict[int, Channel] = {}

    def begin(self) -> list[tuple[int, int]]:
        """Set out; which descriptor waits for which events."""
        for half in Half:
            self._begin(half)
        return [(descriptor, next(story)) for descriptor, story in self._stories.items()]

    def resume(self, descriptor: int) -> int | None:
        """It has what it waited for. What it waits for next; None: this half is done. HandshakeFailed."""
        try:
            return next(self._stories[descriptor])
        except StopIteration as end:
            self._settled[descriptor] = end.value
            return None

    @property
    def descriptors(self) -> list[int]:
        """Of both halves."""
        return list(self._stories)

    def has_settled(self, descriptor: int) -> bool:
        """Whether this half is done."""
        return descriptor in self._settled

    @property
    def is_whole(self) -> bool:
        """Both halves are done."""
        return len(self._settled) == len(Half)

    def found(self) -> Found:
        """Who is there, and the channels, control first. HandshakeFailed."""
        first, second = (channel.engine.getpeercert(True) for channel in self._begun)
        if first != second:
            raise HandshakeFailed("its two connections show different certificates", verification=True)
        peer = self._believer.dialed_peer(self._expected, first, address_text(self.place[1]))
        return peer, [self._settled[descriptor] for descriptor in self._stories]

    def close(self) -> None:
        """It comes to nothing. Idempotent."""
        for dialing in self._sockets:
            dialing.close()

    def _begin(self, half: Half) -> None:
        context, name = self._believer.client(self._expected)
        family, place = self.place
        dialing = socket.socket(family, socket.SOCK_STREAM)
        self._sockets.append(dialing)
        begin_dial(dialing, place)
        channel = TlsChannel(dialing, context, server_side=False, server_name=name)
        self._begun.append(channel)
        check = partial(self._believer.check_dialed, self._expected)
        self._stories[dialing.fileno()] = dial(channel, ConnectionHello(half, self._token, self._plain), check)


def _failure(error: HandshakeFailed | OSError) -> TargetFailed:
    if isinstance(error, HandshakeFailed):
        return TargetFailed(error.reason, verification=error.verification)
    return TargetFailed(error.strerror or str(error))
