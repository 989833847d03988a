"""A node that listens before it is certified: nobody comes in, until it has credentials that count."""

import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import NameOID

from nexar.security.authority import Authority, make_credentials, make_key
from nexar.security.certificates import Credentials, Trust, certificate_fingerprint, node_name
from nexar.transport.base import Carrier, ConnectRefused, Expected
from nexar.types import UNKNOWN_NODE
from tests.conformance.harness import EVENT_TIMEOUT, Node, Pair, Side, in_thread, pump
from tests.conformance.transports import LEFT, RIGHT, Case, World

JOINING = "joining"


@dataclass
class Scene:
    """Makes nodes with credentials of any kind, listening."""

    case: Case
    world: World
    stack: ExitStack

    def node(self, number: int, credentials: Credentials | None = None, trust: Trust | None = None) -> Node:
        world = self.world
        if credentials is not None:
            world = replace(world, credentials={number: credentials}, trust=trust or Trust(b""))
        node = Node(number, *self.case.make(number, world))
        self.stack.callback(node.close)
        node.transport.listen(self.case.listen(world), node)
        return node

    def certify(self, node: Node) -> None:
        node.transport.replace_credentials(self.world.credentials[node.number], self.world.trust)


@pytest.fixture
def scene(case: Case, world: World) -> Iterator[Scene]:
    if not case.has_certificates:
        pytest.skip(f"{case.name} shows no certificates")
    with ExitStack() as stack:
        yield Scene(case, world, stack)


def provisional(number: int) -> Credentials:
    return Authority.create(JOINING).admit(number)


def self_signed(number: int, cluster: str) -> Credentials:
    """In the form of a member's, and signed by its own key."""
    key, text = make_key(), node_name(number, cluster)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
    now = datetime.now(UTC)
    unsigned = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(text)]), critical=False)
    )
    return make_credentials(number, cluster, key, unsigned.sign(key, hashes.SHA256()))


def attempt(near: Node, far: Node, whom: Expected | None = None) -> object:
    """What came of a dial: a carrier, or the exception."""
    address = far.transport.address
    assert address is not None
    whom = whom or Expected(far.number)
    thread, outcome = in_thread(lambda: near.transport.connect(address, whom, time.monotonic() + EVENT_TIMEOUT))
    pump([near, far], lambda: outcome, "the outcome of a dial")
    thread.join()
    return outcome[0]


def check_usable(near: Node, far: Node) -> None:
    count = len(far.accepted)
    carrier = attempt(near, far)
    assert isinstance(carrier, Carrier), carrier
    assert carrier.peer.verified
    pump([near, far], lambda: len(far.accepted) > count, "the accepted carrier")
    pair = Pair(Side(near, carrier), Side(far, far.accepted[count]))
    for side in (pair.left, pair.right):
        side.carrier.attach(side.received)
    pair.check_usable()
    assert pair.right.carrier.peer.node == near.number


@pytest.mark.parametrize(
    "shown",
    [
        pytest.param(lambda: self_signed(LEFT, JOINING), id="self-signed, of our cluster"),
        pytest.param(lambda: self_signed(LEFT, "conformance"), id="self-signed, of another cluster"),
        pytest.param(lambda: provisional(LEFT), id="provisional itself"),
    ],
)
def test_who_believes_nobody_lets_nobody_in(scene: Scene, shown: Callable[[], Credentials]) -> None:
    waiting, knocking = scene.node(RIGHT, provisional(RIGHT)), scene.node(LEFT, shown())
    refused = attempt(knocking, waiting)
    assert isinstance(refused, ConnectRefused), refused
    assert refused.verification
    pump([waiting], lambda: waiting.refused, "the refusal at the listener")
    assert waiting.accepted == []


def test_who_believes_nobody_lets_no_member_and_no_unauthenticated_peer_in(scene: Scene) -> None:
    waiting, member = scene.node(RIGHT, provisional(RIGHT)), scene.node(LEFT)
    for anonymous in (False, True):
        assert isinstance(attempt(member, waiting, Expected(RIGHT, anonymous=anonymous)), ConnectRefused)
    assert waiting.accepted == []


def test_a_certified_node_takes_in_members_at_the_address_it_had_before(scene: Scene) -> None:
    waiting, member = scene.node(RIGHT, provisional(RIGHT)), scene.node(LEFT)
    address = waiting.transport.address
    assert isinstance(attempt(member, waiting), ConnectRefused)
    scene.certify(waiting)
    assert waiting.transport.address == address
    check_usable(member, waiting)


def test_a_certified_node_dials_with_its_new_credentials(scene: Scene) -> None:
    newcomer, member = scene.node(LEFT, provisional(LEFT)), scene.node(RIGHT)
    assert isinstance(attempt(newcomer, member), ConnectRefused)
    scene.certify(newcomer)
    check_usable(newcomer, member)


def test_a_certified_node_refuses_one_that_is_not(scene: Scene) -> None:
    node, forger = scene.node(RIGHT, provisional(RIGHT)), scene.node(LEFT, provisional(LEFT))
    scene.certify(node)
    assert isinstance(attempt(forger, node), ConnectRefused)
    assert node.accepted == []


@pytest.mark.parametrize("pinned", [True, False], ids=["knowing its key", "knowing nothing"])
def test_who_has_only_provisional_credentials_joins_without_showing_them(scene: Scene, pinned: bool) -> None:
    credentials, trust = scene.world.credentials[RIGHT], scene.world.trust
    seed = scene.node(RIGHT, credentials, replace(trust, allow_anonymous=True))
    newcomer = scene.node(LEFT, provisional(LEFT))
    certificate = ssl.PEM_cert_to_DER_cert(credentials.certificate_chain.decode())
    pin = certificate_fingerprint(certificate) if pinned else None
    carrier = attempt(newcomer, seed, Expected(UNKNOWN_NODE, pin, anonymous=True))
    assert isinstance(carrier, Carrier), carrier
    assert carrier.peer.verified == pinned
    assert carrier.peer.certificate == certificate
    pump([seed, newcomer], lambda: seed.accepted, "the accepted carrier")
    assert not seed.accepted[0].peer.verified


def test_who_joins_is_not_fooled_by_another_key(scene: Scene) -> None:
    seed = scene.node(RIGHT, scene.world.credentials[RIGHT], replace(scene.world.trust, allow_anonymous=True))
    newcomer = scene.node(LEFT, provisional(LEFT))
    refused = attempt(newcomer, seed, Expected(UNKNOWN_NODE, bytes(32), anonymous=True))
    assert isinstance(refused, ConnectRefused), refused
    assert refused.verification
