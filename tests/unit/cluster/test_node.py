"""One process in a cluster, before it knows anybody."""

import threading
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from nexar.cluster.control_loop import DialCancelled
from nexar.cluster.membership import Member
from nexar.cluster.node import Node
from nexar.config import Config
from nexar.security.authority import Authority, make_credentials
from nexar.security.certificates import Trust, fingerprint
from nexar.transport.base import Carrier, CarrierLost, ConnectRefused, Expected
from nexar.transport.memory import MemoryNetwork
from nexar.wire.frame import Frame
from tests.ranks import EVENT_TIMEOUT
from tests.unit.cluster.memory_mesh import eventually


def soon() -> float:
    return time.monotonic() + EVENT_TIMEOUT


class Hall:
    """Whoever is let in."""

    def __init__(self) -> None:
        self.came: list[Carrier] = []
        self.refused: list[str] = []

    def carrier_accepted(self, carrier: Carrier) -> None:
        self.came.append(carrier)

    def candidate_refused(self, address: str, reason: str) -> None:
        self.refused.append(reason)


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(Config(transports=("shm", "tls"), bind="127.0.0.1", host_id="here")) as made:
        yield made


def certify(node: Node, authority: Authority) -> None:
    certificate = authority.issue(node.id, node.key.public_key())
    node.certify(make_credentials(node.id, "ours", node.key, certificate), Trust(authority.certificate_pem))


def member(node: Node, host: str = "here") -> Member:
    return Member(node.id, host, fingerprint(node.key.public_key()), node.addresses(), node.schemes)


def test_two_nodes_are_never_the_same() -> None:
    network = MemoryNetwork()
    with Node(Config(), network) as one, Node(Config(), network) as other:
        assert one.id != other.id
        assert fingerprint(one.key.public_key()) != fingerprint(other.key.public_key())
        assert one.network_schemes == ("memory",)


def test_it_says_what_it_can_and_where_it_is(node: Node) -> None:
    assert node.schemes == {"shm", "tls"}
    assert node.network_schemes == ("tls",)
    ((address,),) = node.addresses().values()
    assert address.startswith("127.0.0.1:")
    assert node.host == "here"


def test_nobody_is_let_in_before_it_is_certified(node: Node) -> None:
    authority = Authority.create("ours")
    hall = Hall()
    node.listen(hall)
    with Node(Config(transports=("tls",), bind="127.0.0.1")) as other:
        certify(other, authority)
        with pytest.raises(ConnectRefused):
            other.dialer.dial(node.addresses(), Expected(node.id), soon())
        eventually(lambda: hall.refused, "a refusal")
        certify(node, authority)
        other.dialer.dial(other.dial_addresses(member(node)), Expected(node.id, member(node).fingerprint), soon())
        eventually(lambda: hall.came, "a carrier")
        assert hall.came[0].peer.node == other.id


class Ending:
    """A sink that waits for the end."""

    def __init__(self, carrier: Carrier) -> None:
        self.over = threading.Event()
        carrier.attach(self)

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        raise AssertionError("a word from a node that listens to nobody")

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        raise AssertionError("a payload from a node that listens to nobody")

    def carrier_finished(self, carrier: Carrier) -> None:
        self.over.set()

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        self.over.set()


def test_who_comes_before_anybody_listens_is_sent_away() -> None:
    network = MemoryNetwork()
    with Node(Config(), network) as deaf, Node(Config(), network) as other:
        dialed = Ending(other.dialer.dial(deaf.addresses(), Expected(deaf.id), soon()))
        assert dialed.over.wait(EVENT_TIMEOUT)
        deaf.candidate_refused("somewhere", "nobody is there to be told")


def test_memory_is_shared_by_an_address_that_is_each_peers_own(node: Node) -> None:
    one, other = node.memory_address_for(1), node.memory_address_for(2)
    assert one
    assert one != other
    with Node(Config(transports=("tls",), bind="127.0.0.1")) as without:
        assert without.memory_address_for(1) == ""
        with pytest.raises(ConnectRefused, match="no shared memory transport"):
            without.connect_memory(one, node.id, soon())


def test_closing_recalls_whoever_dials_and_can_be_repeated(node: Node) -> None:
    node.close()
    with pytest.raises(DialCancelled):
        node.dialer.dial({"tls": ("127.0.0.1:1",)}, Expected(1), soon())
    node.close()


def test_ten_nodes_leave_nothing_behind() -> None:
    for _ in range(10):
        with Node(Config(bind="127.0.0.1")):
            pass


@pytest.mark.parametrize("opaque", [False, True])
def test_others_are_notified_where_a_transport_of_another_package_listens(
    monkeypatch: pytest.MonkeyPatch, opaque: bool
) -> None:
    point = EntryPoint("paper", "tests.packages.paper.nexar_paper:PaperTransport", "nexar.transports")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [point])
    with Node(Config(transports=("paper", "tls"), bind="127.0.0.1")) as node:
        paper = node._by_scheme["paper"]
        paper.inside.address = "paper://opaque address" if opaque else paper.address
        assert node.network_schemes == ("tls",), "the seed speaks ours only"
        assert node.mesh_schemes == ("paper", "tls")
        assert node.addresses() == {"tls": (node.listens_at,), "paper": (paper.address,)}
        assert list(node.dial_addresses(member(node, node.host))) == ["paper", "tls"]


def test_closing_ends_the_control_loop(node: Node) -> None:
    ran = threading.Event()
    assert node.control_loop.call_soon(ran.set)
    assert ran.wait(EVENT_TIMEOUT)
    node.close()
    assert not node.control_loop.call_soon(ran.clear)
    assert not [each for each in threading.enumerate() if each.name == "nexar-control"]
