"""An honest member with a mesh, and somebody at the other end who shows what a test wants shown."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from cryptography.hazmat.primitives.asymmetric import ec

from nexar.cluster.membership import Member, Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.config import Config
from nexar.links.link import Link
from nexar.security.authority import CERTIFICATE_LIFETIME, Authority, make_credentials, make_key
from nexar.security.certificates import Credentials, Trust, fingerprint
from nexar.transport.base import Carrier, CarrierLost, Expected
from nexar.wire.frame import Frame

EVENT_TIMEOUT = 20.0
CLUSTER = "ours"
HONEST, OTHER = 0, 1
"""Their ranks."""


def soon() -> float:
    return time.monotonic() + EVENT_TIMEOUT


def certified(
    authority: Authority, node: int, key: ec.EllipticCurvePrivateKey, lifetime: timedelta = CERTIFICATE_LIFETIME
) -> Credentials:
    return make_credentials(node, authority.cluster, key, authority.issue(node, key.public_key(), lifetime))


class Party:
    """A node with a mesh, which remembers whom it refused."""

    def __init__(self, scheme: str, authority: Authority) -> None:
        config = Config(transports=(scheme,), bind="127.0.0.1", host_id="here")
        self.scheme = scheme
        self.authority = authority
        self.node = Node(config)
        self.refused: list[str] = []
        self.mesh = Mesh(self.node, on_refused=lambda _address, reason: self.refused.append(reason))
        self.node.listen(self.mesh)
        self.show(certified(authority, self.node.id, self.node.key))

    def show(self, credentials: Credentials, *, credulous: bool = False) -> None:
        """Credulous: it dials whoever has the right key, and asks for no more."""
        self.node.certify(credentials, Trust(b"" if credulous else self.authority.certificate_pem))

    def member(self, node: int | None = None, key: ec.EllipticCurvePrivateKey | None = None) -> Member:
        """This node's place as a membership has it; under another name or with another key, if that is wanted."""
        pin = fingerprint((key or self.node.key).public_key())
        return Member(node or self.node.id, "here", pin, self.node.addresses(), frozenset({self.scheme}))

    def address(self) -> str:
        return self.node.addresses()[self.scheme][0]

    def dial(self, peer: "Party") -> Carrier:
        """A bare carrier to that party."""
        expected = Expected(peer.node.id, fingerprint(peer.node.key.public_key()))
        return self.node.dialer.dial({self.scheme: (peer.address(),)}, expected, soon())

    def link(self, rank: int, deadline: float) -> Link:
        """To whom its membership gives that rank."""
        return self.mesh.link(self.mesh.directory.membership.member(rank).node, deadline)

    def close(self) -> None:
        self.mesh.close()
        self.node.close()


@contextmanager
def opened(scheme: str, authority: Authority) -> Iterator[Party]:
    made = Party(scheme, authority)
    try:
        yield made
    finally:
        made.close()


def two(first: Member, second: Member, *more: Member, epoch: int = 1) -> Membership:
    return Membership(CLUSTER, epoch, (first, second, *more))


def somebody() -> Member:
    """A member whom nobody here has seen."""
    return Member(4711, "there", fingerprint(make_key().public_key()), {})


class Listening:
    """A sink that only remembers."""

    def __init__(self, carrier: Carrier) -> None:
        self.frames: list[bytes] = []
        self.over: str | None = None
        carrier.attach(self)

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        self.frames.append(bytes(body))

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        raise AssertionError("a payload that nobody expects")

    def carrier_finished(self, carrier: Carrier) -> None:
        self.over = "finished"

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        self.over = error.reason


def eventually(true: Callable[[], object], what: str) -> None:
    deadline = soon()
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)
