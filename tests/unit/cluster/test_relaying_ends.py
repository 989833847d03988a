"""Whoever on the way closes or dies: those that stay hear everything, over a connection where no way is left."""

from contextlib import suppress

import pytest

from nexar.errors import PeerLost, UsageError
from nexar.links.link import Link
from nexar.testing.faults import Stall
from nexar.types import format_node
from nexar.wire.frame import Space
from tests.ranks import on_every
from tests.unit.cluster.memory_mesh import eventually, soon
from tests.unit.cluster.ring import NUMBERED, Ring


def test_without_any_way_the_two_connect_and_nothing_is_lost_or_doubled(four: Ring) -> None:
    four.close_circle()
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
    assert four.meshes[0].relaying.shortcuts == 1
    assert four.meshes[0].relaying.stats() == {"passed_on": 0, "refused": 0, "dropped": 0, "shortcuts": 1}


@pytest.mark.parametrize("leavers", [(1, 4), (2, 5), (1, 2, 4, 5)])
def test_hops_may_close_at_any_time_and_whoever_stays_hears_everything(six: Ring, leavers: tuple[int, ...]) -> None:
    six.close_circle()
    six.send(0, 3, *NUMBERED[:100])
    six.send(3, 0, *NUMBERED[:100])

    def act(rank: int) -> list[bytes]:
        if rank in leavers:
            six.meshes[rank].settle(lambda _: False)
            six.meshes[rank].close()
            return []
        six.send(rank, 3 - rank, *NUMBERED[100:])
        return six.receive(rank, 3 - rank, 300)

    heard = on_every([0, 3, *leavers], act)
    assert heard[:2] == [NUMBERED, NUMBERED]
    assert six.linked_to(0, 3).failure is None


def test_who_settles_and_closes_has_been_heard_whatever_becomes_of_the_hops(six: Ring) -> None:
    """What rank 0 said is swallowed on its way: rank 1 passes it on to nobody, and then that connection ends."""
    six.close_circle()
    six.faults.add(six.on_way(Stall, 1, 2))
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
    six.close_circle()
    six.faults.add(six.on_way(Stall, 0, 1))
    six.send(0, 3, b"too late")
    six.meshes[0].settle(lambda node: node == six.nodes[3].id)
    assert not six.talks[3].post(None, source=six.nodes[0].id, space=Space.UNTAGGED, tag=0).done
    six.linked_to(0, 1).abort("it would take nothing when it is closed")
    six.faults.clear()


def test_a_node_that_nothing_drives_any_more_waits_for_nobody(four: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise UsageError("a forked child")

    four.close_circle()
    four.faults.add(four.on_way(Stall, 0, 1))
    four.send(0, 2, b"perhaps")
    monkeypatch.setattr(four.nodes[0].progress, "check", check)
    four.meshes[0].settle(lambda _: False)
    monkeypatch.undo()
    four.linked_to(0, 1).abort("it would take nothing when it is closed")
    four.faults.clear()


def test_without_any_way_and_any_connection_the_link_is_lost_with_the_name_of_the_dead_hop(four: Ring) -> None:
    four.close_circle()
    four.send(0, 2, b"there")
    assert four.receive(2, 0) == [b"there"]
    four.refuse_dials(0, 2)
    four.linked_to(0, 1).lose("it is gone")
    four.linked_to(0, 3).lose("it is gone")
    eventually(lambda: four.linked_to(0, 2).failure is not None, "the loss")
    failure = four.linked_to(0, 2).failure
    assert isinstance(failure, PeerLost)
    assert "no way is left over other nodes" in failure.cause
    assert format_node(four.nodes[3].id) in failure.cause or format_node(four.nodes[1].id) in failure.cause
    assert "no connection of its own came about: cannot connect" in failure.cause


def test_a_dead_hop_far_away_is_named_too(four: Ring) -> None:
    four.close_circle()
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
    told: list[tuple[int, str]] = []
    four.close_circle()
    four.send(0, 2, b"there")
    four.meshes[0].relaying.cut_off = lambda node, why: told.append((node, why))
    four.linked_to(0, 1).lose("it is gone")
    four.linked_to(0, 3).lose("it is gone")
    ((node, why),) = told
    assert node == four.nodes[2].id
    assert why.startswith("no way is left over other nodes: node ")
