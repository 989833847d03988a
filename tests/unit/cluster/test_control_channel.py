"""Who is connected gets what it is connected for; the rest goes to the rest."""

from typing import Any, cast

from nexar.cluster.control_channel import ControlChannel
from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.wire.control import Goodbye, Message, Ping, Pong

LINK = cast(Link, object())


class Room:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def hear(self, link: Link, message: Message) -> None:
        assert link is LINK
        self.heard.append(message)

    def lose(self, link: Link, error: NexarError) -> None:
        assert link is LINK
        self.heard.append(error)


def test_each_kind_finds_the_room_that_is_connected_for_it() -> None:
    board, pings, farewells, rest = ControlChannel(), Room(), Room(), Room()
    board.rest = rest.hear
    board.connect(pings.hear, Ping, Pong)
    board.connect(farewells.hear, Goodbye)
    for message in (Ping(1), Goodbye("it left"), Pong(1)):
        board.control(LINK, message)
    assert (pings.heard, farewells.heard, rest.heard) == ([Ping(1), Pong(1)], [Goodbye("it left")], [])


def test_what_nobody_is_connected_for_goes_to_the_rest_and_is_dropped_without_one() -> None:
    board, rest = ControlChannel(), Room()
    board.control(LINK, Ping(1))
    board.rest = rest.hear
    board.control(LINK, Ping(2))
    assert rest.heard == [Ping(2)]


def test_a_lost_link_is_told_to_who_wants_to_know() -> None:
    board, lookout = ControlChannel(), Room()
    board.lost(LINK, NexarError("too early"))
    board.on_lost = lookout.lose
    error = NexarError("it is gone")
    board.lost(LINK, error)
    assert lookout.heard == [error]
