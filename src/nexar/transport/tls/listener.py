"""Inbound connections from accept to the finished carrier. Driver only; never blocks.

A carrier needs both halves before the deadline. Both get the same answer, once both hellos have arrived, and end
together. A displaced connection (`PendingConnections`) is closed without a reason, because its handshake is not
complete.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import SystemRandom
from typing import Final

from nexar.transport.base import Acceptor, Peer
from nexar.transport.tls.handshake import (
    ConnectionHello,
    HandshakeFailed,
    HandshakeSteps,
    HelloAnswer,
    TlsIdentity,
    answer,
)
from nexar.transport.tls.sockets import READABLE, Channel, Selector, TlsChannel, address_text, tune
from nexar.transport.unverified import PendingConnections, source_of

LINGER_SECONDS: Final = 1.0
_SCRAP_BYTES: Final = 64 << 10


class RefusedConnections:
    """Refused sockets, half-closed and drained until the peer closes or LINGER_SECONDS have passed. Driver only.

    Closing a socket with unread bytes sends a reset, and the peer then discards our reason.
    """

    def __init__(self, selector: Selector, limit: int) -> None:
        """Above `limit` sockets the oldest is closed at once."""
        self._selector = selector
        self._limit = limit
        self._leaving: dict[socket.socket, float] = {}  # deadline by socket, oldest first

    def __len__(self) -> int:
        return len(self._leaving)

    def close_after_drain(self, leaving: socket.socket) -> None:
        try:
            leaving.shutdown(socket.SHUT_WR)
        except OSError:
            leaving.close()  # the peer has gone
            return
        if len(self._leaving) >= self._limit:
            self._close(next(iter(self._leaving)))
        self._leaving[leaving] = time.monotonic() + LINGER_SECONDS
        self._selector.add(leaving.fileno(), partial(self._drain, leaving))

    def due(self) -> float | None:
        return next(iter(self._leaving.values()), None)

    def expire(self, now: float) -> None:
        for leaving in [leaving for leaving, deadline in self._leaving.items() if deadline <= now]:
            self._close(leaving)

    def close(self) -> None:
        for leaving in list(self._leaving):
            self._close(leaving)

    def abandon(self) -> None:
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
        self._selector.remove(leaving.fileno())
        leaving.close()


ACCEPTS_PER_TURN: Final = 64
# seconds without accepting when the system has no descriptor left and no pending connection can be closed
_PAUSE: Final = 0.1
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Accepted = Callable[[Peer, Channel, Channel], None]  # called with the peer, its control and its data channel


@dataclass(slots=True)
class _UnverifiedConnection:
    address: str
    channel: TlsChannel
    handshake: HandshakeSteps[tuple[ConnectionHello, Channel]] = field(init=False)
    watching: int = READABLE
    spoke: bool = False
    hello: ConnectionHello | None = None
    waits: bool = False  # for its answer, until the other half has sent its hello
    partner: _UnverifiedConnection | None = None  # the other half, once both have sent their hello
    settled: Channel | None = None  # the channel, once this half is done

    @property
    def descriptor(self) -> int:
        return self.channel.socket.fileno()


class TlsListener:
    """The listening socket and its unverified connections."""

    def __init__(
        self,
        listening: socket.socket,
        selector: Selector,
        identity: Callable[[], TlsIdentity],
        acceptor: Acceptor,
        accepted: Accepted,
        *,
        plain_modes: frozenset[bool],
        handshake_timeout: float,
        max_pending: int,
    ) -> None:
        """`identity` returns the current one; `plain_modes` has True for plain, False for encrypted connections."""
        self._listening = listening
        self._selector = selector
        self._identity = identity
        self._acceptor = acceptor
        self._accepted = accepted
        self._plain_modes = plain_modes
        self._timeout = handshake_timeout
        self._pending = PendingConnections(max_pending, handshake_timeout, SystemRandom().choice)
        self._candidates: dict[int, _UnverifiedConnection] = {}  # by descriptor, as in `_pending`
        self._full_reason = f"more than {max_pending} connections wait to authenticate; try again"
        self._paused_until: float | None = None
        self._refused_connections = RefusedConnections(selector, max_pending)
        selector.add(listening.fileno(), self._accept_ready)

    def due(self) -> float | None:
        times = (self._pending.next_deadline, self._paused_until, self._refused_connections.due())
        return min((time for time in times if time is not None), default=None)

    def expire(self) -> None:
        if not (self._candidates or self._refused_connections or self._paused_until):
            return
        now = time.monotonic()
        for descriptor in self._pending.expired(now):
            candidate = self._candidates.get(descriptor)
            if candidate is not None:  # ended with its other half
                self._refuse(candidate, self._timeout_reason(candidate))
        self._refused_connections.expire(now)
        if self._paused_until is not None and self._paused_until <= now:
            self._paused_until = None
            self._selector.change(self._listening.fileno(), READABLE)

    def close(self) -> None:
        self._selector.remove(self._listening.fileno())
        self._listening.close()
        for descriptor, candidate in self._candidates.items():
            if candidate.settled is None:
                self._selector.remove(descriptor)
            candidate.channel.socket.close()
        self._candidates.clear()
        self._refused_connections.close()

    def abandon(self) -> None:
        self._listening.close()
        self._refused_connections.abandon()
        for candidate in self._candidates.values():
            candidate.channel.socket.close()

    def _timeout_reason(self, candidate: _UnverifiedConnection) -> str:
        spoke = "the handshake" if candidate.spoke else "its first byte"
        missing = "its second connection" if candidate.waits else spoke
        return f"{missing} did not come within {self._timeout:g} s"

    # --- accepting

    def _accept_ready(self, _events: int) -> bool:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, address = self._listening.accept()
            except BlockingIOError:
                return True
            except OSError as error:
                self._cannot_accept(error)
                return True
            self._admit(connection, address_text(address))
        return True

    def _cannot_accept(self, error: OSError) -> None:
        if error.errno not in _OUT_OF_DESCRIPTORS:
            return  # the connection ended before accept (ECONNABORTED and the like)
        displaced = self._pending.displace_one(time.monotonic())
        if displaced is not None:
            self._dismiss(self._candidates[displaced], f"no room: {error.strerror}")
        else:
            self._paused_until = time.monotonic() + _PAUSE
            self._selector.change(self._listening.fileno(), 0)

    def _admit(self, connection: socket.socket, address: str) -> None:
        placement = self._pending.enter(connection.fileno(), source_of(address), time.monotonic())
        if placement.displaced is not None:
            self._dismiss(self._candidates[placement.displaced], self._full_reason)
        if not placement.admitted:
            connection.close()
            self._acceptor.candidate_refused(address, self._full_reason)
            return
        identity = self._identity()
        try:
            tune(connection)
        except OSError as error:
            self._pending.leave(connection.fileno())
            connection.close()
            self._acceptor.candidate_refused(address, f"it closed at once: {error.strerror}")
            return
        assert identity.server is not None
        channel = TlsChannel(connection, identity.server, server_side=True)
        candidate = _UnverifiedConnection(address, channel)
        candidate.handshake = answer(channel, partial(self._answer_to, candidate))
        self._candidates[candidate.descriptor] = candidate
        self._selector.add(candidate.descriptor, partial(self._resume, candidate))

    # --- handshake

    def _resume(self, candidate: _UnverifiedConnection, _events: int) -> bool:
        candidate.spoke = True
        self._advance(candidate)
        partner = candidate.partner
        if partner is not None and partner.waits:
            partner.waits = False
            self._advance(partner)
        return True

    def _advance(self, candidate: _UnverifiedConnection) -> None:
        try:
            events = next(candidate.handshake)
        except StopIteration as end:
            _, candidate.settled = end.value
            self._selector.remove(candidate.descriptor)
            self._accept_if_whole(candidate)
        except HandshakeFailed as failure:
            self._refuse(candidate, failure.reason)
        else:
            self._watch_for(candidate, events)

    def _watch_for(self, candidate: _UnverifiedConnection, events: int) -> None:
        if events != candidate.watching:
            candidate.watching = events
            self._selector.change(candidate.descriptor, events)

    def _answer_to(
        self, candidate: _UnverifiedConnection, hello: ConnectionHello, certificate: bytes | None
    ) -> ConnectionHello | None:
        """Return the answer to a hello, None before the other half's hello arrives."""
        candidate.hello = hello
        if candidate.partner is None:
            self._pair(candidate)
        try:
            self._identity().accepted_peer(certificate, candidate.address)
        except HandshakeFailed as failure:
            return _refusal(hello, failure.reason, HelloAnswer.UNVERIFIED)
        if hello.plain not in self._plain_modes:
            ours, theirs = _describe(not hello.plain), _describe(hello.plain)
            return _refusal(hello, f"this node wants {ours} connections, the dialer {theirs} ones", HelloAnswer.REFUSED)
        candidate.waits = candidate.partner is None
        return None if candidate.waits else ConnectionHello(hello.half, hello.token, hello.plain)

    def _pair(self, candidate: _UnverifiedConnection) -> None:
        partner = next((other for other in self._candidates.values() if _same_carrier(candidate, other)), None)
        if partner is None:
            return
        candidate.partner, partner.partner = partner, candidate
        for half in (partner, candidate):
            self._pending.set_deadline(half.descriptor, time.monotonic() + self._timeout)

    def _accept_if_whole(self, candidate: _UnverifiedConnection) -> None:
        partner = candidate.partner
        assert partner is not None, "welcomed alone"
        control, data = sorted((candidate, partner), key=lambda half: half.hello.half if half.hello else 0)
        if control.settled is None or data.settled is None:
            return
        try:  # check again: the credentials may have been replaced since the answer
            peer = self._identity().accepted_peer(control.channel.engine.getpeercert(True), control.address)
        except HandshakeFailed as failure:
            self._refuse(control, failure.reason)
            return
        for half in (control, data):
            self._remove(half)
            half.partner = None
        self._accepted(peer, control.settled, data.settled)

    # --- ending

    def _refuse(self, candidate: _UnverifiedConnection, reason: str) -> None:
        """Let the peer read the reason. Also ends the other half, unless it waits for its own answer."""
        self._end(candidate, reason, self._refused_connections.close_after_drain)

    def _dismiss(self, candidate: _UnverifiedConnection, reason: str) -> None:
        self._end(candidate, reason, socket.socket.close)

    def _end(self, candidate: _UnverifiedConnection, reason: str, close: Callable[[socket.socket], None]) -> None:
        if candidate.settled is None:
            self._selector.remove(candidate.descriptor)
        self._remove(candidate)
        close(candidate.channel.socket)
        self._acceptor.candidate_refused(candidate.address, reason)
        partner = candidate.partner
        if partner is None or partner.waits:
            return
        candidate.partner = None
        if self._candidates.get(partner.descriptor) is partner:
            self._end(partner, reason, close)

    def _remove(self, candidate: _UnverifiedConnection) -> None:
        """Closes the generator to break its reference cycle: otherwise the TLS engine (50 KB) waits for the garbage
        collector.
        """
        self._pending.leave(candidate.descriptor)
        del self._candidates[candidate.descriptor]
        candidate.handshake.close()


def _same_carrier(one: _UnverifiedConnection, other: _UnverifiedConnection) -> bool:
    if one.hello is None or other.hello is None or not other.waits:
        return False
    same_token = one.hello.token == other.hello.token and one.hello.half != other.hello.half
    return same_token and one.channel.engine.getpeercert(True) == other.channel.engine.getpeercert(True)


def _refusal(hello: ConnectionHello, reason: str, answer: HelloAnswer) -> ConnectionHello:
    return ConnectionHello(hello.half, hello.token, hello.plain, answer, reason)


def _describe(plain: bool) -> str:
    return "plain" if plain else "encrypted"
