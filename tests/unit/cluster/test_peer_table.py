"""Links to who has closed and is no member any more.

The pairs of one node: made once, numbered, moved with the membership.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from nexar.cluster.decisions.peering import NO_RANK, PeerDirectory
from nexar.cluster.membership import Membership
from nexar.cluster.node import Node
from nexar.cluster.peer_table import (
    LONGEST_CLOSE,
    MAX_MISSED_LINKS,
    PeerEntry,
    PeerTable,
    QuietLeavers,
    address_of,
    links_since,
    next_number,
)
from nexar.config import Config
from nexar.errors import PeerLost, UsageError
from nexar.links.link import Link
from nexar.links.router import Router
from nexar.transport.memory import MemoryNetwork
from tests.unit.cluster.decisions.test_peering import member, members
from tests.unit.cluster.fake_carrier import FakeCarrier, as_carrier
from tests.unit.cluster.memory_mesh import soon

NOW = 100.0


class Ended:
    """As much of a link as is looked at."""

    def __init__(self, peer: int, failure: Exception | None = None) -> None:
        self.peer = peer
        self.failure = failure


def link(peer: int, **facts: Any) -> Link:
    return cast(Link, Ended(peer, **facts))


def test_a_link_is_kept_until_it_ends() -> None:
    departed, kept = QuietLeavers(), link(7)
    assert departed.keep(kept, NOW)
    assert (departed.has(7), departed.has(8), departed.links()) == (True, False, [kept])
    assert departed.forget(kept)
    assert not departed.forget(kept), "once"
    assert (departed.has(7), departed.due()) == (False, None)


def test_one_that_has_ended_is_not_kept() -> None:
    departed = QuietLeavers()
    assert not departed.keep(link(7, failure=PeerLost(node=7, cause="it left")), NOW)
    assert not departed.has(7)


def test_each_has_as_much_time_as_who_closes_takes_at_most() -> None:
    departed, first, second = QuietLeavers(), link(7), link(8)
    departed.keep(first, NOW)
    departed.keep(second, NOW + 1)
    assert departed.due() == NOW + LONGEST_CLOSE
    assert departed.overdue(NOW + LONGEST_CLOSE - 0.1) == []
    assert departed.overdue(NOW + LONGEST_CLOSE) == [first]


ME, LOWER, HIGHER, UNKNOWN = 7, 5, 9, 11


@pytest.fixture
def pairs() -> Iterator[PeerTable]:
    with Node(Config(), MemoryNetwork()) as node:
        yield PeerTable(Router(node.id, node.config, node.progress), lambda *_: None, None)


def make_directory(membership: Membership | None = None) -> PeerDirectory:
    return PeerDirectory(ME, membership or members(LOWER, ME, HIGHER))


def known(pairs: PeerTable) -> PeerDirectory:
    with pairs.changed:
        pairs.move(make_directory())
    return pairs.known()


def locked(pairs: PeerTable, act: Callable[[], Any]) -> Any:
    with pairs.changed:
        return act()


def rank_of(pair: PeerEntry) -> int | None:
    """As errors of its link say."""
    return pair.link._state.rank


def test_before_the_membership_is_known_there_is_nothing_to_ask(pairs: PeerTable) -> None:
    with pytest.raises(UsageError, match="does not know its membership yet"):
        pairs.known()


def test_a_pair_is_made_once_and_knows_rank_and_address(pairs: PeerTable) -> None:
    around = known(pairs)
    assert pairs.get(HIGHER) is None
    made = locked(pairs, lambda: pairs.of(around, member(HIGHER)))
    assert locked(pairs, lambda: pairs.of(around, member(HIGHER))) is made
    assert pairs.get(HIGHER) is made
    assert pairs.listed() == [made]
    assert (made.number, made.link.peer, rank_of(made)) == (1, HIGHER, 2)


def test_who_dialed_gets_a_pair_if_it_has_a_place(pairs: PeerTable) -> None:
    known(pairs)
    welcome, stranger = FakeCarrier(), FakeCarrier()
    welcome.peer = welcome.peer.__class__(HIGHER, None, True, "10.0.0.9:1")
    stranger.peer = stranger.peer.__class__(UNKNOWN, None, True, "10.0.0.11:1")
    made = locked(pairs, lambda: pairs.of_carrier(as_carrier(welcome)))
    assert made is pairs.get(HIGHER)
    assert locked(pairs, lambda: pairs.of_carrier(as_carrier(stranger))) is None
    pairs.closed = True
    assert locked(pairs, lambda: pairs.of_carrier(as_carrier(welcome))) is made
    welcome.peer = welcome.peer.__class__(LOWER, None, True, "10.0.0.5:1")
    assert locked(pairs, lambda: pairs.of_carrier(as_carrier(welcome))) is None  # no new ones now


def test_a_pair_that_begins_anew_has_another_link_and_the_next_number(pairs: PeerTable) -> None:
    around = known(pairs)
    first = locked(pairs, lambda: pairs.of(around, member(LOWER)))
    second = locked(pairs, lambda: pairs.replace(first, 2))
    assert second is pairs.get(LOWER)
    assert second.link is not first.link
    assert (second.number, second.state.open) == (2, False)


def test_who_has_lost_its_place_gets_no_new_link(pairs: PeerTable) -> None:
    around = known(pairs)
    first = locked(pairs, lambda: pairs.of(around, member(LOWER)))
    pairs.directory = make_directory(members(ME, HIGHER, epoch=2))
    assert locked(pairs, lambda: pairs.replace(first, 2)) is None
    assert pairs.get(LOWER) is None


def test_when_members_change_who_stays_gets_its_new_rank_and_who_left_its_link_back(pairs: PeerTable) -> None:
    around = known(pairs)
    gone, stays = (locked(pairs, lambda node=node: pairs.of(around, member(node))) for node in (LOWER, HIGHER))
    ended = locked(pairs, lambda: pairs.move(make_directory(members(ME, HIGHER, epoch=2))))
    assert ended == [gone.link]
    assert pairs.listed() == [stays]
    assert rank_of(stays) == 1
    assert pairs.known().membership.epoch == 2


def test_a_joiner_has_a_link_before_it_has_a_rank(pairs: PeerTable) -> None:
    known(pairs)
    pairs.directory = pairs.known().with_joiners([member(UNKNOWN)])
    made = locked(pairs, lambda: pairs.of(pairs.known(), member(UNKNOWN)))
    assert rank_of(made) == NO_RANK
    locked(pairs, lambda: pairs.move(make_directory(members(LOWER, ME, HIGHER, UNKNOWN, epoch=2))))
    assert (pairs.get(UNKNOWN), rank_of(made)) == (made, 3)


def test_who_waits_wakes_with_the_change_and_is_notified_when_the_node_closes(pairs: PeerTable) -> None:
    facts: list[str] = []

    def change() -> None:
        with pairs.changed:
            facts.append("it came")
            pairs.changed.notify_all()

    threading.Timer(0.01, change).start()
    assert locked(pairs, lambda: pairs.wait(lambda: bool(facts), soon()))
    assert not locked(pairs, lambda: pairs.wait(lambda: False, time.monotonic() + 0.01))

    def close() -> None:
        with pairs.changed:
            pairs.closed = True
            pairs.changed.notify_all()

    threading.Timer(0.01, close).start()
    with pytest.raises(UsageError, match="this node is closed: its `with` block has ended"):
        locked(pairs, lambda: pairs.wait(lambda: False, soon()))
    with pytest.raises(UsageError, match="closed"):
        locked(pairs, lambda: pairs.of(make_directory(), member(LOWER)))


def test_the_address_for_people_is_the_most_promising_one() -> None:
    assert address_of(member(LOWER)) == "10.0.0.5:1"
    assert address_of(member(LOWER).__class__(LOWER, "here", bytes(32), {"quic": (), "tls": ("a:1", "b:1")})) == "a:1"
    assert address_of(member(LOWER).__class__(LOWER, "here", bytes(32), {})) is None


def test_numbers_of_links_begin_anew_where_the_wire_has_no_higher_ones() -> None:
    last = 2**32 - 1
    assert next_number(1) == 2
    assert next_number(last) == 0
    assert links_since(next_number(last), last) == 1
    assert links_since(5, 5) == 0


@pytest.mark.parametrize("number", [4, 0, 2**32 - 1, 2**31, 2**32 + 6, 2**70, -1])
def test_what_is_no_number_of_a_later_link_is_far_away(number: int) -> None:
    assert links_since(number, 5) > MAX_MISSED_LINKS
