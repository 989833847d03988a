"""What a node shows and whom it believes, made ready for handshakes; and the verdict on a certificate.

One immutable value per (credentials, trust). Replacing the credentials of a live transport replaces this value: dials
and handshakes that have begun go on with the old one.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from nexar.security.credentials import Credentials, Trust
from nexar.security.identity import NotOurs, certificate_fingerprint, identify, node_name
from nexar.security.tls import client_context, server_context
from nexar.transport.base import Expected, Peer
from nexar.transport.tls.handshake import HandshakeFailed
from nexar.types import UNKNOWN_NODE, NodeId, format_node


@dataclass(frozen=True, slots=True)
class Believer:
    """Makes TLS contexts' verdicts complete: names, pins, clusters."""

    cluster: str | None
    server: ssl.SSLContext | None
    named: ssl.SSLContext
    unnamed: ssl.SSLContext
    credentials: Credentials | None
    trust: Trust

    @classmethod
    def make(cls, credentials: Credentials | None, trust: Trust) -> Believer:
        """Without credentials a node can dial, anonymously, and not listen."""
        return cls(
            cluster=credentials.cluster if credentials else None,
            server=server_context(credentials, trust) if credentials else None,
            named=client_context(credentials, trust),
            unnamed=client_context(credentials, trust, check_name=False),
            credentials=credentials,
            trust=trust,
        )

    @property
    def verifies(self) -> bool:
        """Dials check the chain. Without authorities they cannot; then only a pinned key verifies the other side."""
        return bool(self.trust.authorities)

    def client(self, expected: Expected) -> tuple[ssl.SSLContext, str | None]:
        """Context and name for a dial. Whose node id or cluster is not known cannot be checked for its name."""
        if self.cluster is None or expected.node == UNKNOWN_NODE:
            return self._context(expected, named=False), None
        return self._context(expected, named=True), node_name(expected.node, self.cluster)

    def _context(self, expected: Expected, *, named: bool) -> ssl.SSLContext:
        if expected.anonymous:  # so rare that its context is not worth keeping
            return client_context(None, self.trust, check_name=named)
        return self.named if named else self.unnamed

    def check_dialed(self, expected: Expected, certificate: bytes | None) -> None:
        """Raises HandshakeFailed unless the other end is the one expected, as far as that can be known."""
        if certificate is None:
            raise HandshakeFailed("it showed no certificate", verification=True)
        try:
            if expected.fingerprint not in (None, certificate_fingerprint(certificate)):
                raise HandshakeFailed("its key is not the pinned one", verification=True)
            if self.verifies or expected.fingerprint:
                # A node that joins has no cluster yet: the pin decides.
                self._check_name(expected.node, certificate, self.cluster if self.verifies else None)
        except NotOurs as error:
            raise HandshakeFailed(str(error), verification=True) from error

    def dialed_peer(self, expected: Expected, certificate: bytes | None, address: str) -> Peer:
        """Who is at the other end of a dial that was checked. A pinned key is as good as a name: it was shown to be
        the other side's own, and who expects it knows whose it is.
        """
        if certificate is None or not (self.verifies or expected.fingerprint):
            return Peer(expected.node, certificate, verified=False, address=address)
        return Peer(identify(certificate).node, certificate, verified=True, address=address)

    def accepted_peer(self, certificate: bytes | None, address: str) -> Peer:
        """Who has dialed us. TLS has verified the certificate if there is one. Raises HandshakeFailed."""
        if certificate is None:
            return Peer(UNKNOWN_NODE, None, verified=False, address=address)
        try:
            node = self._check_name(UNKNOWN_NODE, certificate, self.cluster)
        except NotOurs as error:
            raise HandshakeFailed(str(error), verification=True) from error
        return Peer(node, certificate, verified=True, address=address)

    def _check_name(self, node: NodeId, certificate: bytes, cluster: str | None) -> NodeId:
        identity = identify(certificate)
        if node not in (UNKNOWN_NODE, identity.node):
            raise NotOurs(f"it names node {format_node(identity.node)}, expected {format_node(node)}")
        if cluster not in (None, identity.cluster):
            raise NotOurs(f"it belongs to cluster {identity.cluster!r}, not to {cluster!r}")
        return identity.node
