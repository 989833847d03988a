"""Whether anybody listens at an address, on loopback.

Pings, and the Pongs that come.

Whether a member lives: by a Ping through memory, and by what its system says on loopback.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from nexar.cluster.control_loop import CancelToken, ControlLoop
from nexar.cluster.decisions.membership_events import Loss, LossKind
from nexar.cluster.membership import Member, Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.peer_probe import PeerProbe, PingTable, TcpProbe, ended_on_this_host, nobody_listens, probe_peer
from nexar.config import Config
from nexar.errors import PeerLost
from nexar.links.link import Link
from nexar.testing.faults import Faults, LinkStall
from nexar.transport.memory import MemoryNetwork
from nexar.wire.control import Goodbye, Message, Ping, Pong
from tests.losses import ended
from tests.ranks import EVENT_TIMEOUT
from tests.unit.cluster.memory_mesh import soon
from tests.unit.cluster.virtual_loop import VirtualLoop


@pytest.fixture
def loop() -> Iterator[ControlLoop]:
    with ControlLoop(threaded=False) as made:
        yield made


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def until(loop: ControlLoop, true: Callable[[], object]) -> None:
    deadline = time.monotonic() + EVENT_TIMEOUT
    while not true():
        assert time.monotonic() < deadline
        loop.step(0.01)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_where_somebody_listens_it_stands_and_lasts(loop: ControlLoop, listener: socket.socket) -> None:
    with TcpProbe(address_of(listener), loop) as probe:
        assert not probe.open_for(0)
        until(loop, lambda: probe.accepted)
        until(loop, lambda: probe.open_for(0.01))
        assert probe.failed is None
    assert not loop._open()._watches


def test_where_nobody_listens_it_is_refused(loop: ControlLoop, listener: socket.socket) -> None:
    address = address_of(listener)
    listener.close()
    with TcpProbe(address, loop) as probe:
        until(loop, lambda: probe.failed)
        assert probe.refused
        assert not probe.accepted


def test_a_process_that_ends_while_we_probe_is_found_to_have_ended(loop: ControlLoop, listener: socket.socket) -> None:
    with TcpProbe(address_of(listener), loop) as probe:
        until(loop, lambda: probe.accepted)
        listener.close()  # which resets what it has not accepted
        until(loop, lambda: probe.failed)
        assert probe.refused


def test_one_that_takes_connections_and_ends_them_is_left_alone_after_a_few(
    loop: ControlLoop, listener: socket.socket
) -> None:
    listener.settimeout(0.001)

    def turn_away() -> bool:
        try:
            reset(listener.accept()[0])
        except TimeoutError:
            return probe.failed is not None
        return False

    with TcpProbe(address_of(listener), loop) as probe:
        until(loop, turn_away)
        assert not probe.refused
        assert probe.failed == "it accepts connections and closes them"


def test_a_name_is_looked_up_in_another_thread(loop: ControlLoop, listener: socket.socket) -> None:
    tasks: list[Callable[[], None]] = []
    address = address_of(listener).replace("127.0.0.1", "localhost")
    with TcpProbe(address, loop, run_in_thread=tasks.append) as probe:
        loop.step()
        assert not probe.accepted
        thread = threading.Thread(target=tasks.pop())
        thread.start()
        until(loop, lambda: probe.accepted or probe.failed)
        thread.join()
    assert not tasks


def test_a_name_that_is_found_too_late_is_ignored(loop: ControlLoop, listener: socket.socket) -> None:
    tasks: list[Callable[[], None]] = []
    address = address_of(listener).replace("127.0.0.1", "localhost")
    with TcpProbe(address, loop, run_in_thread=tasks.append) as probe:
        pass
    tasks.pop()()
    loop.step()
    assert (probe.accepted, probe.failed, probe._socket) == (False, None, None)


def test_an_address_that_leads_nowhere_has_failed(loop: ControlLoop) -> None:
    with TcpProbe("nowhere.invalid:80", loop) as probe:
        until(loop, lambda: probe.failed)
        assert not probe.refused


# -- several addresses -----------------------------------------------------------------------------------------------


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as once:
        return address_of(once)


def test_nobody_listens_where_every_address_refuses() -> None:
    assert nobody_listens([free_address(), free_address()], EVENT_TIMEOUT)


def test_somebody_listens_where_one_address_takes_connections(listener: socket.socket) -> None:
    assert not nobody_listens([free_address(), address_of(listener)], EVENT_TIMEOUT)


def test_an_address_that_is_none_is_no_refusal() -> None:
    assert not nobody_listens([free_address(), "no.such.host.invalid:1"], EVENT_TIMEOUT)


def test_who_is_silent_may_be_there() -> None:
    assert not nobody_listens([free_address()], 0.0)


class PingLink:
    def __init__(self, peer: int, *, lost: bool = False) -> None:
        self.peer = peer
        self.said: list[Message] = []
        self.lost = lost

    def send_control(self, message: Message) -> bool:
        if self.lost:
            raise PeerLost(rank=0, node=self.peer, address=None, cause="gone")
        self.said.append(message)
        return True


def link(peer: int, *, lost: bool = False) -> Link:
    return cast(Link, PingLink(peer, lost=lost))


def said(to: Link) -> list[Message]:
    return cast(Any, to).said


def test_a_ping_is_answered_with_its_number_unless_the_link_is_gone() -> None:
    one = link(7)
    PingTable().arrived(one, Ping(3))
    assert said(one) == [Pong(3)]
    PingTable().arrived(link(7, lost=True), Ping(3))


def test_a_pong_finds_who_waits_for_it_until_it_is_forgotten() -> None:
    pings, reported = PingTable(), list[str]()
    first = pings.expect(7, lambda: reported.append("first"))
    second = pings.expect(7, lambda: reported.append("second"))
    assert first != second
    pings.arrived(link(7), Pong(second))
    pings.arrived(link(7), Pong(first))
    pings.forget(first)
    pings.forget(first)
    pings.arrived(link(7), Pong(first))
    assert reported == ["second", "first"]


def test_a_pong_of_somebody_else_or_for_nobody_means_nothing() -> None:
    pings, reported = PingTable(), list[str]()
    number = pings.expect(7, lambda: reported.append("answered"))
    pings.arrived(link(8), Pong(number))
    pings.arrived(link(7), Pong(number + 1))
    pings.arrived(link(7), Goodbye("I leave"))
    assert not reported


SHORT = 0.3
PEER = Member(9, "there", bytes(32), {}, frozenset())


@pytest.fixture
def pings() -> PingTable:
    return PingTable()


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(Config(transports=("tls",), bind="127.0.0.1", host_id="here")) as made:
        yield made


@pytest.fixture
def peer() -> Iterator[Node]:
    with Node(Config(transports=("tls",), bind="127.0.0.1", host_id="here")) as made:
        yield made


def member(node: Node) -> Member:
    return Member(node.id, node.host, bytes(32), node.addresses(), node.schemes)


class FakeLink:
    """Answers as scripted."""

    def __init__(self, peer: int, *schemes: str) -> None:
        self.peer = peer
        self.schemes = schemes
        self.failure: Exception | None = None
        self.pinged = 0
        self.received = 0.0
        self.on_ping: Callable[[Ping], None] = lambda _: None

    def send_control(self, message: Message) -> bool:
        assert isinstance(message, Ping)
        if self.failure is not None:
            raise self.failure
        self.pinged += 1
        self.on_ping(message)
        return True

    def heard_bytes(self) -> float:
        return self.received


def as_link(fake: FakeLink) -> Link:
    return cast(Link, fake)


def answering(fake: FakeLink, pings: PingTable) -> FakeLink:
    fake.on_ping = lambda ping: pings.arrived(as_link(fake), Pong(ping.number))
    return fake


# ---------------------------------------------------------------- through memory: only the Ping


def test_a_member_in_this_process_answers_a_ping_or_it_does_not() -> None:
    network = MemoryNetwork()
    faults = Faults(network)
    with ExitStack() as undo:
        one, two = (undo.enter_context(Node(Config(), network)) for _ in range(2))
        membership = Membership("ours", 1, (member(one), member(two)))
        pings, meshes = [PingTable(), PingTable()], []
        for asked, answers in ((one, pings[0]), (two, pings[1])):
            meshes.append(Mesh(asked))
            meshes[-1].control.connect(answers.arrived, Ping, Pong)
            undo.callback(meshes[-1].close)
            asked.listen(meshes[-1])
            meshes[-1].adopt(membership)
        link = meshes[0].link(two.id, soon())
        assert probe_peer(one, member(two), link, pings[0], soon()) is None
        faults.add(LinkStall(source=two.id, destination=one.id))
        failure = probe_peer(one, member(two), link, pings[0], soon(SHORT))
        assert failure is not None
        assert failure.text.startswith("no answer for ")
        faults.clear()
        assert probe_peer(one, member(two), link, pings[0], soon()) is None


# ---------------------------------------------------------------- what the system of the peer says


def test_where_nobody_listens_any_more_its_process_has_ended_and_that_is_known_at_once(
    node: Node, pings: PingTable
) -> None:
    with Node(Config(transports=("tls",), bind="127.0.0.1", host_id="here")) as gone:
        last = member(gone)
    begin = time.monotonic()
    failure = probe_peer(node, last, None, pings, soon())
    assert failure == ended(f"its process has ended (connection refused at {last.addresses['tls'][0]})")
    assert probe_peer(node, last, as_link(FakeLink(last.node, "quic")), pings, soon()) == failure
    assert time.monotonic() - begin < EVENT_TIMEOUT / 2


def test_a_process_of_this_host_that_ended_is_known_without_waiting(node: Node, peer: Node) -> None:
    with Node(Config(transports=("tls",), bind="127.0.0.1", host_id="here")) as gone:
        last = member(gone)
        assert ended_on_this_host(node, last) is None
    loss = ended_on_this_host(node, last)
    assert loss is not None
    assert loss.is_conclusive
    assert ended_on_this_host(node, msgspec.structs.replace(last, host="elsewhere")) is None
    assert ended_on_this_host(node, member(peer)) is None


def test_without_a_link_a_system_that_takes_connections_is_the_best_answer(
    node: Node, peer: Node, pings: PingTable
) -> None:
    assert probe_peer(node, member(peer), None, pings, soon()) is None
    lost = FakeLink(peer.id, "quic")
    lost.failure = PeerLost(rank=1, node=peer.id, address=None, cause="gone")
    assert probe_peer(node, member(peer), as_link(lost), pings, soon()) is None
    assert not lost.pinged


def test_a_process_that_answers_lives(node: Node, peer: Node, pings: PingTable) -> None:
    link = answering(FakeLink(peer.id, "tls"), pings)
    assert probe_peer(node, member(peer), as_link(link), pings, soon()) is None
    assert link.pinged == 1
    assert not pings._waiting


def test_a_process_that_takes_connections_and_answers_nothing_is_stopped_or_stuck(
    node: Node, peer: Node, pings: PingTable
) -> None:
    begin = time.monotonic()
    failure = probe_peer(node, member(peer), as_link(FakeLink(peer.id, "tls")), pings, soon(SHORT))
    assert time.monotonic() - begin >= SHORT
    assert failure is not None
    assert failure.text.startswith("no answer for ")
    assert "though its system accepts connections: its process is stopped or stuck" in failure.text
    assert failure.text.endswith("raise NEXAR_HEARTBEAT_TIMEOUT_SECS")


def test_a_process_that_is_stuck_lives_as_long_as_its_quic_acknowledges(
    node: Node, peer: Node, pings: PingTable
) -> None:
    link = FakeLink(peer.id, "quic")

    def acknowledge(_: Ping) -> None:
        link.received += 40

    link.on_ping = acknowledge
    assert probe_peer(node, member(peer), as_link(link), pings, soon()) is None
    assert link.pinged >= 2


def test_what_was_on_its_way_when_it_died_is_no_life(node: Node, peer: Node, pings: PingTable) -> None:
    link = FakeLink(peer.id, "quic")
    link.on_ping = lambda _: setattr(link, "heard", 5000.0)
    assert probe_peer(node, member(peer), as_link(link), pings, soon(3 * SHORT)) is not None


def test_a_link_that_breaks_while_it_is_asked_is_nobody_to_ask(node: Node, peer: Node, pings: PingTable) -> None:
    link = FakeLink(peer.id, "quic")

    def breaks(_: Ping) -> None:
        raise PeerLost(rank=1, node=peer.id, address=None, cause="gone")

    link.on_ping = breaks
    assert probe_peer(node, member(peer), as_link(link), pings, soon()) is None


def test_an_address_that_leads_nowhere_is_a_reason_where_nobody_else_can_be_asked(pings: PingTable) -> None:
    asking = elsewhere("nowhere.invalid:1")
    failure = probe_peer(asking, PEER, None, pings, soon())
    assert failure is not None
    assert failure.text.startswith("it cannot be reached (nowhere.invalid:1: ")
    link = answering(FakeLink(PEER.node, "quic"), pings)
    assert probe_peer(asking, PEER, as_link(link), pings, soon()) is None


def elsewhere(*addresses: str) -> Node:
    """A node that knows these ways to its peer."""
    made = SimpleNamespace(cancel_token=CancelToken(), dial_addresses=lambda _: {"tls": addresses} if addresses else {})
    return cast(Any, made)


def test_where_there_is_nobody_to_ask_nothing_says_that_it_is_gone(pings: PingTable) -> None:
    assert probe_peer(elsewhere(), PEER, None, pings, soon()) is None


def test_who_is_nowhere_and_does_not_answer_is_silent(pings: PingTable) -> None:
    failure = probe_peer(elsewhere(), PEER, as_link(FakeLink(PEER.node, "memory")), pings, soon(SHORT))
    assert failure is not None
    assert failure.text.startswith("no answer for ")


def test_a_node_that_closes_asks_no_longer(pings: PingTable) -> None:
    asking = elsewhere()
    timer = threading.Timer(0.05, asking.cancel_token.cancel)
    timer.start()
    begin = time.monotonic()
    assert probe_peer(asking, PEER, as_link(FakeLink(PEER.node, "memory")), pings, soon()) is None
    assert time.monotonic() - begin < EVENT_TIMEOUT / 2
    timer.join()


def test_a_process_whose_system_takes_connections_has_more_time_to_answer(
    node: Node, peer: Node, pings: PingTable
) -> None:
    link = FakeLink(peer.id, "quic")
    asked = time.monotonic()

    def answer_late(ping: Ping) -> None:
        if time.monotonic() >= asked + 4 * SHORT:
            pings.arrived(as_link(link), Pong(ping.number))

    link.on_ping = answer_late
    assert (
        probe_peer(node, member(peer), as_link(link), pings, soon(SHORT), traffic_suffices=False, patience=60.0) is None
    )


def test_a_process_whose_packets_come_has_more_time_to_answer(node: Node, peer: Node, pings: PingTable) -> None:
    link = FakeLink(peer.id, "quic")
    nowhere = replace(member(peer), addresses={})
    asked = time.monotonic()

    def acknowledge(ping: Ping) -> None:
        link.received += 40
        if time.monotonic() >= asked + 4 * SHORT:
            pings.arrived(as_link(link), Pong(ping.number))

    link.on_ping = acknowledge
    assert probe_peer(node, nowhere, as_link(link), pings, soon(SHORT), traffic_suffices=False, patience=60.0) is None


def test_a_process_of_which_nothing_shows_that_it_exists_has_no_more_time(
    pings: PingTable, node: Node, peer: Node
) -> None:
    nowhere = replace(member(peer), addresses={})
    failure = probe_peer(node, nowhere, as_link(FakeLink(peer.id, "quic")), pings, soon(SHORT), patience=60.0)
    assert failure is not None


# ---------------------------------------------------------------- in virtual time


class Asked:
    """A probe of a member that has no address, in virtual time."""

    def __init__(self, pings: PingTable, link: FakeLink, **terms: Any) -> None:
        self.node = elsewhere()
        self.loop = VirtualLoop(100.0)
        self.results: list[Loss | None] = []
        self.probe = PeerProbe(
            self.node,
            PEER,
            as_link(link),
            pings,
            deadline=101.0,
            finished=self.results.append,
            loop=self.loop,
            run_in_thread=lambda task: task(),
            **terms,
        )


def test_silence_is_known_at_the_deadline_and_reported_once(pings: PingTable) -> None:
    asked = Asked(pings, FakeLink(PEER.node, "memory"))
    asked.loop.advance(0.99)
    assert asked.results == []
    asked.loop.advance(0.02)
    assert asked.results == [Loss(LossKind.NO_ANSWER, "no answer for 1 s")]
    asked.loop.advance(60.0)
    assert len(asked.results) == 1
    assert not pings._waiting
    assert asked.loop.next_due() is None


def test_a_pong_wakes_the_loop_once_however_often_it_comes(pings: PingTable) -> None:
    link = FakeLink(PEER.node, "memory")
    asked = Asked(pings, link)
    asked.loop.step()
    for _ in range(10):
        pings.arrived(as_link(link), Pong(asked.probe._number))
    assert len(asked.loop._queue) == 1
    asked.loop.step()
    assert asked.results == [None]


def test_patience_is_for_a_process_of_which_packets_came(pings: PingTable) -> None:
    link = FakeLink(PEER.node, "quic")
    asked = Asked(pings, link, traffic_suffices=False, patience=5.0)
    for _ in range(3):
        asked.loop.advance(0.06)
        link.received += 40
    asked.loop.advance(5.0)
    assert asked.results == []
    asked.loop.advance(1.0)
    assert [loss.kind for loss in asked.results if loss is not None] == [LossKind.NO_ANSWER]


def test_a_probe_that_was_closed_reports_nothing(pings: PingTable) -> None:
    asked = Asked(pings, FakeLink(PEER.node, "memory"))
    asked.probe.close()
    asked.probe.close()
    asked.loop.advance(10.0)
    assert asked.results == []


def test_an_exception_while_it_probes_counts_as_unreachable(pings: PingTable, caplog: pytest.LogCaptureFixture) -> None:
    link = FakeLink(PEER.node, "quic")
    asked = Asked(pings, link)
    link.heard_bytes = cast(Any, None)
    asked.loop.advance(1.0)
    (loss,) = asked.results
    assert loss is not None
    assert loss.text.startswith("it cannot be probed: TypeError: ")
    assert caplog.records[0].exc_info


def test_a_node_that_closes_ends_its_probes(pings: PingTable) -> None:
    asked = Asked(pings, FakeLink(PEER.node, "memory"))
    asked.node.cancel_token.cancel()
    asked.loop.step()
    assert asked.results == [None]
