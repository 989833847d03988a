"""Connections that others dialed, one by one: each becomes something, or is told why not."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nexar.cluster.arrivals import MAX_OF_ONE_NODE
from nexar.cluster.change import Change, Departure
from nexar.cluster.circle import Circle
from nexar.cluster.introduction import Answering
from nexar.cluster.node import Node
from nexar.cluster.pairs import Pairs
from nexar.cluster.reception import Reception
from nexar.cluster.sidecars import Sidecars
from nexar.config import Config
from nexar.links.router import Router
from nexar.transport.base import Buffer, Carrier, Peer
from nexar.transport.memory import MemoryNetwork
from nexar.wire.frame import Lane
from nexar.wire.messages import Declined, Introduce, Introduced, Message, Ping, decode, encode
from tests.unit.cluster.fake_carrier import FakeCarrier, as_carrier
from tests.unit.cluster.test_circle import members

ME, PEER, STRANGER = 7, 5, 11


class Dialer(FakeCarrier):
    """A node that dials, and what it hears."""

    scheme = "memory"

    def __init__(self, node: int, *, verified: bool = True) -> None:
        super().__init__()
        self.peer = Peer(node, None, verified, f"10.0.0.{node}:1")
        self.heard: list[Message] = []

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        self._check()
        self.heard.append(cast(Message, decode(b"".join(body))))

    def introduce(self, **facts: Any) -> None:
        self.say(encode(Introduce(**{"rank": 0, "epoch": 1, **facts})))


class Lines:
    """Takes death lines, unless it has a reason not to."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.taken: list[Carrier] = []

    def why_not(self, carrier: Carrier, introduce: Introduce) -> str | None:
        return self.reason

    def take(self, dialer: Answering, answer: Introduced) -> None:
        self.taken.append(dialer.carrier)
        dialer.welcome(answer)


class Hall:
    """The reception of node ME, which has rank 1."""

    def __init__(self, node: Node) -> None:
        self.pairs = Pairs(Router(node.id, node.config, node.progress), lambda *_: None, None)
        self.refused: list[tuple[str, str]] = []
        about = SimpleNamespace(memory_address_for=lambda peer: f"shm:{peer}", sidecar=None, config=node.config)
        sidecars = Sidecars(cast(Any, about))
        self.reception = Reception(
            cast(Any, about), self.pairs, sidecars, lambda address, reason: self.refused.append((address, reason))
        )

    def know(self, circle: Circle | None = None) -> None:
        with self.pairs.changed:
            self.pairs.move(circle or Circle(ME, members(PEER, ME)))

    def come(self, dialer: Dialer) -> Dialer:
        self.reception.carrier_accepted(as_carrier(dialer))
        return dialer


@pytest.fixture
def hall() -> Iterator[Hall]:
    with Node(Config(), MemoryNetwork()) as node:
        yield Hall(node)


def test_who_introduces_itself_rightly_is_welcome_and_told_where_memory_is_shared(hall: Hall) -> None:
    hall.know()
    dialer = hall.come(Dialer(PEER))
    dialer.introduce()
    assert dialer.heard == [Introduced(rank=1, epoch=1, shared_memory=f"shm:{PEER}")]
    pair = hall.pairs.get(PEER)
    assert pair is not None
    assert pair.state.pending  # a link only when the dialer goes on
    assert hall.reception.arrivals() == [as_carrier(dialer)]


def test_before_the_membership_is_known_nobody_is_looked_at(hall: Hall) -> None:
    dialer = hall.come(Dialer(PEER))
    assert dialer.sink is None
    assert hall.reception.arrivals() == [as_carrier(dialer)]
    hall.know()
    hall.reception.receive(as_carrier(dialer), hall.pairs.known())
    dialer.introduce()
    assert isinstance(dialer.heard[0], Introduced)


@pytest.mark.parametrize(
    ("dialer", "words"),
    [(Dialer(PEER, verified=False), "not proven who it is"), (Dialer(STRANGER), "not in the membership of epoch 1")],
)
def test_who_is_not_let_in_is_reported_with_the_reason(hall: Hall, dialer: Dialer, words: str) -> None:
    hall.know()
    hall.come(dialer)
    ((address, reason),) = hall.refused
    assert address == dialer.peer.address
    assert words in reason
    assert dialer.aborted == reason
    assert hall.reception.arrivals() == []


def test_who_claims_another_rank_is_declined(hall: Hall) -> None:
    hall.know()
    dialer = hall.come(Dialer(PEER))
    dialer.introduce(rank=1)
    (answer,) = dialer.heard
    assert isinstance(answer, Declined)
    assert "it claims rank 1 at epoch 1" in answer.reason
    assert hall.refused == [(dialer.peer.address, answer.reason)]


def test_who_was_a_member_hears_since_when_it_is_none_and_why(hall: Hall) -> None:
    change = Change(2, left=(Departure(PEER, "it was silent"),))
    hall.know(Circle(ME, members(PEER, ME)).moved_to(change.apply(members(PEER, ME)), change))
    dialer = hall.come(Dialer(PEER))
    dialer.introduce()
    assert dialer.heard == [Declined("it was silent", expelled=2)]


def test_who_says_anything_else_first_is_left(hall: Hall) -> None:
    hall.know()
    dialer = hall.come(Dialer(PEER))
    dialer.say(encode(Ping(1)))
    assert dialer.aborted == "you said Ping before introducing yourself"
    assert hall.reception.arrivals() == []


# ---------------------------------------------------------------- death lines


def test_a_death_line_is_taken_where_there_are_any(hall: Hall) -> None:
    hall.know()
    dialer = hall.come(Dialer(PEER))
    dialer.introduce(death_line=True)
    assert dialer.heard == [Declined("this node keeps no death lines")]
    lines = hall.reception.death_lines = Lines()
    dialer = hall.come(Dialer(PEER))
    dialer.introduce(death_line=True)
    assert lines.taken == [as_carrier(dialer)]
    assert dialer.heard == [Introduced(rank=1, epoch=1)]
    assert as_carrier(dialer) not in hall.reception.arrivals()
    assert hall.pairs.get(PEER) is None  # no link of two comes of it


def test_a_death_line_that_is_not_wanted_is_declined_with_the_reason(hall: Hall) -> None:
    hall.know()
    lines = hall.reception.death_lines = Lines()
    lines.reason = "you do not watch me"
    dialer = hall.come(Dialer(PEER))
    dialer.introduce(death_line=True)
    assert dialer.heard == [Declined("you do not watch me")]


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
    assert "connected anew" in str(before.link.failure)


def test_who_dials_without_end_and_never_says_a_word_keeps_nobody_out(hall: Hall) -> None:
    hall.know()
    dialers = [hall.come(Dialer(PEER)) for _ in range(MAX_OF_ONE_NODE + 2)]
    assert [dialer.aborted is not None for dialer in dialers[:3]] == [True, True, False]
    assert len(hall.reception.arrivals()) == MAX_OF_ONE_NODE
    assert [reason for _, reason in hall.refused] == ["it has dialed too often without becoming a link"] * 2
    dialers[-1].introduce()
    assert isinstance(dialers[-1].heard[0], Introduced)


def test_a_dialer_that_is_displaced_lets_the_next_one_try(hall: Hall) -> None:
    hall.know()
    first = hall.come(Dialer(PEER))
    first.introduce()
    for _ in range(MAX_OF_ONE_NODE):
        last = hall.come(Dialer(PEER))
    assert first.aborted is not None
    last.introduce()
    assert isinstance(last.heard[0], Introduced)


# ---------------------------------------------------------------- the end


def test_a_closed_node_takes_nobody(hall: Hall) -> None:
    hall.know()
    hall.pairs.closed = True
    dialer = hall.come(Dialer(PEER))
    assert dialer.aborted == "this node is closed"
    assert hall.reception.arrivals() == []


def test_who_is_gone_before_it_is_a_link_is_forgotten(hall: Hall) -> None:
    hall.know()
    dialer = hall.come(Dialer(PEER))
    dialer.introduce()
    dialer.lose()
    assert hall.reception.arrivals() == []
    pair = hall.pairs.get(PEER)
    assert pair is not None
    assert not pair.state.pending
