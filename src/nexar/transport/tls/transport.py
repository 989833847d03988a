"""Dials under way, each in the thread of its caller, and how closing the transport ends them.

TLS over TCP as a transport: one listener, any number of carriers, driven by one thread at a time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock, RLock
from typing import Final

from nexar.errors import UsageError
from nexar.security.certificates import Credentials, Trust
from nexar.transport.base import Acceptor, Carrier, CarrierLost, ConnectRefused, Expected, Peer, Transport, Waker
from nexar.transport.tls.carrier import TlsCarrier
from nexar.transport.tls.connection import TlsConnection
from nexar.transport.tls.dialer import CLOSED, dial_peer
from nexar.transport.tls.handshake import TlsIdentity
from nexar.transport.tls.listener import TlsListener
from nexar.transport.tls.sockets import (
    Channel,
    PlainChannel,
    Selector,
    address_text,
    limit_unread,
    open_listener,
    restore_retry,
    widen,
)
from nexar.transport.unverified import decode_unverified
from nexar.wire.frame import FIRST_BUFFER_BYTES, UNVERIFIED_BUFFER_BYTES, FrameReader, decode


class PendingDials:
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
        self._reactor = Selector(waker)
        self._believer = TlsIdentity.make(credentials, trust)  # replaced whole, by replace_credentials
        self.scheme = "tls" if encrypt else "tcp"
        self._plain = not encrypt
        self._takes = frozenset((self._plain, self._plain or plain_too))
        self._handshake_timeout = handshake_timeout
        self._max_pending = max_pending
        self._listener: TlsListener | None = None  # written by listen and close
        self._carriers: set[TlsCarrier] = set()  # any thread, under _lock
        self._closed = False  # written under _lock
        self._lock = Lock()
        self._dials = PendingDials()
        # Held while driving, so that a close waits for the turn to end; reentrant, because a sink may close.
        self._driving = RLock()
        if True in self._takes:
            _warn_once()

    def replace_credentials(self, credentials: Credentials, trust: Trust) -> None:
        """From now on show and believe these. Carriers that exist are not touched."""
        self._believer = TlsIdentity.make(credentials, trust)

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
        self._listener = TlsListener(
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

    def prepare_sleep(self) -> bool:
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
            restore_retry(channel.socket)
        judge = decode if peer.verified else decode_unverified
        size = FIRST_BUFFER_BYTES if peer.verified else UNVERIFIED_BUFFER_BYTES
        scheme = "tls"
        if isinstance(data, PlainChannel):
            scheme = "tcp"
            widen(data.socket)
        first, second = (TlsConnection(channel, FrameReader(judge, size), self._reactor) for channel in (control, data))
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
