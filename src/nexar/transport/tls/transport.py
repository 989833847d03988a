"""The TLS transport, and the dials in progress."""

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
    """The dials in progress. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pipes: dict[int, int] = {}  # writing end → reading end; under _lock
        self._ended = False  # under _lock

    @contextmanager
    def register(self, address: str) -> Iterator[int]:
        """Yield a descriptor that becomes readable when the dial must end. Raises ConnectRefused after `end`."""
        reading, writing = os.pipe()
        try:
            self._enter(address, reading, writing)
            yield reading
        finally:
            self._leave(writing)
            os.close(reading)

    def end(self) -> None:
        with self._lock:
            self._ended = True
            pipes, self._pipes = self._pipes, {}
            for writing in pipes:
                os.write(writing, b"\0")  # closing is not enough: a forked child may hold a copy
                os.close(writing)

    def abandon(self) -> None:
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


# Seconds an inbound connection has until its carrier is complete. Where a third of the packets is lost, TCP needs many
# seconds for the second connection. A connection that never authenticates is displaced when room is short.
HANDSHAKE_TIMEOUT: Final = 30.0

_log = logging.getLogger(__name__)
_warned = Lock()  # taken once, by the first unencrypted transport of the process


class TlsTransport(Transport):
    """TLS over TCP.

    `encrypt=False`: plain TCP after TLS authentication (scheme `tcp`), for trusted networks. `plain_too`: accepts both
    on one port and dials plain if `Expected.plain` is set.
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
        """Without credentials the transport can only dial."""
        self._selector = Selector(waker)
        self._identity = TlsIdentity.make(credentials, trust)  # replaced as a whole by replace_credentials
        self.scheme = "tls" if encrypt else "tcp"
        self._plain = not encrypt
        self._plain_modes = frozenset((self._plain, self._plain or plain_too))
        self._handshake_timeout = handshake_timeout
        self._max_pending = max_pending
        self._listener: TlsListener | None = None  # written by listen and close
        self._carriers: set[TlsCarrier] = set()  # any thread, under _lock
        self._closed = False  # written under _lock
        self._lock = Lock()
        self._dials = PendingDials()
        # Held while driving, so that close waits for the driver; reentrant, because a sink may close.
        self._driving = RLock()
        if True in self._plain_modes:
            _warn_once()

    def replace_credentials(self, credentials: Credentials, trust: Trust) -> None:
        self._identity = TlsIdentity.make(credentials, trust)

    def listen(self, address: str, acceptor: Acceptor) -> str:
        """`[::]:port` and `:port` accept IPv4 and IPv6."""
        if self._identity.server is None or self._listener is not None or self._closed:
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
            self._selector,
            lambda: self._identity,
            acceptor,
            accepted,
            plain_modes=self._plain_modes,
            handshake_timeout=self._handshake_timeout,
            max_pending=self._max_pending,
        )
        return self.address

    def connect(self, address: str, expected: Expected, deadline: float) -> Carrier:
        """Node 0 in `expected` is any node that chain and pin allow."""
        identity, plain = self._identity, self._plain or expected.plain
        if plain not in self._plain_modes:
            raise ConnectRefused(address, "this node does not allow unencrypted connections")
        with self._dials.register(address) as ending:
            peer, (control, data) = dial_peer(address, expected, deadline, identity, plain=plain, ending=ending)
        return self._make_carrier(peer, control, data, dialed=True)

    def poll(self) -> bool:
        with self._driving:
            if self._closed:
                return False
            if self._listener is not None:
                self._listener.expire()
            return self._selector.run_once()

    def prepare_sleep(self) -> bool:
        return not self._selector.has_more

    def due(self) -> float | None:
        return self._listener.due() if self._listener is not None else None

    def close(self) -> None:
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
            self._selector.close()

    def abandon(self) -> None:
        self._closed = True
        self._dials.abandon()
        for carrier in list(self._carriers):
            carrier.abandon()
        if self._listener is not None:
            self._listener.abandon()
        self._selector.close()

    def _make_carrier(self, peer: Peer, control: Channel, data: Channel, *, dialed: bool) -> TlsCarrier:
        limit_unread(data.socket)
        for channel in (control, data):
            restore_retry(channel.socket)
        decode_frame = decode if peer.verified else decode_unverified
        size = FIRST_BUFFER_BYTES if peer.verified else UNVERIFIED_BUFFER_BYTES
        scheme = "tls"
        if isinstance(data, PlainChannel):
            scheme = "tcp"
            widen(data.socket)
        first, second = (
            TlsConnection(channel, FrameReader(decode_frame, size), self._selector) for channel in (control, data)
        )
        carrier = TlsCarrier(peer, first, second, self._selector, scheme=scheme, dialed=dialed, forget=self._forget)
        with self._lock:
            closed = self._closed
            self._carriers.add(carrier)
        if closed:
            carrier.abort("the transport was closed")
        return carrier

    def _forget(self, carrier: TlsCarrier) -> None:
        with self._lock:
            self._carriers.discard(carrier)


PlainTransport = partial(TlsTransport, encrypt=False)  # makes the transport of the scheme `tcp`


def _warn_once() -> None:
    if _warned.acquire(blocking=False):
        _log.warning(
            "connections are authenticated but NOT encrypted (encrypt_bulk_transport=False): "
            "anybody on the network path can read and change what they carry"
        )
