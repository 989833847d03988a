"""Addresses as the native package takes them: numeric.

From a handshake that succeeded to a Peer: does the certificate say what we wanted to hear?

The native package has verified that the certificate is genuine; who it names is looked at here. A dial that knows node
and authorities has had the name verified already. One that knows only a key (a ticket) had the key verified. One that
knows neither gets a carrier that is not verified: its caller must prove who is there before it believes a word.

The course of a QUIC dial: one posted operation per place, all waited for together.

Inbound connections: who knocked, who was let in, who was refused and why. All in the driving thread.
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
    """Where a socket is bound that shall have the address `text`; an empty host is every interface, of both families.
    OSError if it is nowhere.
    """
    return resolve(text, beside="::")[0]


def resolve(text: str, *, beside: str) -> list[tuple[str, int]]:
    """Every place that `text` names, each once, the system's favourite first. OSError if there is none.

    `beside` is the numeric host of the socket that will send there: one that speaks IPv4 only needs such an address.
    """
    host, port = parse_address(text)
    if not host:
        return [("::", port) if socket.has_dualstack_ipv6() else ("0.0.0.0", port)]
    family = socket.AF_UNSPEC if ":" in beside else socket.AF_INET
    found = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)
    return list(dict.fromkeys((str(place[0]), port) for _, _, _, _, place in found))


_NOWHERE = "unknown"  # the cluster in the name that is asked for where no name will be looked at


class WrongPeer(Exception):
    """The handshake is fine, but this is not whom we want to talk to. The text says why."""


def to_native_credentials(credentials: Credentials | None) -> quic.Credentials | None:
    """What the endpoint shows. ValueError for bad PEM."""
    if credentials is None:
        return None
    return quic.Credentials(credentials.certificate_chain, credentials.private_key)


def to_native_trust(trust: Trust) -> quic.Trust:
    """Whom the endpoint believes. ValueError for bad PEM."""
    return quic.Trust(trust.authorities, allow_anonymous=trust.allow_anonymous)


def trust_for_dial(trust: Trust, expected: Expected) -> quic.Trust | None:
    """What decides about the other side's certificate; None: nothing that we know can."""
    if expected.node != UNKNOWN_NODE and trust.authorities:
        return quic.Trust(trust.authorities)
    return quic.Trust(fingerprints=[expected.fingerprint]) if expected.fingerprint else None


def name_for_dial(credentials: Credentials | None, expected: Expected) -> str:
    """The name the other side's certificate must have, where names are verified."""
    return node_name(expected.node, _NOWHERE if credentials is None else credentials.cluster)


def peer_of_dial(connection: quic.Connection, expected: Expected) -> Peer:
    """Who answered. Raises WrongPeer."""
    identity = _identity(connection)
    if identity is None:
        raise WrongPeer("it shows no certificate")
    if expected.node not in (UNKNOWN_NODE, identity.node):
        raise WrongPeer(f"it is node {format_node(identity.node)}, not {format_node(expected.node)}")
    if expected.fingerprint and not hmac.compare_digest(expected.fingerprint, identity.fingerprint):
        raise WrongPeer(f"node {format_node(identity.node)} has another key than the pinned one")
    return _peer(connection, identity.node)


def peer_of_arrival(connection: quic.Connection, cluster: str) -> Peer:
    """Who dialed us; a candidate without a certificate is nobody yet. Raises WrongPeer."""
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

_GIVEN_UP: Final = "timed out"
"""What the endpoint says of a dial that took longer than its handshake timeout."""


class QuicDialMethod:
    """See Course. What it raises besides Failed: EndpointClosed, ForkedError."""

    def __init__(self, endpoint: quic.Endpoint, identity: tuple[Credentials | None, Trust], expected: Expected) -> None:
        credentials, trust = identity
        self._endpoint = endpoint
        self._expected = expected
        self._trust = trust_for_dial(trust, expected)
        self._name = name_for_dial(credentials, expected)
        self._anonymous = credentials is None or expected.anonymous
        self._dials: dict[quic.Operation, QuicTarget] = {}

    def begin(self, place: QuicTarget) -> None:
        """See Course."""
        try:
            dial = self._endpoint.post_connect(
                place, self._name, trust=self._trust, verify=self._trust is not None, anonymous=self._anonymous
            )
        except quic.EndpointClosed:
            raise
        except (OSError, ValueError) as error:  # ValueError: of a family that the socket does not speak
            raise TargetFailed(str(error)) from error
        self._dials[dial] = place

    def wait(self, timeout: float) -> tuple[QuicTarget, Found | TargetFailed] | None:
        """See Course."""
        done, _ = self._endpoint.wait(list(self._dials), max(timeout, 0.0))
        if not done:
            return None
        place = self._dials.pop(done[0])
        try:
            return place, self._judge(done[0])
        except TargetFailed as failure:
            return place, failure
        except _GivenUpDial:
            return self._try_again(place)

    def show(self, place: QuicTarget) -> str:
        """See Course."""
        return format_address(*place)

    def call_off(self) -> None:
        """See Course."""
        for dial in self._dials:
            if not dial.cancel():
                _close_connection(dial)
        self._dials.clear()

    def _judge(self, dial: quic.Operation) -> Found:
        try:
            connection: quic.Connection = dial.result()
        except quic.EndpointClosed:
            raise
        except quic.VerificationError as error:
            raise TargetFailed(str(error), verification=True) from error
        except quic.ConnectError as error:
            if error.reason == _GIVEN_UP:
                raise _GivenUpDial from error
            raise TargetFailed(str(error)) from error
        except OSError as error:
            raise TargetFailed(str(error)) from error
        try:
            return connection, peer_of_dial(connection, self._expected)
        except WrongPeer as error:
            connection.close(CloseCode.REFUSED, shorten(str(error)))
            raise TargetFailed(str(error), verification=True) from error

    def _try_again(self, place: QuicTarget) -> tuple[QuicTarget, TargetFailed] | None:
        """The deadline of the race alone says how long a place may be silent."""
        try:
            self.begin(place)
        except TargetFailed as failure:
            return place, failure
        return None


class _GivenUpDial(Exception):
    """The endpoint has waited for this place as long as it does."""


def _close_connection(dial: quic.Operation) -> None:
    """It was done before it could be cancelled."""
    try:
        connection: quic.Connection = dial.result()
    except (quic.ConnectError, quic.Cancelled, quic.EndpointClosed):
        return
    connection.close(CloseCode.ABORTED, "another address answered first")


REFUSALS_INTERVAL: Final = 0.5
"""Seconds between two looks at the refused handshakes: a flood of strangers costs two calls a second."""


class QuicListener:
    """Accepts for one acceptor."""

    def __init__(
        self,
        endpoint: quic.Endpoint,
        driver: CompletionDriver,
        acceptor: Acceptor,
        identify: Callable[[quic.Connection], Peer],
        welcome: Callable[[quic.Connection, Peer], QuicCarrier],
    ) -> None:
        self._endpoint = endpoint
        self._driver = driver
        self._acceptor = acceptor
        self._identify = identify
        self._welcome = welcome
        self.next_look = 0.0  # when to ask for refusals again

    def start(self) -> None:
        """Wait for the next one."""
        self._endpoint.post_accept(self._driver.completions, token=self.accepted)

    def accepted(self, operation: quic.Operation) -> None:
        """A handshake has succeeded."""
        try:
            connection = operation.result()
            self.start()
        except quic.QuicError:
            return  # the endpoint is closed
        self._let_in(connection)

    def look_for_refusals(self, now: float) -> None:
        """Tell the acceptor of handshakes that failed, now and then."""
        if now < self.next_look:
            return
        self.next_look = now + REFUSALS_INTERVAL
        for address, reason in self._endpoint.refusals():
            self._acceptor.candidate_refused(format_address(*address), reason)

    def interrupted(self, error: BaseException) -> None:
        """See Handler. The next accept is posted already; the connection in hand was closed."""

    def _let_in(self, connection: quic.Connection) -> None:
        try:
            peer = self._identify(connection)
        except WrongPeer as error:
            connection.close(CloseCode.REFUSED, shorten(str(error)))
            self._acceptor.candidate_refused(format_address(*connection.remote_address), str(error))
            return
        carrier = self._welcome(connection, peer)
        try:
            self._acceptor.carrier_accepted(carrier)
        except BaseException as error:
            carrier.fail(CarrierLost("fault", f"the acceptor raised {error!r}"))
            raise
