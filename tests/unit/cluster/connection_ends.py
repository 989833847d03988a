"""Nodes that keep death lines to one another over TLS, and pretend to have links over something else."""

from dataclasses import dataclass
from typing import Any, cast

from cryptography.x509 import Certificate

from nexar.cluster.acceptor import pin_mismatch
from nexar.cluster.decisions.peering import PeerDirectory
from nexar.cluster.handshake import AnsweringHandshake
from nexar.cluster.liveness_connections import LivenessConnections
from nexar.cluster.membership import Member, Membership
from nexar.cluster.node import Node
from nexar.config import Config
from nexar.security.authority import Authority, make_credentials
from nexar.security.certificates import Trust, fingerprint
from nexar.transport.base import Carrier
from nexar.wire.control import Introduce, Introduced


@dataclass
class PretendedLink:
    """As far as death lines ask."""

    schemes: tuple[str, ...] = ("quic",)
    failure: Exception | None = None


class End:
    """One node; the acceptor of its connections. Close it."""

    def __init__(self, host: str = "here", transports: tuple[str, ...] = ("tls",)) -> None:
        self.node = Node(Config(transports=transports, bind="127.0.0.1", host_id=host))
        self.links: dict[int, PretendedLink] = {}
        self.ended: list[tuple[int, str]] = []
        self.refused: list[str] = []
        self.directory: PeerDirectory | None = None
        self.lines = LivenessConnections(
            self.node,
            cast(Any, lambda: self.links),
            lambda node, cause: self.ended.append((node, cause)),
            control_loop=self.node.control_loop,
        )
        self.node.listen(self)

    def certify(self, authority: Authority) -> None:
        self.certify_with(authority.issue(self.node.id, self.node.key.public_key()), authority.certificate_pem)

    def certify_with(self, certificate: Certificate, authority: bytes) -> None:
        credentials = make_credentials(self.node.id, "ours", self.node.key, certificate)
        self.node.certify(credentials, Trust(authority))

    @property
    def member(self) -> Member:
        pin = fingerprint(self.node.key.public_key())
        return Member(self.node.id, self.node.host, pin, self.node.addresses(), self.node.schemes)

    def adopt(self, membership: Membership, *schemes: str) -> None:
        self.directory = PeerDirectory(self.node.id, membership)
        others = [member.node for member in membership.members if member.node != self.node.id]
        self.links = {node: PretendedLink(schemes or ("quic",)) for node in others}
        self.lines.adopt(membership)

    def close(self) -> None:
        self.lines.close()
        self.node.close()

    # -- Acceptor

    def carrier_accepted(self, carrier: Carrier) -> None:
        if self.directory is None or pin_mismatch(carrier, self.directory) is not None:
            carrier.abort("you are nobody here")
        else:
            AnsweringHandshake(carrier, self._introduced, lambda *_: None, lambda _: None)

    def candidate_refused(self, address: str, reason: str) -> None:
        self.refused.append(reason)

    def _introduced(self, dialer: AnsweringHandshake, introduce: Introduce) -> None:
        assert self.directory is not None
        assert introduce.death_line
        unwanted = self.lines.why_refused(dialer.carrier, introduce)
        if unwanted is not None:
            dialer.decline(unwanted)
        else:
            self.lines.take(dialer, Introduced(rank=self.directory.rank, epoch=self.directory.membership.epoch))
