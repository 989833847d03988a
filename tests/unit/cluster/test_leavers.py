"""Links to who has closed and is no member any more."""

from typing import Any, cast

from nexar.cluster.leavers import LONGEST_CLOSE, Leavers
from nexar.errors import PeerLost
from nexar.links.link import Link

NOW = 100.0


class Ended:
    """As much of a link as is looked at."""

    def __init__(self, peer: int, failure: Exception | None = None) -> None:
        self.peer = peer
        self.failure = failure


def link(peer: int, **facts: Any) -> Link:
    return cast(Link, Ended(peer, **facts))


def test_a_link_is_kept_until_it_ends() -> None:
    leavers, kept = Leavers(), link(7)
    assert leavers.keep(kept, NOW)
    assert (leavers.has(7), leavers.has(8), leavers.links()) == (True, False, [kept])
    assert leavers.forget(kept)
    assert not leavers.forget(kept), "once"
    assert (leavers.has(7), leavers.due()) == (False, None)


def test_one_that_has_ended_is_not_kept() -> None:
    leavers = Leavers()
    assert not leavers.keep(link(7, failure=PeerLost(node=7, cause="it left")), NOW)
    assert not leavers.has(7)


def test_each_has_as_much_time_as_who_closes_takes_at_most() -> None:
    leavers, first, second = Leavers(), link(7), link(8)
    leavers.keep(first, NOW)
    leavers.keep(second, NOW + 1)
    assert leavers.due() == NOW + LONGEST_CLOSE
    assert leavers.overdue(NOW + LONGEST_CLOSE - 0.1) == []
    assert leavers.overdue(NOW + LONGEST_CLOSE) == [first]
