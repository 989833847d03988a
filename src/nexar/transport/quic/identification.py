"""From a handshake that succeeded to a Peer: does the certificate say what we wanted to hear?

The native package has verified that the certificate is genuine; who it names is looked at here. A dial that knows node
and authorities has had the name verified already. One that knows only a key (a ticket) had the key verified. One that
knows neither gets a carrier that is not verified: its caller must prove who is there before it believes a word.
"""

from __future__ import annotations

import hmac

import nexar_quic

from nexar.security.credentials import Credentials, Trust
from nexar.security.identity import Identity, NotOurs, identify, node_name
from nexar.transport.address import format_address
from nexar.transport.base import Expected, Peer
from nexar.types import UNKNOWN_NODE, format_node

_NOWHERE = "unknown"  # the cluster in the name that is asked for where no name will be looked at


class WrongPeer(Exception):
    """The handshake is fine, but this is not whom we want to talk to. The text says why."""


def to_native_credentials(credentials: Credentials | None) -> nexar_quic.Credentials | None:
    """What the endpoint shows. ValueError for bad PEM."""
    if credentials is None:
        return None
    return nexar_quic.Credentials(credentials.certificate_chain, credentials.private_key)


def to_native_trust(trust: Trust) -> nexar_quic.Trust:
    """Whom the endpoint believes. ValueError for bad PEM."""
    return nexar_quic.Trust(trust.authorities, allow_anonymous=trust.allow_anonymous)


def trust_for_dial(trust: Trust, expected: Expected) -> nexar_quic.Trust | None:
    """What decides about the other side's certificate; None: nothing that we know can."""
    if expected.node != UNKNOWN_NODE and trust.authorities:
        return nexar_quic.Trust(trust.authorities)
    return nexar_quic.Trust(fingerprints=[expected.fingerprint]) if expected.fingerprint else None


def name_for_dial(credentials: Credentials | None, expected: Expected) -> str:
    """The name the other side's certificate must have, where names are verified."""
    return node_name(expected.node, _NOWHERE if credentials is None else credentials.cluster)


def peer_of_dial(connection: nexar_quic.Connection, expected: Expected) -> Peer:
    """Who answered. Raises WrongPeer."""
    identity = _identity(connection)
    if identity is None:
        raise WrongPeer("it shows no certificate")
    if expected.node not in (UNKNOWN_NODE, identity.node):
        raise WrongPeer(f"it is node {format_node(identity.node)}, not {format_node(expected.node)}")
    if expected.fingerprint and not hmac.compare_digest(expected.fingerprint, identity.fingerprint):
        raise WrongPeer(f"node {format_node(identity.node)} has another key than the pinned one")
    return _peer(connection, identity.node)


def peer_of_arrival(connection: nexar_quic.Connection, cluster: str) -> Peer:
    """Who dialed us; a candidate without a certificate is nobody yet. Raises WrongPeer."""
    identity = _identity(connection)
    if identity is None:
        return _peer(connection, UNKNOWN_NODE)
    if identity.cluster != cluster:
        raise WrongPeer(f"it belongs to cluster {identity.cluster!r}, not {cluster!r}")
    return _peer(connection, identity.node)


def _identity(connection: nexar_quic.Connection) -> Identity | None:
    certificate = connection.peer_certificate
    if certificate is None:
        return None
    try:
        return identify(certificate)
    except NotOurs as error:
        raise WrongPeer(str(error)) from error


def _peer(connection: nexar_quic.Connection, node: int) -> Peer:
    address = format_address(*connection.remote_address)
    return Peer(node, connection.peer_certificate, connection.verified, address)
