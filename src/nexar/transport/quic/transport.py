"""The QUIC transport: one UDP socket per node, which is also the node's Sleeper.

The native wait also watches the descriptors of other transports. Between waits a native thread serves timers and
keep-alives.
"""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Final

from nexar.errors import UsageError
from nexar.native import quic
from nexar.security.certificates import Credentials, Trust
from nexar.transport.address import format_address
from nexar.transport.base import Acceptor, ConnectRefused, Expected, Peer, Transport
from nexar.transport.parallel_dial import dial_in_parallel
from nexar.transport.quic.carrier import QuicCarrier
from nexar.transport.quic.connect import (
    QuicDialMethod,
    QuicListener,
    peer_of_arrival,
    resolve,
    to_native_credentials,
    to_native_trust,
    to_numeric,
)
from nexar.transport.quic.driver import CompletionDriver
from nexar.transport.quic.protocol import CloseCode
from nexar.transport.unverified import certificate_advice

_UNVERIFIED: Final = 256  # handshakes of unverified peers in progress, in addition to those of peers


def handshake_limit(peers: int) -> int:
    """Return the limit of inbound handshakes in progress."""
    return 2 * peers + _UNVERIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class QuicSettings:
    """Settings that differ from the native package's measured defaults."""

    idle_timeout: float = 30.0  # seconds of silence until a connection is lost
    keep_alive_interval: float = 5.0  # seconds; sent while idle, so that only a dead peer is silent
    handshake_timeout: float = 10.0  # seconds for an inbound handshake; a dial has its own deadline
    # streams a peer may have open; 160 KB are allocated for them once its certificate is verified
    max_streams: int = 1024
    # before authentication: one more than receive_streams tolerates, so that excess is noticed
    unverified_streams: int = 9
    max_connections: int = 65536
    peers: int = 1  # peers that may dial at once; sets the limit of handshakes in progress
    # Unread bytes that a peer may send of one payload, and so the memory of a busy node; 100 Gbit/s × 1 ms is 12 MiB.
    stream_window_bytes: int = 32 << 20

    handshake_budget: int = 1024  # handshakes of unauthenticated peers that may start at once; then 64 per second
    max_mtu: int = 8972  # Largest packet. Path MTU discovery sends large packets, which pays off only for much data.
    loopback_mtu: int = 65000  # the same for loopback

    def to_native(self) -> quic.Settings:
        """Raises ValueError for invalid values."""
        return quic.Settings(
            idle_timeout=self.idle_timeout,
            keep_alive_interval=self.keep_alive_interval,
            handshake_timeout=self.handshake_timeout,
            max_streams=self.max_streams,
            max_connections=self.max_connections,
            unverified_streams=self.unverified_streams,
            max_handshakes=handshake_limit(self.peers),
            stream_window_bytes=self.stream_window_bytes,
            handshake_budget=self.handshake_budget,
            max_mtu=self.max_mtu,
            loopback_mtu=self.loopback_mtu,
        )


_FORKED: Final = "this process was forked; it must make a transport of its own"


class QuicTransport(Transport):
    """Without credentials the transport can only dial, as a joining node; `replace_credentials` makes it a member."""

    scheme = "quic"

    def __init__(
        self, credentials: Credentials | None, trust: Trust, *, bind: str = ":0", settings: QuicSettings | None = None
    ) -> None:
        """Binds its socket to `bind`. Raises OSError with errno if that is not available."""
        native = (settings or QuicSettings()).to_native()
        shown, believed = to_native_credentials(credentials), to_native_trust(trust)
        self._endpoint = quic.Endpoint(to_numeric(bind), shown, believed, native)
        self._driver = CompletionDriver(self._endpoint)
        self._completions = self._driver.completions
        self._identity = (credentials, trust)  # replaced as a whole, by any thread
        self._listener: QuicListener | None = None  # written by listen() and close()
        self._lock = Lock()
        self._carriers: set[QuicCarrier] = set()  # under _lock
        self._closed = False  # under _lock

    # ---------------------------------------------------------------- making carriers

    def replace_credentials(self, credentials: Credentials, trust: Trust) -> None:
        native = to_native_credentials(credentials)
        assert native is not None
        self._endpoint.replace_credentials(native, to_native_trust(trust))
        self._identity = (credentials, trust)

    def expect_peers(self, count: int) -> None:
        try:
            self._endpoint.set_max_handshakes(handshake_limit(count))
        except quic.EndpointClosed:
            return  # nobody can dial now

    def listen(self, address: str, acceptor: Acceptor) -> str:
        """`address` must be that of the socket; its port may be 0."""
        if self._identity[0] is None:
            raise UsageError("a transport without credentials cannot listen; give it some first")
        if self._listener is not None:
            raise OSError(errno.EINVAL, f"already listening on {self.address}")
        bound = self._endpoint.address
        host, port = to_numeric(address)
        if host != bound[0] or port not in (0, bound[1]):
            raise OSError(errno.EADDRNOTAVAIL, f"cannot listen on {address}: bound to {format_address(*bound)}")
        self._listener = QuicListener(self._endpoint, self._driver, acceptor, self._identify, self._adopt)
        self._listener.start()
        self.address = format_address(*bound)
        return self.address

    def connect(self, address: str, expected: Expected, deadline: float) -> QuicCarrier:
        try:
            method = QuicDialMethod(self._endpoint, self._identity, expected)
            local_host = self._endpoint.address[0]
            _, (connection, peer) = dial_in_parallel(
                address,
                deadline,
                partial(resolve, local_host=local_host),
                method,
                certificate_advice(expected, self._identity[0]),
            )
        except quic.ForkedError as error:
            raise ConnectRefused(address, _FORKED) from error
        except quic.EndpointClosed as error:
            raise ConnectRefused(address, str(error)) from error
        return self._adopt(connection, peer)

    def _identify(self, connection: quic.Connection) -> Peer:
        credentials, _ = self._identity
        assert credentials is not None
        return peer_of_arrival(connection, credentials.cluster)

    def _adopt(self, connection: quic.Connection, peer: Peer) -> QuicCarrier:
        carrier = QuicCarrier(connection, peer, self._driver, self._forget)
        with self._lock:
            if not self._closed:
                self._carriers.add(carrier)
                return carrier
        carrier.abort("the transport is closed")
        return carrier

    def _forget(self, carrier: QuicCarrier) -> None:
        with self._lock:
            self._carriers.discard(carrier)

    # ---------------------------------------------------------------- driving and sleeping

    def poll(self) -> bool:
        return self._turn(0.0, 0.0)

    def due(self) -> float | None:
        return None if self._listener is None else self._listener.next_report

    def sleep(self, timeout: float, spin: float) -> None:
        self._turn(timeout, spin)

    def watch(self, descriptor: int, *, readable: bool = True, writable: bool = False) -> None:
        """Unwatches the descriptor if no event is given."""
        if not readable and not writable:
            return self._completions.unwatch(descriptor)
        try:
            return self._completions.watch(descriptor, readable=readable, writable=writable)
        except quic.EndpointClosed:
            return None  # no thread sleeps now: another transport connected while the node was closing

    def unwatch(self, descriptor: int) -> None:
        self._completions.unwatch(descriptor)

    def wake(self) -> None:
        """No effect in a forked child."""
        try:
            self._completions.kick()
        except quic.ForkedError:
            return

    def _turn(self, timeout: float, spin: float) -> bool:
        try:
            happened = self._driver.run_once(timeout, spin)
        except (quic.EndpointClosed, quic.ForkedError):
            if self._closed:
                return False  # another thread closed it while we slept, or it was abandoned
            raise
        if self._listener is not None:
            self._listener.report_refusals(time.monotonic())
        return happened

    # ---------------------------------------------------------------- closing

    def close(self) -> None:
        with self._lock:
            self._closed = True
            carriers = list(self._carriers)
        self._listener = None
        self.address = None
        for carrier in carriers:
            carrier.abort("the transport is closed")
        try:
            self._endpoint.close(CloseCode.ABORTED, "the transport is closed")
        except quic.ForkedError:
            return  # nothing is open in a child

    def abandon(self) -> None:
        self._lock = Lock()
        self._closed = True
        self._listener = None
        for carrier in list(self._carriers):
            carrier.abandon()
