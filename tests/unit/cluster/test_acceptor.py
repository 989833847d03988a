"""Connections that others dialed, one by one: each becomes something, or is refused with the reason."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from nexar.cluster.acceptor import MAX_INCOMING_PER_NODE, IncomingLimit, PeerAcceptor, pin_mismatch
from nexar.cluster.addresses import MAX_ADDRESSES
from nexar.cluster.decisions.peering import PeerDirectory
from nexar.cluster.handshake import AnsweringHandshake, SidecarDialer
from nexar.cluster.membership import Change, Departure, Member, Membership, PinnedNode
from nexar.cluster.node import Node
from nexar.cluster.peer_table import PeerTable
from nexar.config import Config
from nexar.links.router import Router
from nexar.security.authority import Authority, make_key
from nexar.security.certificates import fingerprint
from nexar.transport.base import Buffer, Carrier, Peer
from nexar.transport.memory import MemoryNetwork
from nexar.wire.control import Declined, Introduce, Introduced, Message, Ping, decode, encode
from nexar.wire.frame import Lane
from tests.unit.cluster.decisions.test_peering import members
from tests.unit.cluster.fake_carrier import FakeCarrier, as_carrier


class Arrived:
    def __init__(self, node: int) -> None:
        self.peer = Peer(node, None, True, "10.0.0.1:7")


def come(arrivals: IncomingLimit, *nodes: int) -> list[Carrier]:
    """One carrier of each; all of them find room."""
    made = [cast(Carrier, Arrived(node)) for node in nodes]
    assert [arrivals.add(carrier) for carrier in made] == [None] * len(made)
    return made


def test_the_oldest_of_a_node_goes_when_it_has_too_many() -> None:
    arrivals = IncomingLimit(most=100, most_of_one=2)
    first, other, second = come(arrivals, 1, 2, 1)
    third = cast(Carrier, Arrived(1))
    assert arrivals.add(third) is first
    assert arrivals.listed() == [other, second, third]


def test_the_oldest_of_all_goes_when_there_are_too_many() -> None:
    arrivals = IncomingLimit(most=3, most_of_one=2)
    first, *rest = come(arrivals, 1, 2, 3)
    fourth = cast(Carrier, Arrived(4))
    assert arrivals.add(fourth) is first
    assert arrivals.listed() == [*rest, fourth]


def test_who_has_become_something_else_makes_room() -> None:
    arrivals = IncomingLimit(most=2, most_of_one=1)
    first, _ = come(arrivals, 1, 2)
    assert arrivals.remove(first)
    assert not arrivals.remove(first)
    come(arrivals, 1)
    assert len(arrivals) == 2


def test_there_is_room_for_a_dial_that_reaches_every_address_over_every_transport() -> None:
    come(IncomingLimit(), *[1] * 2 * MAX_ADDRESSES)


KEY, OTHER_KEY = make_key(), make_key()
PIN = fingerprint(KEY.public_key())
MEMBER, LAUNCHER, UNKNOWN_NODE = 7, 8, 9
MEMBERSHIP = Membership("ours", 3, (Member(MEMBER, "here", PIN, {}, frozenset()),), (PinnedNode(LAUNCHER, PIN),))


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("ours")


class From:
    """A carrier that says who is at its other end."""

    def __init__(self, node: int, certificate: bytes | None, scheme: str = "tls", *, verified: bool = True) -> None:
        self.scheme = scheme
        self.peer = Peer(node, certificate, verified, "10.0.0.1:1")


def judge(node: int, certificate: bytes | None, scheme: str = "tls", *, verified: bool = True) -> str | None:
    return pin_mismatch(
        cast(Carrier, From(node, certificate, scheme, verified=verified)), PeerDirectory(99, MEMBERSHIP)
    )


def certificate(authority: Authority, node: int = MEMBER, key: object = KEY) -> bytes:
    return authority.issue(node, key.public_key()).public_bytes(Encoding.DER)  # type: ignore[attr-defined]


def test_a_member_with_the_key_that_is_pinned_is_let_in(authority: Authority) -> None:
    assert judge(MEMBER, certificate(authority)) is None


def test_a_genuine_certificate_for_another_key_is_not_enough(authority: Authority) -> None:
    assert "another key" in (judge(MEMBER, certificate(authority, key=OTHER_KEY)) or "")


def test_a_node_that_is_not_in_the_membership_is_named_with_the_epoch(authority: Authority) -> None:
    reason = judge(UNKNOWN_NODE, certificate(authority, UNKNOWN_NODE)) or ""
    assert "0000000000000009 is not in the membership of epoch 3" in reason


def test_a_launcher_is_known_and_has_no_link(authority: Authority) -> None:
    assert "holds no rank" in (judge(LAUNCHER, certificate(authority, LAUNCHER)) or "")


def test_who_has_not_proven_itself_is_refused_whatever_it_says(authority: Authority) -> None:
    assert "not proven" in (judge(MEMBER, certificate(authority), verified=False) or "")


def test_a_certificate_that_cannot_be_read_is_no_certificate() -> None:
    assert "not readable" in (judge(MEMBER, b"nonsense") or "")


@pytest.mark.parametrize(("scheme", "enough"), [("shm", True), ("memory", True), ("tls", False), ("quic", False)])
def test_without_a_certificate_only_what_proves_by_other_means_is_let_in(scheme: str, enough: bool) -> None:
    assert (judge(MEMBER, None, scheme) is None) == enough


ME, PEER, UNKNOWN = 7, 5, 11


class Dialer(FakeCarrier):
    """A node that dials, and what it receives."""

    scheme = "memory"

    def __init__(self, node: int, *, verified: bool = True) -> None:
        super().__init__()
        self.peer = Peer(node, None, verified, f"10.0.0.{node}:1")
        self.received: list[Message] = []

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        self._check()
        self.received.append(cast(Message, decode(b"".join(body))))

    def introduce(self, **facts: Any) -> None:
        self.say(encode(Introduce(**{"rank": 0, "epoch": 1, **facts})))


class Lines:
    """Takes death lines, unless it has a reason not to."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.taken: list[Carrier] = []

    def why_refused(self, carrier: Carrier, introduce: Introduce) -> str | None:
        return self.reason

    def take(self, dialer: AnsweringHandshake, answer: Introduced) -> None:
        self.taken.append(dialer.carrier)
        dialer.welcome(answer)


class Hall:
    """The acceptor of node ME, which has rank 1."""

    def __init__(self, node: Node, lines: Lines | None = None) -> None:
        self.pairs = PeerTable(Router(node.id, node.config, node.progress), lambda *_: None, None)
        self.refused: list[tuple[str, str]] = []
        about = SimpleNamespace(memory_address_for=lambda peer: f"shm:{peer}", sidecar=None, config=node.config)
        sidecars = SidecarDialer(cast(Any, about))
        self.acceptor = PeerAcceptor(
            cast(Any, about),
            self.pairs,
            sidecars,
            cast(Any, lines),
            lambda address, reason: self.refused.append((address, reason)),
        )

    def know(self, make_directory: PeerDirectory | None = None) -> None:
        with self.pairs.changed:
            self.pairs.move(make_directory or PeerDirectory(ME, members(PEER, ME)))

    def come(self, dialer: Dialer) -> Dialer:
        self.acceptor.carrier_accepted(as_carrier(dialer))
        return dialer


@pytest.fixture
def hall() -> Iterator[Hall]:
    with Node(Config(), MemoryNetwork()) as node:
        yield Hall(node)


def test_who_introduces_itself_rightly_is_welcome_and_notified_where_memory_is_shared(hall: Hall) -> None:
    hall.know()
    dialer = hall.come(Dialer(PEER))
    dialer.introduce()
    assert dialer.received == [Introduced(rank=1, epoch=1, shared_memory=f"shm:{PEER}")]
    pair = hall.pairs.get(PEER)
    assert pair is not None
    assert pair.state.pending  # a link only when the dialer goes on
    assert hall.acceptor.arrivals() == [as_carrier(dialer)]


def test_before_the_membership_is_known_nobody_is_looked_at(hall: Hall) -> None:
    dialer = hall.come(Dialer(PEER))
    assert dialer.sink is None
    assert hall.acceptor.arrivals() == [as_carrier(dialer)]
    hall.know()
    hall.acceptor.receive(as_carrier(dialer), hall.pairs.known())
    dialer.introduce()
    assert isinstance(dialer.received[0], Introduced)


@pytest.mark.parametrize(
    ("dialer", "messages"),
    [(Dialer(PEER, verified=False), "not proven who it is"), (Dialer(UNKNOWN), "not in the membership of epoch 1")],
)
def test_who_is_not_let_in_is_reported_with_the_reason(hall: Hall, dialer: Dialer, messages: str) -> None:
    hall.know()
    hall.come(dialer)
    ((address, reason),) = hall.refused
    assert address == dialer.peer.address
    assert messages in reason
    assert dialer.aborted == reason
    assert hall.acceptor.arrivals() == []


def test_who_claims_another_rank_is_declined(hall: Hall) -> None:
    hall.know()
    dialer = hall.come(Dialer(PEER))
    dialer.introduce(rank=1)
    (answer,) = dialer.received
    assert isinstance(answer, Declined)
    assert "it claims rank 1 at epoch 1" in answer.reason
    assert hall.refused == [(dialer.peer.address, answer.reason)]


def test_who_was_a_member_learns_since_when_it_is_none_and_why(hall: Hall) -> None:
    change = Change(2, left=(Departure(PEER, "it was silent"),))
    hall.know(PeerDirectory(ME, members(PEER, ME)).moved_to(change.apply(members(PEER, ME)), change))
    dialer = hall.come(Dialer(PEER))
    dialer.introduce()
    assert dialer.received == [Declined("it was silent", expelled=2)]


def test_who_says_anything_else_first_is_left(hall: Hall) -> None:
    hall.know()
    dialer = hall.come(Dialer(PEER))
    dialer.say(encode(Ping(1)))
    assert dialer.aborted == "you sent Ping before an introduction"
    assert hall.acceptor.arrivals() == []


# ---------------------------------------------------------------- death lines


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def watched_hall(lines: Lines) -> Iterator[Hall]:
    with Node(Config(), MemoryNetwork()) as node:
        yield Hall(node, lines)


def test_a_death_line_is_declined_where_there_are_none(hall: Hall) -> None:
    hall.know()
    dialer = hall.come(Dialer(PEER))
    dialer.introduce(death_line=True)
    assert dialer.received == [Declined("this node keeps no liveness connections")]


def test_a_death_line_is_taken_where_there_are_any(watched_hall: Hall, lines: Lines) -> None:
    hall = watched_hall
    hall.know()
    dialer = hall.come(Dialer(PEER))
    dialer.introduce(death_line=True)
    assert lines.taken == [as_carrier(dialer)]
    assert dialer.received == [Introduced(rank=1, epoch=1)]
    assert as_carrier(dialer) not in hall.acceptor.arrivals()
    assert hall.pairs.get(PEER) is None  # no link of two comes of it


def test_a_death_line_that_is_not_wanted_is_declined_with_the_reason(watched_hall: Hall, lines: Lines) -> None:
    watched_hall.know()
    lines.reason = "you do not watch me"
    dialer = watched_hall.come(Dialer(PEER))
    dialer.introduce(death_line=True)
    assert dialer.received == [Declined("you do not watch me")]


# ---------------------------------------------------------------- again and again


def test_a_dial_with_a_higher_number_makes_a_new_link_of_the_two_and_ends_the_old_one(hall: Hall) -> None:
    hall.know()
    hall.come(Dialer(PEER)).introduce()
    before = hall.pairs.get(PEER)
    assert before is not None
    hall.come(Dialer(PEER)).introduce(number=2)
    after = hall.pairs.get(PEER)
    assert after is not None
    assert after is not before
    assert after.number == 2
    assert before.link.failure is not None
    assert "it reconnected; frames on the old connection" in str(before.link.failure)


def test_who_dials_without_end_and_sends_nothing_keeps_nobody_out(hall: Hall) -> None:
    hall.know()
    dialers = [hall.come(Dialer(PEER)) for _ in range(MAX_INCOMING_PER_NODE + 2)]
    assert [dialer.aborted is not None for dialer in dialers[:3]] == [True, True, False]
    assert len(hall.acceptor.arrivals()) == MAX_INCOMING_PER_NODE
    assert [reason for _, reason in hall.refused] == ["it has dialed too often without becoming a link"] * 2
    dialers[-1].introduce()
    assert isinstance(dialers[-1].received[0], Introduced)


def test_a_dialer_that_is_displaced_lets_the_next_one_try(hall: Hall) -> None:
    hall.know()
    first = hall.come(Dialer(PEER))
    first.introduce()
    for _ in range(MAX_INCOMING_PER_NODE):
        last = hall.come(Dialer(PEER))
    assert first.aborted is not None
    last.introduce()
    assert isinstance(last.received[0], Introduced)


# ---------------------------------------------------------------- the end


def test_a_closed_node_takes_nobody(hall: Hall) -> None:
    hall.know()
    hall.pairs.closed = True
    dialer = hall.come(Dialer(PEER))
    assert dialer.aborted == "this node is closed"
    assert hall.acceptor.arrivals() == []


def test_who_is_gone_before_it_is_a_link_is_forgotten(hall: Hall) -> None:
    hall.know()
    dialer = hall.come(Dialer(PEER))
    dialer.introduce()
    dialer.lose()
    assert hall.acceptor.arrivals() == []
    pair = hall.pairs.get(PEER)
    assert pair is not None
    assert not pair.state.pending
