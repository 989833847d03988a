"""What the machine wants of the other members is done: in order, once, by whoever is there."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nexar.cluster.decisions.membership_events import NoProgress, PeerLossFound, RecoverNow, SelfExpelled
from nexar.cluster.membership import Change, Departure, Membership, PinnedNode
from nexar.wire.control import Chosen, Suspect
from tests.losses import silent
from tests.unit.cluster.decisions.test_peering import members
from tests.unit.cluster.survivors import Survivors

World = Callable[..., Survivors]


@pytest.fixture
def world() -> Iterator[World]:
    made: list[Survivors] = []

    def make(membership: Membership, **settings: Any) -> Survivors:
        made.append(Survivors(membership, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_survivors_adopt_the_same_change_and_the_mesh_has_it_first(world: World) -> None:
    survivors = world(members(1, 2, 3))
    survivors.kill(2)
    survivors.carry_until(lambda: all(each.members == [1, 3] for each in survivors.alive()), "the next membership")
    for each in survivors.alive():
        mesh, adopted = each.story
        assert mesh == ("mesh", 2)
        assert adopted == (Change(2, left=(Departure(2, "node 2 was killed"),)), [1, 2, 3], [1, 3])
        assert each.recovery.suspects() == {}


def test_one_loss_after_another_is_one_epoch_after_another(world: World) -> None:
    survivors = world(members(1, 2, 3, 4, 5))
    for epoch, victim in enumerate([1, 3], 2):
        survivors.kill(victim)
        survivors.carry_until(
            lambda epoch=epoch: all(each.recovery.membership.epoch == epoch for each in survivors.alive()), "an epoch"
        )
    assert [each.members for each in survivors.alive()] == [[2, 4, 5]] * 3


def test_who_has_no_majority_learns_who_is_alive(world: World) -> None:
    survivors = world(members(1, 2, 3))
    survivors.kill(2, 3)
    (last,) = survivors.alive()
    survivors.carry_until(lambda: last.story, "a word about it")
    assert last.story == [NoProgress(alive=(1,), needed=2)]
    assert set(last.recovery.suspects()) == {2, 3}


def test_a_hint_that_is_wrong_removes_nobody(world: World) -> None:
    survivors = world(members(1, 2, 3))
    survivors.nodes[1].receive(3, Suspect(1, 2, 3, "it seemed so"))
    survivors.carry()
    assert all(each.members == [1, 2, 3] and not each.story for each in survivors.alive())


def test_under_the_manual_policy_nothing_is_removed_before_somebody_asks(world: World) -> None:
    survivors = world(members(1, 2, 3), recovery_policy="manual")
    survivors.kill(2)
    survivors.carry()
    assert all(each.members == [1, 2, 3] for each in survivors.alive())
    assert all(each.recovery.suspects() == {2: "node 2 was killed"} for each in survivors.alive())
    survivors.nodes[3].runner.put(RecoverNow())
    survivors.carry_until(lambda: all(each.members == [1, 3] for each in survivors.alive()), "the next membership")


@pytest.mark.parametrize("willing", [False, True])
def test_who_was_expelled_is_notified_since_when_and_why(world: World, *, willing: bool) -> None:
    survivors = world(members(1, 2, 3))
    change = Change(2, left=(Departure(3, "it was silent", willing),))
    survivors.nodes[3].receive(1, Chosen((0, 1, 0), change.encode()))
    assert survivors.nodes[3].story == [SelfExpelled(2, "it was silent", willing)]
    assert survivors.nodes[3].members == [1, 2, 3]  # of what it is no part of, it keeps no list


def test_who_is_behind_receives_every_change_that_it_missed(world: World) -> None:
    survivors = world(members(1, 2, 3, 4))
    late = survivors.nodes[4]
    changes = [Change(2, left=(Departure(2, "a"),)), Change(3, left=(Departure(3, "b"),))]
    ahead = survivors.nodes[1].recovery
    for epoch, change in enumerate(changes, 1):
        survivors.nodes[1].receive(3, Chosen((0, epoch, 0), change.encode()))
    assert ahead.membership.epoch == 3
    survivors.messages.clear()
    ahead.send_changes_since(4, 1)
    survivors.carry()
    assert late.members == [1, 4]
    assert [entry for entry in late.story if entry[0] == "mesh"] == [("mesh", 2), ("mesh", 3)]


def test_who_is_far_behind_receives_some_changes_with_each_heartbeat(world: World) -> None:
    survivors = world(members(1, 2, 3))
    late, ahead = survivors.nodes[3], survivors.nodes[1].recovery
    for epoch in range(1, 41):
        survivors.nodes[1].receive(2, Chosen((0, epoch, 0), Change(epoch + 1, renewed=(7,)).encode()))
    survivors.messages.clear()
    epochs = []
    while late.recovery.membership.epoch < 41:
        ahead.send_changes_since(3, late.recovery.membership.epoch)
        survivors.carry()
        epochs.append(late.recovery.membership.epoch)
    assert epochs == [17, 33, 41]


def test_a_message_to_a_member_without_a_link_is_sent_on_one_that_is_dialed_for_it(world: World) -> None:
    survivors = world(members(1, 2, 3))
    speaker = survivors.nodes[1]
    speaker.unlinked = {2, 3}
    message = Chosen((0, 1, 0), b"")
    speaker.recovery.send(2, message)
    survivors.dead = {3}
    speaker.recovery.send(3, message)  # in vain, and no harm
    assert speaker.dialed == [2, 3]
    assert list(survivors.messages) == [(1, 2, message)]


def test_the_receiver_of_a_message_on_a_lost_link_is_looked_for_after_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivors = world(members(1, 2, 3))
    one = survivors.nodes[1]
    one.severed.add(2)
    one.recovery.send(2, Chosen((0, 1, 0), b""))
    assert one.probed == []  # it was found to be lost just now
    monkeypatch.setattr("nexar.cluster.membership_service._PROBE_INTERVAL", 0.0)
    one.recovery.send(2, Chosen((0, 1, 0), b""))
    assert (one.probed, one.dialed, list(survivors.messages)) == ([2], [], [])


def test_a_message_on_a_link_that_breaks_is_lost_and_no_harm(world: World) -> None:
    survivors = world(members(1, 2, 3))
    survivors.broken = {1}
    survivors.nodes[1].recovery.send(2, Chosen((0, 1, 0), b""))
    assert not survivors.messages


def test_what_is_for_the_seed_goes_to_the_seed(world: World) -> None:
    two = members(1, 2)
    survivors = world(Membership(two.cluster, two.epoch, two.members, (), PinnedNode(99, bytes(32))))
    survivors.kill(2)
    (last,) = survivors.alive()
    assert last.seed  # it is a voter, as they are two
    assert not last.story


def test_once_closed_nothing_is_decided_any_more(world: World) -> None:
    survivors = world(members(1, 2, 3))
    survivors.nodes[1].runner.stop()
    survivors.nodes[1].runner.put(PeerLossFound(2, silent("too late")))
    assert survivors.nodes[1].recovery.suspects() == {}
    assert not survivors.messages
