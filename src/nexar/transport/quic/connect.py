"""Making QUIC connections: numeric addresses, identity checks, dialing, accepting.

The native package verifies that a certificate is genuine; this module checks which node it names. A dial with node and
authorities verifies the name, a dial with only a pinned key (a ticket) the key.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable
from typing import Final, TypeAlias

from nexar.native import quic
from nexar.security.certificates import Credentials, ForeignCertificate, Identity, Trust, identify, node_name
from nexar.transport.address import format_address, parse_address
from nexar.transport.base import Acceptor, CarrierLost, Expected, Peer
from nexar.transport.parallel_dial import TargetFailed
from nexar.transport.quic.carrier import QuicCarrier
from nexar.transport.quic.driver import CompletionDriver
from nexar.transport.quic.protocol import CloseCode, shorten
from nexar.types import UNKNOWN_NODE, format_node


def to_numeric(text: str) -> tuple[str, int]:
    """Return the numeric address to bind; an empty host is every interface, IPv4 and IPv6. Raises OSError."""
    return resolve(text, local_host="::")[0]


def resolve(text: str, *, local_host: str) -> list[tuple[str, int]]:
    """Return every numeric address that the socket at `local_host` can reach, in the system's order. Raises OSError."""
    host, port = parse_address(text)
    if not host:
        return [("::", port) if socket.has_dualstack_ipv6() else ("0.0.0.0", port)]
    family = socket.AF_UNSPEC if ":" in local_host else socket.AF_INET
    found = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)
    return list(dict.fromkeys((str(target[0]), port) for _, _, _, _, target in found))


_UNKNOWN_CLUSTER = "unknown"  # cluster in the server name where no name is verified


class WrongPeer(Exception):
    """The handshake succeeded with another peer."""


def to_native_credentials(credentials: Credentials | None) -> quic.Credentials | None:
    """Raises ValueError for bad PEM."""
    if credentials is None:
        return None
    return quic.Credentials(credentials.certificate_chain, credentials.private_key)


def to_native_trust(trust: Trust) -> quic.Trust:
    """Raises ValueError for bad PEM."""
    return quic.Trust(trust.authorities, allow_anonymous=trust.allow_anonymous)


def trust_for_dial(trust: Trust, expected: Expected) -> quic.Trust | None:
    """Return the trust that verifies the listener's certificate, or None."""
    if expected.node != UNKNOWN_NODE and trust.authorities:
        return quic.Trust(trust.authorities)
    return quic.Trust(fingerprints=[expected.fingerprint]) if expected.fingerprint else None


def name_for_dial(credentials: Credentials | None, expected: Expected) -> str:
    """Return the name that the listener's certificate must have."""
    return node_name(expected.node, _UNKNOWN_CLUSTER if credentials is None else credentials.cluster)


def peer_of_dial(connection: quic.Connection, expected: Expected) -> Peer:
    """Return the listener's identity. Raises WrongPeer."""
    identity = _identity(connection)
    if identity is None:
        raise WrongPeer("it shows no certificate")
    if expected.node not in (UNKNOWN_NODE, identity.node):
        raise WrongPeer(f"it is node {format_node(identity.node)}, not {format_node(expected.node)}")
    if expected.fingerprint and not hmac.compare_digest(expected.fingerprint, identity.fingerprint):
        raise WrongPeer(f"node {format_node(identity.node)} has another key than the pinned one")
    return _peer(connection, identity.node)


def peer_of_arrival(connection: quic.Connection, cluster: str) -> Peer:
    """Return the dialer's identity, UNKNOWN_NODE without a certificate. Raises WrongPeer."""
    identity = _identity(connection)
    if identity is None:
        return _peer(connection, UNKNOWN_NODE)
    if identity.cluster != cluster:
        raise WrongPeer(f"it belongs to cluster {identity.cluster!r}, not {cluster!r}")
    return _peer(connection, identity.node)


def _identity(connection: quic.Connection) -> Identity | None:
    certificate = connection.peer_certificate
    if certificate is None:
        return None
    try:
        return identify(certificate)
    except ForeignCertificate as error:
        raise WrongPeer(str(error)) from error


def _peer(connection: quic.Connection, node: int) -> Peer:
    address = format_address(*connection.remote_address)
    return Peer(node, connection.peer_certificate, connection.verified, address)


QuicTarget: TypeAlias = tuple[str, int]
Found: TypeAlias = tuple[quic.Connection, Peer]

_TIMED_OUT: Final = "timed_out"  # the kind of a dial that exceeded its handshake timeout


class QuicDialMethod:
    """A DialMethod with one posted operation per target. Also raises EndpointClosed and ForkedError."""

    def __init__(self, endpoint: quic.Endpoint, identity: tuple[Credentials | None, Trust], expected: Expected) -> None:
        credentials, trust = identity
        self._endpoint = endpoint
        self._expected = expected
        self._trust = trust_for_dial(trust, expected)
        self._name = name_for_dial(credentials, expected)
        self._anonymous = credentials is None or expected.anonymous
        self._dials: dict[quic.Operation, QuicTarget] = {}

    def begin(self, target: QuicTarget) -> None:
        try:
            dial = self._endpoint.post_connect(
                target, self._name, trust=self._trust, verify=self._trust is not None, anonymous=self._anonymous
            )
        except quic.EndpointClosed:
            raise
        except (OSError, ValueError) as error:  # ValueError: address family that the socket does not support
            raise TargetFailed(str(error)) from error
        self._dials[dial] = target

    def wait(self, timeout: float) -> tuple[QuicTarget, Found | TargetFailed] | None:
        done, _ = self._endpoint.wait(list(self._dials), max(timeout, 0.0))
        if not done:
            return None
        target = self._dials.pop(done[0])
        try:
            return target, self._result_of(done[0])
        except TargetFailed as failure:
            return target, failure
        except _HandshakeTimedOut:
            return self._try_again(target)

    def describe(self, target: QuicTarget) -> str:
        return format_address(*target)

    def cancel_all(self) -> None:
        for dial in self._dials:
            if not dial.cancel():
                _close_connection(dial)
        self._dials.clear()

    def _result_of(self, dial: quic.Operation) -> Found:
        try:
            connection: quic.Connection = dial.result()
        except quic.EndpointClosed:
            raise
        except quic.VerificationError as error:
            raise TargetFailed(str(error), verification=True) from error
        except quic.ConnectError as error:
            if error.kind == _TIMED_OUT:
                raise _HandshakeTimedOut from error
            raise TargetFailed(str(error)) from error
        except OSError as error:
            raise TargetFailed(str(error)) from error
        try:
            return connection, peer_of_dial(connection, self._expected)
        except WrongPeer as error:
            connection.close(CloseCode.REFUSED, shorten(str(error)))
            raise TargetFailed(str(error), verification=True) from error

    def _try_again(self, target: QuicTarget) -> tuple[QuicTarget, TargetFailed] | None:
        """Dial again: only the deadline of the whole dial limits a target's silence."""
        try:
            self.begin(target)
        except TargetFailed as failure:
            return target, failure
        return None


class _HandshakeTimedOut(Exception):
    pass


def _close_connection(dial: quic.Operation) -> None:
    try:
        connection: quic.Connection = dial.result()
    except (quic.ConnectError, quic.Cancelled, quic.EndpointClosed):
        return
    connection.close(CloseCode.ABORTED, "another address answered first")


REFUSALS_INTERVAL: Final = 0.5  # seconds between two queries for refused handshakes: bounds the cost of a flood


class QuicListener:
    """Accepts connections and reports refused handshakes to one acceptor. Driver only."""

    def __init__(
        self,
        endpoint: quic.Endpoint,
        driver: CompletionDriver,
        acceptor: Acceptor,
        identify: Callable[[quic.Connection], Peer],
        adopt: Callable[[quic.Connection, Peer], QuicCarrier],
    ) -> None:
        self._endpoint = endpoint
        self._driver = driver
        self._acceptor = acceptor
        self._identify = identify
        self._adopt = adopt
        self.next_report = 0.0  # time of the next query for refusals

    def start(self) -> None:
        self._endpoint.post_accept(self._driver.completions, token=self.accepted)

    def accepted(self, operation: quic.Operation) -> None:
        try:
            connection = operation.result()
            self.start()
        except quic.QuicError:
            return  # the endpoint is closed
        self._accept(connection)

    def report_refusals(self, now: float) -> None:
        if now < self.next_report:
            return
        self.next_report = now + REFUSALS_INTERVAL
        for address, reason in self._endpoint.refusals():
            self._acceptor.candidate_refused(format_address(*address), reason)

    def interrupted(self, error: BaseException) -> None:
        """The next accept is already posted."""

    def _accept(self, connection: quic.Connection) -> None:
        try:
            peer = self._identify(connection)
        except WrongPeer as error:
            connection.close(CloseCode.REFUSED, shorten(str(error)))
            self._acceptor.candidate_refused(format_address(*connection.remote_address), str(error))
            return
        carrier = self._adopt(connection, peer)
        try:
            self._acceptor.carrier_accepted(carrier)
        except BaseException as error:
            carrier.fail(CarrierLost("fault", f"the acceptor raised {error!r}"))
            raise
