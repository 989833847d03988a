"""What waits at which neighbour, and who is told that there is room."""

from typing import Any, cast

from nexar.errors import PeerLost
from nexar.links.relay.hop import RETURN_BYTES, Hop, Waiting
from nexar.links.relay.ways import Step, Thanks, Ways


class Around:
    """One neighbour has a link, one is about to have one, all others are none."""

    def __init__(self) -> None:
        self.links: dict[int, Any] = {1: Link(1)}
        self.opening: list[int] = []

    def link(self, node: int) -> Any:
        return self.links.get(node)

    def open(self, node: int) -> bool:
        self.opening.append(node)
        return node == 2


class Link:
    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.failure: PeerLost | None = None


def test_a_neighbour_is_opened_once_and_who_is_none_is_no_way() -> None:
    around = Around()
    ways = Ways(cast(Any, around))
    assert ways.over(1) is ways.get(1) is not None
    assert ways.over(2) is ways.over(2) is not None
    assert ways.over(3) is None
    assert around.opening == [2, 3]


def test_what_waits_for_a_link_goes_when_it_is_there() -> None:
    around = Around()
    ways = Ways(cast(Any, around))
    hop = ways.over(2)
    assert hop is not None
    ways.put(hop, Waiting(1, b"word", None))
    assert ways.next() is None
    around.links[2] = Link(2)
    ways.wake(hop)
    assert ways.next() == Step(around.links[2], (b"word",), None)
    assert ways.next() is None
    assert not ways.is_busy


def test_a_link_that_is_lost_is_no_way() -> None:
    around = Around()
    ways = Ways(cast(Any, around))
    hop = ways.over(1)
    around.links[1].failure = PeerLost(node=1, cause="cut")
    assert hop is not None
    assert ways.over(1) is None
    assert ways.of(around.links[1]) is hop
    assert ways.of(cast(Any, Link(1))) is None
    assert ways.lost() == [1]


def relaying() -> tuple[Ways, Hop, Any]:
    """Something of node 5 waits to go on over node 1. Also by whom it came."""
    ways = Ways(cast(Any, Around()))
    came, body = ways.behind(cast(Any, Link(5))), bytes(RETURN_BYTES)
    hop = ways.over(1)
    assert hop is not None
    came.took_in(1, len(body))
    ways.put(hop, Waiting(2, body, came))
    return ways, hop, came


def test_who_sent_it_is_thanked_when_it_has_gone_on() -> None:
    ways, _, came = relaying()
    step = ways.next()
    assert step is not None
    assert step.thanks == Thanks(cast(Any, came.link), 1, RETURN_BYTES)


def test_who_sent_what_could_not_go_on_is_thanked_too_and_sources_are_known() -> None:
    ways, hop, came = relaying()
    hop.remember((0, 5, 9))
    assert ways.forget(1) == [(0, 5, 9)]
    assert ways.forget(1) == []
    step = ways.next()
    assert step is not None
    assert (step.parts, step.thanks) == ((), Thanks(cast(Any, came.link), 1, RETURN_BYTES))
