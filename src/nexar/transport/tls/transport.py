"""TLS over TCP as a transport: one listener, any number of carriers, driven by one thread at a time."""

from __future__ import annotations

import logging
from functools import partial
from threading import Lock, RLock
from typing import Final

from nexar.errors import UsageError
from nexar.security.credentials import Credentials, Trust
from nexar.transport.base import Acceptor, Carrier, CarrierLost, ConnectRefused, Expected, Peer, Transport, Waker
from nexar.transport.stranger import decode_from_stranger
from nexar.transport.tls.carrier import TlsCarrier
from nexar.transport.tls.channel import Channel, PlainChannel
from nexar.transport.tls.connection import Connection
from nexar.transport.tls.dialer import dial_peer
from nexar.transport.tls.listener import Listener
from nexar.transport.tls.reactor import Reactor
from nexar.transport.tls.sockets import address_text, calm, limit_unread, open_listener, widen
from nexar.transport.tls.trust import Believer
from nexar.transport.tls.under_way import DialsUnderWay
from nexar.wire.codec import FIRST_BUFFER_BYTES, STRANGER_BUFFER_BYTES, FrameReader
from nexar.wire.frame import decode

HANDSHAKE_TIMEOUT: Final = 30.0
"""Seconds an inbound connection has until its carrier is made. Its other half may come late: a network that loses a
third of its packets makes TCP try for several seconds, and then wait longer each time. Who does not mean to come in
holds a place for that long at most, and gives it up to the next who knocks when places are short."""

_log = logging.getLogger(__name__)
_warned = Lock()  # taken by the first transport of the process that does not encrypt, never given back


class TlsTransport(Transport):
    """See Transport. `encrypt=False`: authenticated by TLS when connecting, then plain TCP; for trusted networks. Such
    a transport calls itself `tcp`, and so do its carriers. `plain_too`: at the same port it also takes those who dial
    for such a carrier, and dials for one where that is asked for (`Expected.plain`).
    """

    scheme = "tls"

    def __init__(
        self,
        waker: Waker,
        credentials: Credentials | None,
        trust: Trust,
        *,
        encrypt: bool = True,
        plain_too: bool = False,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
        max_pending: int = 256,
    ) -> None:
        """Without credentials it can only dial, as a candidate that shows no certificate."""
        self._reactor = Reactor(waker)
        self._believer = Believer.make(credentials, trust)  # replaced whole, by replace_credentials
        self.scheme = "tls" if encrypt else "tcp"
        self._plain = not encrypt
        self._takes = frozenset((self._plain, self._plain or plain_too))
        self._handshake_timeout = handshake_timeout
        self._max_pending = max_pending
        self._listener: Listener | None = None  # written by listen and close
        self._carriers: set[TlsCarrier] = set()  # any thread, under _lock
        self._closed = False  # written under _lock
        self._lock = Lock()
        self._dials = DialsUnderWay()
        # Held while driving, so that a close waits for the turn to end; reentrant, because a sink may close.
        self._driving = RLock()
        if True in self._takes:
            _warn_once()

    def replace_credentials(self, credentials: Credentials, trust: Trust) -> None:
        """From now on show and believe these. Carriers that exist are not touched."""
        self._believer = Believer.make(credentials, trust)

    def listen(self, address: str, acceptor: Acceptor) -> str:
        """See Transport.listen. `[::]:port` or `:port` take IPv4 and IPv6."""
        if self._believer.server is None or self._listener is not None or self._closed:
            raise UsageError("a transport listens once, with credentials, before it is closed")

        def accepted(peer: Peer, control: Channel, data: Channel) -> None:
            carrier = self._make_carrier(peer, control, data, dialed=False)
            try:
                acceptor.carrier_accepted(carrier)
            except BaseException as error:
                carrier.fail(CarrierLost("fault", f"the acceptor raised {error!r}"))
                raise

        listening = open_listener(address)
        self.address = address_text(listening.getsockname())
        self._listener = Listener(
            listening,
            self._reactor,
            lambda: self._believer,
            acceptor,
            accepted,
            takes=self._takes,
            handshake_timeout=self._handshake_timeout,
            max_pending=self._max_pending,
        )
        return self.address

    def connect(self, address: str, expected: Expected, deadline: float) -> Carrier:
        """See Transport.connect. Node 0 in `expected`: whoever is there, as far as chain and pin allow."""
        believer, plain = self._believer, self._plain or expected.plain
        if plain not in self._takes:
            raise ConnectRefused(address, "this side does not go on without encryption")
        with self._dials.one_more(address) as ending:
            peer, (control, data) = dial_peer(address, expected, deadline, believer, plain=plain, ending=ending)
        return self._make_carrier(peer, control, data, dialed=True)

    def poll(self) -> bool:
        """See Transport.poll."""
        with self._driving:
            if self._closed:
                return False
            if self._listener is not None:
                self._listener.expire()
            return self._reactor.turn()

    def arm(self) -> bool:
        """See Transport.arm."""
        return not self._reactor.has_more

    def due(self) -> float | None:
        """See Transport.due."""
        return self._listener.due() if self._listener is not None else None

    def close(self) -> None:
        """See Transport.close."""
        self._dials.end()
        with self._driving:
            with self._lock:
                if self._closed:
                    return
                self._closed = True
                carriers = list(self._carriers)
            for carrier in carriers:
                carrier.abort("the transport was closed")
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            self.address = None
            self._reactor.close()

    def abandon(self) -> None:
        """See Transport.abandon. Takes no lock: a thread that held it may not exist here."""
        self._closed = True
        self._dials.abandon()
        for carrier in list(self._carriers):
            carrier.abandon()
        if self._listener is not None:
            self._listener.abandon()
        self._reactor.close()

    def _make_carrier(self, peer: Peer, control: Channel, data: Channel, *, dialed: bool) -> TlsCarrier:
        limit_unread(data.socket)
        for channel in (control, data):
            calm(channel.socket)
        judge = decode if peer.verified else decode_from_stranger
        size = FIRST_BUFFER_BYTES if peer.verified else STRANGER_BUFFER_BYTES
        scheme = "tls"
        if isinstance(data, PlainChannel):
            scheme = "tcp"
            widen(data.socket)
        first, second = (Connection(channel, FrameReader(judge, size), self._reactor) for channel in (control, data))
        carrier = TlsCarrier(peer, first, second, self._reactor, scheme=scheme, dialed=dialed, forget=self._forget)
        with self._lock:
            closed = self._closed
            self._carriers.add(carrier)
        if closed:
            carrier.abort("the transport was closed")
        return carrier

    def _forget(self, carrier: TlsCarrier) -> None:
        with self._lock:
            self._carriers.discard(carrier)


PlainTransport = partial(TlsTransport, encrypt=False)
"""Makes the transport of the scheme `tcp`."""


def _warn_once() -> None:
    if _warned.acquire(blocking=False):
        _log.warning(
            "connections are authenticated but NOT encrypted (encrypt_bulk_transport=False): "
            "anybody on the network path can read and change what they carry"
        )
