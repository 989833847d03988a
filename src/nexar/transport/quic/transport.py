"""The settings of QUIC, one value. What is not here has the native package's default, which was measured.

QUIC: one UDP socket per node, dialing and listening, and the sleep of the node's driving thread.

A node that has QUIC sleeps in the native wait, which drives the endpoint while it waits and also watches the
descriptors of the other transports. Between two waits a native thread keeps timers and keep-alives going.
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
from nexar.transport.quic.protocol import CloseCode, close_code_of
from nexar.transport.unverified import certificate_advice

_UNVERIFIED: Final = 256
"""Handshakes of strangers that may be in progress, beside those of peers."""


def handshake_limit(peers: int) -> int:
    """Inbound handshakes that may be in progress at once, where `peers` may dial."""
    return 2 * peers + _UNVERIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class QuicSettings:
    """What a node may choose."""

    idle_timeout: float = 30.0
    """Seconds of silence after which a connection is lost."""
    keep_alive_interval: float = 5.0
    """Seconds; while nothing else is sent, something is, so that only a dead peer is silent."""
    handshake_timeout: float = 10.0
    """Seconds an inbound handshake may take. A dial has its own deadline."""
    max_streams: int = 1024
    """Streams a peer may have open at once. Room for all of them, 160 KB, is made when its certificate is verified."""
    unverified_streams: int = 9
    """The same before it has authenticated: one more than `inbound` tolerates, so that it notices who wants more."""
    max_connections: int = 65536
    peers: int = 1
    """Peers that may dial at once; the limit of handshakes in progress follows from it."""
    stream_window_bytes: int = 32 << 20
    """What a peer may send of one payload before we read it: the most of it that a busy node holds outside its place.
    100 Gbit/s for a millisecond are 12 MiB."""

    handshake_budget: int = 1024
    """Handshakes of peers that do not authenticate which may begin at once; 64 a second after that."""
    max_mtu: int = 8972
    """Largest packet, both ways. Each connection finds out how large packets its path carries, by sending large ones:
    that is worth it only where much is sent."""
    loopback_mtu: int = 65000
    """The same for paths over the loopback interface."""

    def to_native(self) -> quic.Settings:
        """The same for the native package, which checks the values (ValueError)."""
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
    """A node's QUIC endpoint: a Transport, and the Sleeper of its node.

    `bind` is the address of the one socket: `listen` opens it to others, but cannot move it. Without credentials the
    transport can only dial, as a candidate; `replace_credentials` makes a member of it.
    """

    scheme = "quic"

    def __init__(
        self, credentials: Credentials | None, trust: Trust, *, bind: str = ":0", settings: QuicSettings | None = None
    ) -> None:
        """OSError, with the number of the system's reason, if `bind` is not to be had."""
        native = (settings or QuicSettings()).to_native()
        shown, believed = to_native_credentials(credentials), to_native_trust(trust)
        try:
            self._endpoint = quic.Endpoint(to_numeric(bind), shown, believed, native)
        except OSError as error:
            raise close_code_of(error) from error
        self._driver = CompletionDriver(self._endpoint)
        self._completions = self._driver.completions
        self._identity = (credentials, trust)  # replaced as one, by any thread
        self._listener: QuicListener | None = None  # written by listen() and close()
        self._lock = Lock()
        self._carriers: set[QuicCarrier] = set()  # under _lock
        self._closed = False  # under _lock

    # ---------------------------------------------------------------- making carriers

    def replace_credentials(self, credentials: Credentials, trust: Trust) -> None:
        """For carriers made from now on; open ones are not touched. Callable from any thread."""
        native = to_native_credentials(credentials)
        assert native is not None
        self._endpoint.replace_credentials(native, to_native_trust(trust))
        self._identity = (credentials, trust)

    def expect_peers(self, count: int) -> None:
        """See Transport."""
        try:
            self._endpoint.set_max_handshakes(handshake_limit(count))
        except quic.EndpointClosed:
            return  # nobody can dial any more

    def listen(self, address: str, acceptor: Acceptor) -> str:
        """See Transport. `address` must be the one the socket is bound to; its port may be 0."""
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
        """See Transport."""
        try:
            course = QuicDialMethod(self._endpoint, self._identity, expected)
            beside = self._endpoint.address[0]
            _, (connection, peer) = dial_in_parallel(
                address,
                deadline,
                partial(resolve, beside=beside),
                course,
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

    # ---------------------------------------------------------------- driving, and sleeping

    def poll(self) -> bool:
        """See Transport."""
        return self._turn(0.0, 0.0)

    def due(self) -> float | None:
        """See Transport: who listens wants to know who was refused."""
        return None if self._listener is None else self._listener.next_look

    def sleep(self, timeout: float, spin: float) -> None:
        """See Sleeper."""
        self._turn(timeout, spin)

    def watch(self, descriptor: int, *, readable: bool = True, writable: bool = False) -> None:
        """See Waker. Watched for neither, the descriptor is forgotten."""
        if not readable and not writable:
            return self._completions.unwatch(descriptor)
        try:
            return self._completions.watch(descriptor, readable=readable, writable=writable)
        except quic.EndpointClosed:
            return None  # nobody sleeps any more: another transport got a connection while the node was closed

    def unwatch(self, descriptor: int) -> None:
        """See Waker."""
        self._completions.unwatch(descriptor)

    def wake(self) -> None:
        """See Waker. In a forked child nobody sleeps; what is left of other transports there may kick all the same."""
        try:
            self._completions.kick()
        except quic.ForkedError:
            return

    def _turn(self, timeout: float, spin: float) -> bool:
        try:
            happened = self._driver.turn(timeout, spin)
        except (quic.EndpointClosed, quic.ForkedError):
            if self._closed:
                return False  # by another thread while we slept, or abandoned
            raise
        if self._listener is not None:
            self._listener.look_for_refusals(time.monotonic())
        return happened

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """See Transport."""
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
            return  # in a child nothing is open

    def abandon(self) -> None:
        """See Transport. The native package has closed its descriptors in the child already, and refuses every call."""
        self._lock = Lock()
        self._closed = True
        self._listener = None
        for carrier in list(self._carriers):
            carrier.abandon()
