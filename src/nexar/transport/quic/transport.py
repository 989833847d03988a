"""QUIC: one UDP socket per node, dialing and listening, and the sleep of the node's driving thread.

A node that has QUIC sleeps in the native wait, which drives the endpoint while it waits and also watches the
descriptors of the other transports. Between two waits a native thread keeps timers and keep-alives going.
"""

from __future__ import annotations

import errno
import time
from functools import partial
from threading import Lock
from typing import Final

from nexar_quic import Connection, Endpoint, EndpointClosed, ForkedError

from nexar.errors import UsageError
from nexar.security.credentials import Credentials, Trust
from nexar.transport.address import format_address
from nexar.transport.base import Acceptor, ConnectRefused, Expected, Peer, Transport
from nexar.transport.disbelief import advice
from nexar.transport.quic.addresses import resolve, to_numeric
from nexar.transport.quic.carrier import QuicCarrier
from nexar.transport.quic.dialing import QuicCourse
from nexar.transport.quic.driver import Driver
from nexar.transport.quic.endings import CloseCode, numbered
from nexar.transport.quic.identification import peer_of_arrival, to_native_credentials, to_native_trust
from nexar.transport.quic.listener import Listener
from nexar.transport.quic.settings import QuicSettings, handshake_limit
from nexar.transport.race import race

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
            self._endpoint = Endpoint(to_numeric(bind), shown, believed, native)
        except OSError as error:
            raise numbered(error) from error
        self._driver = Driver(self._endpoint)
        self._completions = self._driver.completions
        self._identity = (credentials, trust)  # replaced as one, by any thread
        self._listener: Listener | None = None  # written by listen() and close()
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
        except EndpointClosed:
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
        self._listener = Listener(self._endpoint, self._driver, acceptor, self._identify, self._adopt)
        self._listener.start()
        self.address = format_address(*bound)
        return self.address

    def connect(self, address: str, expected: Expected, deadline: float) -> QuicCarrier:
        """See Transport."""
        try:
            course = QuicCourse(self._endpoint, self._identity, expected)
            beside = self._endpoint.address[0]
            _, (connection, peer) = race(
                address, deadline, partial(resolve, beside=beside), course, advice(expected, self._identity[0])
            )
        except ForkedError as error:
            raise ConnectRefused(address, _FORKED) from error
        except EndpointClosed as error:
            raise ConnectRefused(address, str(error)) from error
        return self._adopt(connection, peer)

    def _identify(self, connection: Connection) -> Peer:
        credentials, _ = self._identity
        assert credentials is not None
        return peer_of_arrival(connection, credentials.cluster)

    def _adopt(self, connection: Connection, peer: Peer) -> QuicCarrier:
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
        except EndpointClosed:
            return None  # nobody sleeps any more: another transport got a connection while the node was closed

    def unwatch(self, descriptor: int) -> None:
        """See Waker."""
        self._completions.unwatch(descriptor)

    def kick(self) -> None:
        """See Waker. In a forked child nobody sleeps; what is left of other transports there may kick all the same."""
        try:
            self._completions.kick()
        except ForkedError:
            return

    def _turn(self, timeout: float, spin: float) -> bool:
        try:
            happened = self._driver.turn(timeout, spin)
        except (EndpointClosed, ForkedError):
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
        except ForkedError:
            return  # in a child nothing is open

    def abandon(self) -> None:
        """See Transport. The native package has closed its descriptors in the child already, and refuses every call."""
        self._lock = Lock()
        self._closed = True
        self._listener = None
        for carrier in list(self._carriers):
            carrier.abandon()
