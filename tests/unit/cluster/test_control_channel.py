"""Who is connected gets what it is connected for; the rest goes to the rest."""

from typing import Any, cast

from nexar.cluster.control_channel import ControlChannel, LinkLost, MeshEvent
from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.wire.control import Goodbye, Message, Ping, Pong

LINK = cast(Link, object())


class Room:
    def __init__(self) -> None:
        self.received: list[Any] = []

    def receive(self, link: Link, message: Message) -> None:
        assert link is LINK
        self.received.append(message)

    def happen(self, event: MeshEvent) -> None:
        self.received.append(event)


def test_each_kind_finds_the_room_that_is_connected_for_it() -> None:
    pings, farewells, rest = Room(), Room(), Room()
    board = ControlChannel(rest.receive)
    board.connect(pings.receive, Ping, Pong)
    board.connect(farewells.receive, Goodbye)
    for message in (Ping(1), Goodbye("it left"), Pong(1)):
        board.control(LINK, message)
    assert (pings.received, farewells.received, rest.received) == ([Ping(1), Pong(1)], [Goodbye("it left")], [])


def test_a_message_without_a_handler_goes_to_the_rest() -> None:
    rest = Room()
    board = ControlChannel(rest.receive)
    board.control(LINK, Ping(2))
    assert rest.received == [Ping(2)]


def test_events_are_handled_once_there_is_a_handler() -> None:
    runtime = Room()
    board = ControlChannel(Room().receive)
    board.post(LinkLost(LINK, NexarError("too early")))
    board.connect_events(runtime.happen)
    event = LinkLost(LINK, NexarError("it is gone"))
    board.post(event)
    assert runtime.received == [event]
