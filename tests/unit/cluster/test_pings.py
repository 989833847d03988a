"""Pings, and the Pongs that come."""

from typing import Any, cast

from nexar.cluster.pings import Pings
from nexar.errors import PeerLost
from nexar.links.link import Link
from nexar.wire.messages import Goodbye, Message, Ping, Pong


class FakeLink:
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
    return cast(Link, FakeLink(peer, lost=lost))


def said(to: Link) -> list[Message]:
    return cast(Any, to).said


def test_a_ping_is_answered_with_its_number_unless_the_link_is_gone() -> None:
    one = link(7)
    Pings().arrived(one, Ping(3))
    assert said(one) == [Pong(3)]
    Pings().arrived(link(7, lost=True), Ping(3))


def test_a_pong_finds_who_waits_for_it_until_it_is_forgotten() -> None:
    pings, told = Pings(), list[str]()
    first = pings.expect(7, lambda: told.append("first"))
    second = pings.expect(7, lambda: told.append("second"))
    assert first != second
    pings.arrived(link(7), Pong(second))
    pings.arrived(link(7), Pong(first))
    pings.forget(first)
    pings.forget(first)
    pings.arrived(link(7), Pong(first))
    assert told == ["second", "first"]


def test_a_pong_of_somebody_else_or_for_nobody_means_nothing() -> None:
    pings, told = Pings(), list[str]()
    number = pings.expect(7, lambda: told.append("answered"))
    pings.arrived(link(8), Pong(number))
    pings.arrived(link(7), Pong(number + 1))
    pings.arrived(link(7), Goodbye("I leave"))
    assert not told
