"""Seeing off connections that were refused, so that they learn why.

A socket closed while unread bytes lie in it sends a reset, and a reset makes the other side forget what it has not read
yet: our reason. So the socket is only half-closed, what still comes is thrown away, and it is closed when the peer has
closed its side or a moment has passed.

Who knocks: inbound connections from the first packet to the accepted carrier, without ever blocking.

Every connection has until its deadline to authenticate, and for a carrier both halves must come: the first one waits
for its answer until the second has said its hello, and then both get the same one. The two stay or go together.
How many may be in here, and which one gives way to a newcomer, is decided by `PendingConnections`. A connection that
gives way is closed without a word: no handshake is complete in which it could be told why.
Everything here belongs to the driving thread.
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
    """Sockets on their way out. Belongs to the driving thread."""

    def __init__(self, reactor: Selector, limit: int) -> None:
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
        self._leaving[leaving] = time.monotonic() + LINGER_SECONDS
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


ACCEPTS_PER_TURN: Final = 64
_PAUSE: Final = 0.1
"""Seconds without accepting when the system has no descriptor left and none of ours can be given up."""
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Accepted = Callable[[Peer, Channel, Channel], None]
"""Called with the peer, its control and its data channel."""


@dataclass(slots=True)
class _UnverifiedConnection:
    address: str
    channel: TlsChannel
    story: HandshakeSteps[tuple[ConnectionHello, Channel]] = field(init=False)
    watching: int = READABLE
    spoke: bool = False
    hello: ConnectionHello | None = None
    waits: bool = False
    """For its answer, until the other half has said hello."""
    partner: _UnverifiedConnection | None = None
    """The other half, once both have said hello."""
    settled: Channel | None = None
    """The channel once this half is through."""

    @property
    def descriptor(self) -> int:
        return self.channel.socket.fileno()


class TlsListener:
    """The listening socket and its candidates."""

    def __init__(
        self,
        listening: socket.socket,
        reactor: Selector,
        believer: Callable[[], TlsIdentity],
        acceptor: Acceptor,
        accepted: Accepted,
        *,
        takes: frozenset[bool],
        handshake_timeout: float,
        max_pending: int,
    ) -> None:
        """Takes the socket over. `believer` gives what is valid now; `takes`: whether plain connections, encrypted
        ones, or both.
        """
        self._listening = listening
        self._reactor = reactor
        self._believer = believer
        self._acceptor = acceptor
        self._accepted = accepted
        self._takes = takes
        self._timeout = handshake_timeout
        self._pending = PendingConnections(max_pending, handshake_timeout, SystemRandom().choice)
        self._candidates: dict[int, _UnverifiedConnection] = {}  # by descriptor, as in `_pending`
        self._crowded = f"more than {max_pending} connections wait to authenticate; try again"
        self._paused_until: float | None = None
        self._refused_connections = RefusedConnections(reactor, max_pending)
        reactor.add(listening.fileno(), self._knock)

    def due(self) -> float | None:
        """When `expire` has something to do."""
        times = (self._pending.next_deadline, self._paused_until, self._refused_connections.due())
        return min((time for time in times if time is not None), default=None)

    def expire(self) -> None:
        """Turn away whoever took too long."""
        if not (self._candidates or self._refused_connections or self._paused_until):
            return
        now = time.monotonic()
        for descriptor in self._pending.expired(now):
            candidate = self._candidates.get(descriptor)
            if candidate is not None:  # its other half may have taken it along
                self._refuse(candidate, self._what_is_missing(candidate))
        self._refused_connections.expire(now)
        if self._paused_until is not None and self._paused_until <= now:
            self._paused_until = None
            self._reactor.change(self._listening.fileno(), READABLE)

    def close(self) -> None:
        """Stop listening and close whoever is waiting, telling nobody."""
        self._reactor.remove(self._listening.fileno())
        self._listening.close()
        for descriptor, candidate in self._candidates.items():
            if candidate.settled is None:
                self._reactor.remove(descriptor)
            candidate.channel.socket.close()
        self._candidates.clear()
        self._refused_connections.close()

    def abandon(self) -> None:
        """In a forked child: close the descriptors."""
        self._listening.close()
        self._refused_connections.abandon()
        for candidate in self._candidates.values():
            candidate.channel.socket.close()

    def _what_is_missing(self, candidate: _UnverifiedConnection) -> str:
        spoke = "the handshake" if candidate.spoke else "its first byte"
        missing = "its second connection" if candidate.waits else spoke
        return f"{missing} did not come within {self._timeout:g} s"

    # --- coming in

    def _knock(self, _events: int) -> bool:
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
            return  # the newcomer was gone before we looked (ECONNABORTED and the like): nothing to accept
        displaced = self._pending.give_up(time.monotonic())
        if displaced is not None:
            self._dismiss(self._candidates[displaced], f"no room: {error.strerror}")
        else:
            self._paused_until = time.monotonic() + _PAUSE
            self._reactor.change(self._listening.fileno(), 0)

    def _admit(self, connection: socket.socket, address: str) -> None:
        placement = self._pending.enter(connection.fileno(), source_of(address), time.monotonic())
        if placement.displaced is not None:
            self._dismiss(self._candidates[placement.displaced], self._crowded)
        if not placement.admitted:
            connection.close()
            self._acceptor.candidate_refused(address, self._crowded)
            return
        believer = self._believer()
        try:
            tune(connection)
        except OSError as error:
            self._pending.leave(connection.fileno())
            connection.close()
            self._acceptor.candidate_refused(address, f"it was gone at once: {error.strerror}")
            return
        assert believer.server is not None
        channel = TlsChannel(connection, believer.server, server_side=True)
        candidate = _UnverifiedConnection(address, channel)
        candidate.story = answer(channel, partial(self._judge, candidate))
        self._candidates[candidate.descriptor] = candidate
        self._reactor.add(candidate.descriptor, partial(self._resume, candidate))

    # --- getting on

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
            events = next(candidate.story)
        except StopIteration as end:
            _, candidate.settled = end.value
            self._reactor.remove(candidate.descriptor)
            self._accept_if_whole(candidate)
        except HandshakeFailed as failure:
            self._refuse(candidate, failure.reason)
        else:
            self._watch_for(candidate, events)

    def _watch_for(self, candidate: _UnverifiedConnection, events: int) -> None:
        if events != candidate.watching:
            candidate.watching = events
            self._reactor.change(candidate.descriptor, events)

    def _judge(
        self, candidate: _UnverifiedConnection, hello: ConnectionHello, certificate: bytes | None
    ) -> ConnectionHello | None:
        """What to answer to a hello; None before the other half's is here."""
        candidate.hello = hello
        if candidate.partner is None:
            self._pair(candidate)
        try:
            self._believer().accepted_peer(certificate, candidate.address)
        except HandshakeFailed as failure:
            return _refusal(hello, failure.reason, HelloAnswer.NOT_BELIEVED)
        if hello.plain not in self._takes:
            ours, theirs = _describe(not hello.plain), _describe(hello.plain)
            return _refusal(hello, f"this node wants {ours} connections, the dialer {theirs} ones", HelloAnswer.REFUSED)
        candidate.waits = candidate.partner is None
        return None if candidate.waits else ConnectionHello(hello.half, hello.token, hello.plain)

    def _pair(self, candidate: _UnverifiedConnection) -> None:
        """Join the halves of a dial. Their time begins anew: what is left to do is an answer to each."""
        partner = next((other for other in self._candidates.values() if _belong_together(candidate, other)), None)
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
        try:  # once more: the credentials may have been replaced since the answer
            peer = self._believer().accepted_peer(control.channel.engine.getpeercert(True), control.address)
        except HandshakeFailed as failure:
            self._refuse(control, failure.reason)
            return
        for half in (control, data):
            self._remove(half)
            half.partner = None
        self._accepted(peer, control.settled, data.settled)

    # --- going away

    def _refuse(self, candidate: _UnverifiedConnection, reason: str) -> None:
        """Turn it away, and see to it that it can read why; its other half too, unless that is about to hear it."""
        self._end(candidate, reason, self._refused_connections.see_off)

    def _dismiss(self, candidate: _UnverifiedConnection, reason: str) -> None:
        """It gives way: nothing of it is kept. Its other half goes with it."""
        self._end(candidate, reason, socket.socket.close)

    def _end(self, candidate: _UnverifiedConnection, reason: str, close: Callable[[socket.socket], None]) -> None:
        if candidate.settled is None:
            self._reactor.remove(candidate.descriptor)
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
        """Its story refers back to it: unless that ends here, its TLS engine (50 KB) stays until the garbage collector
        comes, which counts objects and not bytes. For the same reason the halves of a dial forget each other.
        """
        self._pending.leave(candidate.descriptor)
        del self._candidates[candidate.descriptor]
        candidate.story.close()


def _belong_together(one: _UnverifiedConnection, other: _UnverifiedConnection) -> bool:
    if one.hello is None or other.hello is None or not other.waits:
        return False
    same_token = one.hello.token == other.hello.token and one.hello.half != other.hello.half
    return same_token and one.channel.engine.getpeercert(True) == other.channel.engine.getpeercert(True)


def _refusal(hello: ConnectionHello, reason: str, verdict: HelloAnswer) -> ConnectionHello:
    return ConnectionHello(hello.half, hello.token, hello.plain, verdict, reason)


def _describe(plain: bool) -> str:
    return "plain" if plain else "encrypted"
