"""Whether a member lives: by a Ping through memory, and by what its system says on loopback."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from nexar.cluster.membership import Member, Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.probe import Pings, probe
from nexar.cluster.recall import Recall
from nexar.config import Config
from nexar.errors import PeerLost
from nexar.links.link import Link
from nexar.testing.faults import Faults, Stall
from nexar.transport.memory import MemoryNetwork
from nexar.wire.messages import Message, Ping, Pong
from tests.ranks import PATIENCE
from tests.unit.cluster.memory_mesh import soon

SHORT = 0.3
PEER = Member(9, "there", bytes(32), {}, frozenset())


@pytest.fixture
def pings() -> Pings:
    return Pings()


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(Config(transports=("tls",), bind="127.0.0.1", host_id="here")) as made:
        yield made


@pytest.fixture
def peer() -> Iterator[Node]:
    with Node(Config(transports=("tls",), bind="127.0.0.1", host_id="here")) as made:
        yield made


def member(node: Node) -> Member:
    return Member(node.id, node.host, bytes(32), node.addresses(), node.capabilities)


class FakeLink:
    """Answers as it is told."""

    def __init__(self, peer: int, *schemes: str) -> None:
        self.peer = peer
        self.schemes = schemes
        self.failure: Exception | None = None
        self.pinged = 0
        self.heard = 0.0
        self.on_ping: Callable[[Ping], None] = lambda _: None

    def send_control(self, message: Message) -> bool:
        assert isinstance(message, Ping)
        if self.failure is not None:
            raise self.failure
        self.pinged += 1
        self.on_ping(message)
        return True

    def heard_bytes(self) -> float:
        return self.heard


def as_link(fake: FakeLink) -> Link:
    return cast(Link, fake)


def answering(fake: FakeLink, pings: Pings) -> FakeLink:
    fake.on_ping = lambda ping: pings.arrived(as_link(fake), Pong(ping.number))
    return fake


# ---------------------------------------------------------------- through memory: only the Ping


def test_a_member_in_this_process_answers_a_ping_or_it_does_not() -> None:
    network = MemoryNetwork()
    faults = Faults(network)
    with ExitStack() as undo:
        one, two = (undo.enter_context(Node(Config(), network)) for _ in range(2))
        membership = Membership("ours", 1, (member(one), member(two)))
        pings, meshes = [Pings(), Pings()], []
        for asked, answers in ((one, pings[0]), (two, pings[1])):
            meshes.append(Mesh(asked, on_control=answers.arrived))
            undo.callback(meshes[-1].close)
            asked.listen(meshes[-1])
            meshes[-1].adopt(membership)
        link = meshes[0].link(two.id, soon())
        assert probe(one, member(two), link, pings[0], soon()) is None
        faults.add(Stall(source=two.id, destination=one.id))
        cause = probe(one, member(two), link, pings[0], soon(SHORT))
        assert cause is not None
        assert cause.startswith("no answer for ")
        faults.clear()
        assert probe(one, member(two), link, pings[0], soon()) is None


# ---------------------------------------------------------------- what the system of the peer says


def test_where_nobody_listens_any_more_its_process_has_ended_and_that_is_known_at_once(
    node: Node, pings: Pings
) -> None:
    with Node(Config(transports=("tls",), bind="127.0.0.1", host_id="here")) as gone:
        last = member(gone)
    begin = time.monotonic()
    cause = probe(node, last, None, pings, soon())
    assert cause == f"its process has ended (connection refused at {last.addresses['tls'][0]})"
    assert probe(node, last, as_link(FakeLink(last.node, "quic")), pings, soon()) == cause
    assert time.monotonic() - begin < PATIENCE / 2


def test_without_a_link_a_system_that_takes_connections_is_the_best_answer(
    node: Node, peer: Node, pings: Pings
) -> None:
    assert probe(node, member(peer), None, pings, soon()) is None
    lost = FakeLink(peer.id, "quic")
    lost.failure = PeerLost(rank=1, node=peer.id, address=None, cause="gone")
    assert probe(node, member(peer), as_link(lost), pings, soon()) is None
    assert not lost.pinged


def test_a_process_that_answers_lives(node: Node, peer: Node, pings: Pings) -> None:
    link = answering(FakeLink(peer.id, "tls"), pings)
    assert probe(node, member(peer), as_link(link), pings, soon()) is None
    assert link.pinged == 1
    assert not pings._waiting


def test_a_process_that_takes_connections_and_answers_nothing_is_stopped_or_stuck(
    node: Node, peer: Node, pings: Pings
) -> None:
    begin = time.monotonic()
    cause = probe(node, member(peer), as_link(FakeLink(peer.id, "tls")), pings, soon(SHORT))
    assert time.monotonic() - begin >= SHORT
    assert cause is not None
    assert cause.startswith("no answer for ")
    assert "though its system takes connections: its process is stopped or stuck" in cause
    assert cause.endswith("raise NEXAR_HEARTBEAT_TIMEOUT_SECS")


def test_a_process_that_is_stuck_lives_as_long_as_its_quic_acknowledges(node: Node, peer: Node, pings: Pings) -> None:
    link = FakeLink(peer.id, "quic")

    def acknowledge(_: Ping) -> None:
        link.heard += 40

    link.on_ping = acknowledge
    assert probe(node, member(peer), as_link(link), pings, soon()) is None
    assert link.pinged >= 2


def test_what_was_on_its_way_when_it_died_is_no_life(node: Node, peer: Node, pings: Pings) -> None:
    link = FakeLink(peer.id, "quic")
    link.on_ping = lambda _: setattr(link, "heard", 5000.0)
    assert probe(node, member(peer), as_link(link), pings, soon(3 * SHORT)) is not None


def test_a_link_that_breaks_while_it_is_asked_is_nobody_to_ask(node: Node, peer: Node, pings: Pings) -> None:
    link = FakeLink(peer.id, "quic")

    def breaks(_: Ping) -> None:
        raise PeerLost(rank=1, node=peer.id, address=None, cause="gone")

    link.on_ping = breaks
    assert probe(node, member(peer), as_link(link), pings, soon()) is None


def test_an_address_that_leads_nowhere_is_a_reason_where_nobody_else_can_be_asked(pings: Pings) -> None:
    asking = elsewhere("nowhere.invalid:1")
    cause = probe(asking, PEER, None, pings, soon())
    assert cause is not None
    assert cause.startswith("it cannot be reached (nowhere.invalid:1: ")
    link = answering(FakeLink(PEER.node, "quic"), pings)
    assert probe(asking, PEER, as_link(link), pings, soon()) is None


def elsewhere(*addresses: str) -> Node:
    """A node that knows these ways to its peer."""
    made = SimpleNamespace(recall=Recall(), ways_to=lambda _: {"tls": addresses} if addresses else {})
    return cast(Any, made)


def test_where_there_is_nobody_to_ask_nothing_says_that_it_is_gone(pings: Pings) -> None:
    assert probe(elsewhere(), PEER, None, pings, soon()) is None


def test_who_is_nowhere_and_does_not_answer_is_silent(pings: Pings) -> None:
    cause = probe(elsewhere(), PEER, as_link(FakeLink(PEER.node, "memory")), pings, soon(SHORT))
    assert cause is not None
    assert cause.startswith("no answer for ")


def test_a_node_that_closes_asks_no_longer(pings: Pings) -> None:
    asking = elsewhere()
    timer = threading.Timer(0.05, asking.recall.make)
    timer.start()
    begin = time.monotonic()
    assert probe(asking, PEER, as_link(FakeLink(PEER.node, "memory")), pings, soon()) is None
    assert time.monotonic() - begin < PATIENCE / 2
    timer.join()


def test_a_process_whose_system_takes_connections_has_more_time_to_answer(node: Node, peer: Node, pings: Pings) -> None:
    link = FakeLink(peer.id, "quic")
    asked = time.monotonic()

    def answer_late(ping: Ping) -> None:
        if time.monotonic() >= asked + 4 * SHORT:
            pings.arrived(as_link(link), Pong(ping.number))

    link.on_ping = answer_late
    assert probe(node, member(peer), as_link(link), pings, soon(SHORT), packets=False, patience=60.0) is None


def test_a_process_whose_packets_come_has_more_time_to_answer(node: Node, peer: Node, pings: Pings) -> None:
    link = FakeLink(peer.id, "quic")
    nowhere = replace(member(peer), addresses={})
    asked = time.monotonic()

    def acknowledge(ping: Ping) -> None:
        link.heard += 40
        if time.monotonic() >= asked + 4 * SHORT:
            pings.arrived(as_link(link), Pong(ping.number))

    link.on_ping = acknowledge
    assert probe(node, nowhere, as_link(link), pings, soon(SHORT), packets=False, patience=60.0) is None


def test_a_process_of_which_nothing_shows_that_it_exists_has_no_more_time(pings: Pings, node: Node, peer: Node) -> None:
    nowhere = replace(member(peer), addresses={})
    cause = probe(node, nowhere, as_link(FakeLink(peer.id, "quic")), pings, soon(SHORT), patience=60.0)
    assert cause is not None
