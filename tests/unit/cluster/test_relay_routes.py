"""Links over other nodes, on memory: how they come about, and what they survive.

Whoever on the way closes or dies: those that stay receive everything, over a connection where no way is left.
"""

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from nexar.cluster.control_channel import MeshEvent, RouteLost
from nexar.cluster.decisions.peering import PeerDirectory
from nexar.cluster.membership import Change, Departure, Membership
from nexar.errors import PeerLost, UsageError
from nexar.links.carrier_selection import is_relayed
from nexar.links.link import Link
from nexar.links.relay.carrier import RelayedCarrier
from nexar.links.relay.forwarding import RefusedSource
from nexar.testing.faults import LinkCut, LinkStall
from nexar.types import format_node
from nexar.wire.frame import Space
from nexar.wire.relay import RelayHeader, RelayKind
from tests.ranks import on_every
from tests.unit.cluster.memory_mesh import eventually, soon
from tests.unit.cluster.ring import NUMBERED, TALK, Ring

LARGE = 3_000_000


# ---------------------------------------------------------------- how it comes about


def test_who_is_no_neighbour_is_reached_over_others_without_a_connection(four: Ring) -> None:
    four.send(0, 2, *NUMBERED)
    assert four.receive(2, 0, 300) == NUMBERED
    assert is_relayed(four.linked_to(0, 2).schemes)
    assert is_relayed(four.linked_to(2, 0).schemes)
    assert four.route(0, 2) == [0, 1, 2]
    assert four.relayed_by(1) >= 300


def test_both_may_begin_at_the_same_moment_and_have_one_link(four: Ring) -> None:
    def talk(rank: int) -> list[bytes]:
        four.send(rank, 2 - rank, *NUMBERED)
        return four.receive(rank, 2 - rank, 300)

    assert on_every([0, 2], talk) == [NUMBERED, NUMBERED]
    assert on_every([0] * 8, lambda rank: four.link(rank, 2)) == [four.linked_to(0, 2)] * 8


def test_a_large_message_travels_in_pieces_and_a_small_one_overtakes_it_at_most_by_a_window(six: Ring) -> None:
    large = np.random.default_rng(1).bytes(LARGE)
    on_every([0, 3], lambda rank: six.send(0, 3, large) if rank == 0 else _expect(six, large))
    (stats,) = [six.linked_to(0, 3).stats()]
    assert stats["relay.payload_bytes_sent"] == LARGE
    assert stats["relay.hops"] == 3


def _expect(ring: Ring, large: bytes) -> None:
    assert ring.receive(3, 0) == [large]


def test_neighbours_are_dialed_and_joiners_too(four: Ring) -> None:
    assert four.link(0, 1).schemes == ("memory",)
    assert four.meshes[0].relay_routes.is_neighbour(four.nodes[3].id)
    assert not four.meshes[0].relay_routes.is_neighbour(four.nodes[2].id)
    assert four.meshes[0].relay_routes.is_neighbour(12345)  # holds no rank


def test_control_may_dial_anyone_and_the_link_stays_the_same(four: Ring) -> None:
    four.send(0, 2, b"over others")
    link = four.meshes[0].dial(four.nodes[2].id, soon())
    assert link is four.linked_to(0, 2)
    assert set(link.schemes) == {"memory", "relay"}
    four.send(0, 2, b"straight")
    assert four.receive(2, 0, 2) == [b"over others", b"straight"]
    assert link.failure is None


# ---------------------------------------------------------------- what it survives


def test_a_dead_hop_is_gone_round_and_nothing_is_lost_or_doubled(four: Ring) -> None:
    four.close_ring()
    four.send(0, 2, *NUMBERED[:100])
    four.linked_to(0, 1).lose("it is gone")
    four.send(0, 2, *NUMBERED[100:])
    assert four.receive(2, 0, 300) == NUMBERED
    assert four.route(0, 2) == [0, 3, 2]
    assert four.linked_to(0, 2).failure is None


@pytest.mark.parametrize("frames", [1, 20, 150])
def test_a_hop_that_dies_far_away_is_gone_round(six: Ring, frames: int) -> None:
    six.close_ring()
    six.faults.add(six.on_way(LinkCut, 1, 2, after_frames=frames))
    six.send(0, 3, *NUMBERED)
    assert six.receive(3, 0, 300) == NUMBERED
    assert six.route(0, 3) == [0, 5, 4, 3]


def test_a_hop_that_dies_in_the_middle_of_a_large_message_is_gone_round(six: Ring) -> None:
    large = np.random.default_rng(2).bytes(LARGE)
    six.close_ring()
    six.faults.add(six.on_way(LinkCut, 2, 3, after_frames=20))
    on_every([0, 3], lambda rank: six.send(0, 3, large) if rank == 0 else _expect(six, large))
    assert six.linked_to(0, 3).stats()["relay.resent"] > 0


def test_what_dies_inside_a_hop_that_says_nothing_is_asked_for_and_sent_again(
    four: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way from rank 1 to rank 2 is silent: what rank 1 passes on is gone. Then the connection ends."""
    monkeypatch.setattr("nexar.links.relay.relay.FIRST_PROBE", 0.05)
    four.close_ring()
    four.faults.add(four.on_way(LinkStall, 1, 2))
    four.send(0, 2, *NUMBERED)
    eventually(lambda: four.relayed_by(1) >= 300, "all of it at rank 1")
    four.linked_to(1, 2).lose("it is gone")
    four.faults.clear()
    assert four.receive(2, 0, 300) == NUMBERED


def test_after_a_change_routes_follow_the_new_membership(six: Ring) -> None:
    six.close_ring()
    six.send(0, 3, b"before")
    change = Change(2, left=(Departure(six.nodes[1].id, "it left"),))
    for rank in (0, 2, 3, 4, 5):
        six.meshes[rank].adopt(change.apply(six.membership), change)
    assert six.meshes[0].relay_routes.is_neighbour(six.nodes[2].id)
    six.send(0, 3, b"after")  # as ranks 0 and 2 of five
    assert six.receive(3, 0, 2) == [b"before", b"after"]
    assert six.route(0, 3) == [0, 2, 3]


def test_what_comes_from_a_member_of_an_epoch_that_is_not_here_yet_is_kept() -> None:
    """A fourth joins the ring of three: rank 1, its only non-neighbour, learns of it last, and is spoken to before."""
    ring = Ring(4, adopt=False)
    three = Membership("ours", 1, ring.membership.members[:3])
    for mesh in ring.meshes[:3]:
        mesh.adopt(three)
    on_every([0, 1, 2], lambda rank: ring.link(rank, (rank + 1) % 3))
    four = Change(2, joined=ring.membership.members[3:]).apply(three)
    for rank in (0, 2, 3):
        ring.meshes[rank].adopt(four)
    ring.send(3, 1, b"early")
    eventually(lambda: ring.meshes[1].relay_routes.relay.in_use, "the word at rank 1")
    ring.meshes[1].adopt(four)
    assert ring.receive(1, 3) == [b"early"]
    ring.close()


def test_of_a_route_all_is_read_from_one_membership(six: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 leaves in the middle of it: the ranks of one membership are no places in the other."""
    pairs, nodes = six.meshes[0]._peers, [node.id for node in six.nodes]
    without = PeerDirectory(nodes[0], Change(2, left=(Departure(nodes[1], "it left"),)).apply(six.membership))
    read = iter([pairs.known()])
    monkeypatch.setattr(pairs, "known", lambda: next(read, without))
    way = six.meshes[0].relay_routes.route(nodes[3], frozenset())
    assert way == tuple(nodes[:4])


def test_who_reached_the_other_over_others_is_believed_when_it_asks_over_the_connection_they_have(
    four: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 begins a link over others, and at the same moment rank 0 connects to it."""
    monkeypatch.setattr("nexar.links.relay.relay.FIRST_PROBE", 0.05)
    four.close_ring()
    four.faults.add(four.on_way(LinkStall, 2, 1))
    four.send(2, 0, *NUMBERED)
    four.meshes[0].dial(four.nodes[2].id, soon())
    four.faults.clear()
    assert four.receive(0, 2, 300) == NUMBERED
    assert four.linked_to(0, 2).failure is four.linked_to(2, 0).failure is None


def first_message(ring: Ring, source: int, to: int, *, over: int, epoch: int = 1) -> RelayHeader:
    ids = [ring.nodes[rank].id for rank in (source, over, to)]
    return RelayHeader(RelayKind.FRAME, 2, 1, epoch, 0, 0, tuple(ids))


def test_who_is_a_joiner_here_and_a_member_there_is_waited_for_and_not_dialed() -> None:
    ring = Ring(4, adopt=False)
    relaying = ring.meshes[1].relay_routes
    ring.meshes[1].adopt(Membership("ours", 1, ring.membership.members[:3]))
    ring.meshes[1].expect(ring.membership.members[3:])
    ring.meshes[3].adopt(ring.membership)
    message = first_message(ring, 3, 1, over=0, epoch=2)
    assert relaying.accept_link(message) is RefusedSource.NOT_YET
    assert not relaying.investigate(message)
    assert ring.meshes[1].links() == {}
    ring.close()


def test_a_neighbour_that_is_found_out_of_reach_while_its_message_is_handled_is_believed(four: Ring) -> None:
    relaying, message = four.meshes[0].relay_routes, first_message(four, 1, 0, over=3)
    four.refuse_dials(0, 1)
    assert relaying.accept_link(message) is RefusedSource.NOT_YET
    with pytest.raises(PeerLost):
        four.meshes[0].dial(four.nodes[1].id, soon())
    assert relaying.investigate(message)
    assert isinstance(relaying.accept_link(message), RelayedCarrier)
    assert not relaying.wants(four.nodes[1].id)
    four.faults.clear()


# ---------------------------------------------------------------- neighbours that cannot reach each other


@pytest.fixture
def mesh_of_three() -> Iterator[Ring]:
    made = Ring(3)  # a ring of three is a full mesh
    made.close_ring()
    yield made
    made.close()


def test_a_neighbour_whose_link_is_lost_is_reached_over_a_third(mesh_of_three: Ring) -> None:
    ring = mesh_of_three
    assert ring.meshes[0].relay_routes.detour(ring.nodes[1].id) is None  # nothing is wrong with their own
    ring.faults.add(ring.on_way(LinkCut, 0, 1))
    ring.linked_to(0, 1).lose("no answer")
    link = ring.meshes[0].relay_routes.detour(ring.nodes[1].id)
    assert link is not None
    assert link is ring.linked_to(0, 1)
    assert is_relayed(link.schemes)
    assert ring.meshes[0].relay_routes.detour(ring.nodes[1].id) is link
    assert not ring.meshes[0].relay_routes.wants(ring.nodes[1].id)
    links, first = ring.meshes[1].links, ring.nodes[0].id
    eventually(lambda: first in links() and is_relayed(links()[first].schemes), "the other end")
    talks = [ring.meshes[rank].router.open(TALK + 1) for rank in (0, 1)]
    ring.link(0, 1).post_send(TALK + 1, memoryview(b"over rank 2"))
    posted = talks[1].post(None, source=ring.nodes[0].id, space=Space.UNTAGGED, tag=0)
    ring.nodes[1].progress.wait([posted], soon())
    assert bytes(posted.into or b"") == b"over rank 2"
    assert ring.route(0, 1) == [0, 2, 1]
    assert ring.route(1, 0) == [1, 2, 0]


def test_nothing_goes_over_a_neighbour_that_is_out_of_reach(six: Ring) -> None:
    """Rank 0 has lost 1 and speaks to it over others; to 2 it goes the other way round, too."""
    six.close_ring()
    six.refuse_dials(0, 1)
    six.linked_to(0, 1).lose("no answer")
    assert six.meshes[0].relay_routes.detour(six.nodes[1].id) is not None
    assert six.route(0, 1) == [0, 5, 4, 3, 2, 1]
    six.send(0, 2, *NUMBERED)
    assert six.receive(2, 0, 300) == NUMBERED
    assert six.route(0, 2) == [0, 5, 4, 3, 2]
    assert not six.meshes[0].relay_routes.open(six.nodes[1].id)


def test_without_a_third_there_is_no_detour() -> None:
    pair = Ring(2)
    pair.link(0, 1).lose("no answer")
    assert pair.meshes[0].relay_routes.detour(pair.nodes[1].id) is None
    assert pair.meshes[0].relay_routes.detour(12345) is None
    pair.close()


def test_without_any_way_the_two_connect_and_nothing_is_lost_or_doubled(four: Ring) -> None:
    four.close_ring()
    four.send(0, 2, *NUMBERED[:100])
    link = four.linked_to(0, 2)
    four.linked_to(0, 1).lose("it is gone")
    four.linked_to(0, 3).lose("it is gone")
    four.send(0, 2, *NUMBERED[100:])
    four.send(2, 0, *NUMBERED)
    assert four.receive(2, 0, 300) == NUMBERED
    assert four.receive(0, 2, 300) == NUMBERED
    assert four.linked_to(0, 2) is link
    assert set(link.schemes) == {"memory", "relay"}
    assert four.meshes[0].relay_routes.shortcuts == 1
    assert four.meshes[0].relay_routes.stats() == {"passed_on": 0, "refused": 0, "dropped": 0, "shortcuts": 1}


@pytest.mark.parametrize("leaving", [(1, 4), (2, 5), (1, 2, 4, 5)])
def test_hops_may_close_at_any_time_and_those_that_stay_receive_everything(six: Ring, leaving: tuple[int, ...]) -> None:
    six.close_ring()
    six.send(0, 3, *NUMBERED[:100])
    six.send(3, 0, *NUMBERED[:100])

    def act(rank: int) -> list[bytes]:
        if rank in leaving:
            six.meshes[rank].settle(lambda _: False)
            six.meshes[rank].close()
            return []
        six.send(rank, 3 - rank, *NUMBERED[100:])
        return six.receive(rank, 3 - rank, 300)

    received = on_every([0, 3, *leaving], act)
    assert received[:2] == [NUMBERED, NUMBERED]
    assert six.linked_to(0, 3).failure is None


def test_who_settles_and_closes_has_been_received_whatever_becomes_of_the_hops(six: Ring) -> None:
    """What rank 0 said is swallowed on its way: rank 1 passes it on to nobody, and then that connection ends."""
    six.close_ring()
    six.faults.add(six.on_way(LinkStall, 1, 2))
    six.send(0, 3, *NUMBERED)
    eventually(lambda: six.relayed_by(1) >= 300, "all of it at rank 1")

    def act(what: str) -> None:
        if what == "close":
            six.meshes[0].settle(lambda _: False)
            six.meshes[0].close()
        else:
            six.linked_to(1, 2).lose("it is gone")
            six.linked_to(4, 5).lose("it is gone")

    on_every(["close", "lose"], act)
    assert six.receive(3, 0, 300) == NUMBERED
    six.faults.clear()


def test_nobody_waits_for_who_needs_nothing_any_more(six: Ring) -> None:
    six.close_ring()
    six.faults.add(six.on_way(LinkStall, 0, 1))
    six.send(0, 3, b"too late")
    six.meshes[0].settle(lambda node: node == six.nodes[3].id)
    assert not six.talks[3].post(None, source=six.nodes[0].id, space=Space.UNTAGGED, tag=0).done
    six.linked_to(0, 1).abort("it would take nothing when it is closed")
    six.faults.clear()


def test_a_node_that_nothing_drives_any_more_waits_for_nobody(four: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise UsageError("a forked child")

    four.close_ring()
    four.faults.add(four.on_way(LinkStall, 0, 1))
    four.send(0, 2, b"perhaps")
    monkeypatch.setattr(four.nodes[0].progress, "check", check)
    four.meshes[0].settle(lambda _: False)
    monkeypatch.undo()
    four.linked_to(0, 1).abort("it would take nothing when it is closed")
    four.faults.clear()


def test_without_any_way_and_any_connection_the_link_is_lost_with_the_name_of_the_dead_hop(four: Ring) -> None:
    four.close_ring()
    four.send(0, 2, b"there")
    assert four.receive(2, 0) == [b"there"]
    four.refuse_dials(0, 2)
    four.linked_to(0, 1).lose("it is gone")
    four.linked_to(0, 3).lose("it is gone")
    eventually(lambda: four.linked_to(0, 2).failure is not None, "the loss")
    failure = four.linked_to(0, 2).failure
    assert isinstance(failure, PeerLost)
    assert "no route over other nodes is left" in failure.cause
    assert format_node(four.nodes[3].id) in failure.cause or format_node(four.nodes[1].id) in failure.cause
    assert "the direct connection failed: cannot connect" in failure.cause


def test_a_dead_hop_far_away_is_named_too(four: Ring) -> None:
    four.close_ring()
    four.send(0, 2, b"there")
    four.refuse_dials(0, 2)
    four.linked_to(1, 2).lose("it is gone")
    four.linked_to(3, 2).lose("it is gone")
    with suppress(PeerLost):
        four.send(0, 2, b"more")
    eventually(lambda: four.linked_to(0, 2).failure is not None, "the loss")
    failure = four.linked_to(0, 2).failure
    assert isinstance(failure, PeerLost)
    assert f"cannot reach {format_node(four.nodes[2].id)}" in failure.cause


def test_a_link_that_was_lost_is_made_anew_without_others(four: Ring) -> None:
    test_without_any_way_and_any_connection_the_link_is_lost_with_the_name_of_the_dead_hop(four)
    lost = four.linked_to(0, 2)
    four.faults.clear()
    link: Link = four.meshes[0].relink(four.nodes[2].id, soon())
    assert link is not lost
    assert link.schemes == ("memory",)


def test_whoever_has_no_way_to_a_member_lets_it_be_looked_into(four: Ring) -> None:
    reported: list[MeshEvent] = []
    four.close_ring()
    four.send(0, 2, b"there")
    four.meshes[0].control.connect_events(reported.append)
    four.linked_to(0, 1).lose("it is gone")
    four.linked_to(0, 3).lose("it is gone")
    (event,) = (event for event in reported if isinstance(event, RouteLost))
    assert event.node == four.nodes[2].id
    assert event.cause.startswith("no route over other nodes is left: node ")
