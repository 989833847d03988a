"""Two members that dial each other: by hand, then in every order that chance finds.

Whom a node may have links with, from one membership to the next.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.cluster.decisions.peering import (
    _MAX_FORMER,
    NO_RANK,
    DialDecision,
    FormerPeer,
    LinkTurn,
    Pairing,
    PeerDirectory,
)
from nexar.cluster.membership import Change, Departure, Member, Membership
from nexar.wire.control import Introduce, Introduced

LOW, HIGH = 0, 1


@pytest.fixture(params=[True, False], ids=["lower", "higher"])
def side(request: pytest.FixtureRequest) -> Pairing[str]:
    return Pairing(lower=request.param)


def test_the_first_who_wants_it_dials_and_the_others_wait(side: Pairing[str]) -> None:
    assert [side.want() for _ in range(3)] == [LinkTurn.DIAL, LinkTurn.WAIT, LinkTurn.WAIT]
    assert side.dialed(opened=True) == []
    assert (side.want(), side.pending) == (LinkTurn.OPEN, False)


def test_after_a_dial_that_failed_somebody_may_try_again(side: Pairing[str]) -> None:
    side.want()
    side.dialed(opened=False, cause="no way")
    assert (side.failures, side.cause, side.pending) == (1, "no way", False)
    assert side.want() is LinkTurn.DIAL


def test_who_is_dialed_and_does_not_dial_welcomes_and_waits_for_the_next_message(side: Pairing[str]) -> None:
    assert side.introduced("yours") is DialDecision.WELCOME
    assert side.want() is LinkTurn.WAIT
    assert side.welcomes("yours")
    side.confirmed("yours")
    assert side.want() is LinkTurn.OPEN


def test_a_welcomed_dial_that_breaks_leaves_the_way_free(side: Pairing[str]) -> None:
    side.introduced("yours")
    side.ended("yours")
    assert side.want() is LinkTurn.DIAL


def test_the_lower_lets_the_other_wait_and_supersedes_it_when_its_own_dial_opens() -> None:
    low: Pairing[str] = Pairing(lower=True)
    low.want()
    assert low.introduced("theirs") is DialDecision.HOLD
    assert low.dialed(opened=True) == [("theirs", DialDecision.SUPERSEDED)]


def test_when_the_lower_ones_dial_fails_the_one_that_waited_is_welcomed() -> None:
    low: Pairing[str] = Pairing(lower=True)
    low.want()
    low.introduced("theirs")
    assert low.dialed(opened=False, cause="blocked") == [("theirs", DialDecision.WELCOME)]
    assert low.pending
    low.confirmed("theirs")
    assert low.open


def test_one_that_waited_and_is_gone_when_the_dial_fails_is_not_counted_on() -> None:
    low: Pairing[str] = Pairing(lower=True)
    low.want()
    low.introduced("theirs")
    low.ended("theirs")
    assert low.dialed(opened=False, cause="blocked") == []
    assert not low.pending


def test_the_higher_welcomes_while_it_dials_and_opens_by_the_others() -> None:
    high: Pairing[str] = Pairing(lower=False)
    high.want()
    assert high.introduced("theirs") is DialDecision.WELCOME
    assert high.dialed(opened=False) == []  # superseded
    assert (high.failures, high.pending) == (0, True)
    high.confirmed("theirs")
    assert high.open


def test_who_has_it_open_supersedes_every_later_dial(side: Pairing[str]) -> None:
    side.want()
    side.dialed(opened=True)
    assert side.introduced("late") is DialDecision.SUPERSEDED
    assert not side.welcomes("late")


def test_of_several_dials_of_a_peer_the_one_it_goes_on_with_is_the_link(side: Pairing[str]) -> None:
    for dial in ("given up", "good", "given up too"):
        assert side.introduced(dial) is DialDecision.WELCOME
    side.ended("given up")
    assert side.welcomes("good")
    side.confirmed("good")
    assert side.open
    assert not side.welcomes("given up too")


def test_superseded_by_a_dial_that_is_gone_counts_as_a_failure(side: Pairing[str]) -> None:
    side.want()
    side.dialed(opened=False)
    assert (side.failures, side.pending) == (1, False)


# ---------------------------------------------------------------- in every order


@dataclass(eq=False)
class Wire:
    """One connection: who dialed it, and what is on its way, oldest first, for each of the two."""

    dialer: int
    to: dict[int, list[str]] = field(default_factory=lambda: {LOW: [], HIGH: []})
    broken: bool = False


@dataclass
class Side:
    number: int
    state: Pairing[Wire]
    dial: Wire | None = None
    links: list[Wire] = field(default_factory=list)


class World:
    """Two pairings, the wires between them, and chance: every step that is possible may be the next."""

    def __init__(self, *, breaks: int) -> None:
        self.sides = [Side(LOW, Pairing(lower=True)), Side(HIGH, Pairing(lower=False))]
        self.wires: list[Wire] = []
        self.breaks = breaks

    def steps(self) -> list[tuple[str, int, Wire | None]]:
        possible: list[tuple[str, int, Wire | None]] = []
        for side in self.sides:
            if not side.state.open and not side.state.pending:
                possible.append(("want", side.number, None))
            if side.dial is not None and self.breaks:
                possible.append(("give up", side.number, None))
            possible += [("hear", side.number, wire) for wire in self.wires if wire.to[side.number]]
        return possible

    def take(self, step: tuple[str, int, Wire | None]) -> None:
        what, number, wire = step
        side = self.sides[number]
        if what == "want":
            self._dial(side)
        elif what == "give up":
            self.breaks -= 1
            self._give_up(side)
        elif wire is not None:
            self._receive(side, wire, wire.to[number].pop(0))

    def _dial(self, side: Side) -> None:
        assert side.state.want() is LinkTurn.DIAL
        assert side.dial is None
        side.dial = Wire(side.number)
        self.wires.append(side.dial)
        side.dial.to[1 - side.number].append("introduce")

    def _give_up(self, side: Side) -> None:
        wire, side.dial = side.dial, None
        assert wire is not None
        wire.broken = True
        wire.to[1 - side.number].append("broken")
        self._over(side, opened=False, cause="gave up")

    def _over(self, side: Side, *, opened: bool, cause: str | None = None) -> None:
        for sentence in side.state.dialed(opened=opened, cause=cause):
            self._answer(side, sentence.dialer, sentence.outcome)

    def _answer(self, side: Side, wire: Wire, fate: DialDecision) -> None:
        if fate is not DialDecision.HOLD:
            wire.to[1 - side.number].append(fate.value)

    def _receive(self, side: Side, wire: Wire, message: str) -> None:
        if message == "introduce":
            self._answer(side, wire, side.state.introduced(wire))
        elif message == "broken":
            side.state.ended(wire)
        elif message == "go on":
            assert side.state.welcomes(wire)
            side.links.append(wire)
            side.state.confirmed(wire)
        elif side.dial is wire:  # an answer to a dial that was given up is not received
            side.dial = None
            if message == DialDecision.WELCOME.value:
                side.links.append(wire)
                wire.to[1 - side.number].append("go on")
            self._over(side, opened=message == DialDecision.WELCOME.value)


def run(world: World, data: st.DataObject, longest: int = 60) -> None:
    for _ in range(longest):
        steps = world.steps()
        if not steps:
            return
        world.take(data.draw(st.sampled_from(steps)))


@given(st.data())
def test_two_who_dial_whenever_they_like_have_one_link_and_the_same(data: st.DataObject) -> None:
    world = World(breaks=0)
    run(world, data)
    assert not world.steps()
    low, high = world.sides
    assert len(low.links) == len(high.links) == 1
    assert low.links[0] is high.links[0]
    assert (low.state.failures, high.state.failures) == (0, 0)


@given(st.data(), st.integers(1, 4))
def test_dials_that_are_given_up_at_any_moment_never_lead_to_two_links(data: st.DataObject, breaks: int) -> None:
    world = World(breaks=breaks)
    run(world, data, longest=200)
    assert not world.steps()
    low, high = world.sides
    assert len(low.links) == len(high.links) == 1
    assert low.links[0] is high.links[0]


def test_dials_of_the_peer_are_waiting_until_they_end_or_are_the_link() -> None:
    pairing: Pairing[str] = Pairing(lower=True)
    pairing.want()
    pairing.introduced("held")
    assert pairing.waiting == ["held"]
    pairing.dialed(opened=False, cause="no")
    pairing.introduced("another")
    assert pairing.waiting == ["held", "another"]
    pairing.ended("another")
    pairing.confirmed("held")
    assert pairing.waiting == []


def member(node: int, host: str = "here") -> Member:
    return Member(node, host, bytes(32), {"tls": (f"10.0.0.{node}:1",)})


def members(*nodes: int, epoch: int = 1) -> Membership:
    return Membership("ours", epoch, tuple(member(node) for node in nodes))


def without(before: Membership, node: int, cause: str) -> tuple[Membership, Change]:
    change = Change(before.epoch + 1, left=(Departure(node, cause),))
    return change.apply(before), change


THREE = PeerDirectory(7, members(5, 7, 9))


def test_members_have_the_rank_that_the_membership_gives_them() -> None:
    assert THREE.rank == 1
    assert [THREE.rank_of(node) for node in (5, 7, 9, 11)] == [0, 1, 2, NO_RANK]
    assert THREE.introduction() == Introduce(rank=1, epoch=1)


def test_who_waits_to_be_let_in_knows_everybody_and_holds_no_rank() -> None:
    waiting = PeerDirectory(11, members(5, 7, 9))
    assert waiting.rank == NO_RANK
    assert waiting.find(5) == member(5)
    assert waiting.find(11) is None
    assert waiting.introduction() == Introduce(rank=NO_RANK, epoch=1)


def test_joiners_are_found_like_members_until_others_are_expected() -> None:
    expecting = THREE.with_joiners([member(11), member(9)])
    assert expecting.find(11) == member(11)
    assert (expecting.rank_of(11), expecting.rank_of(9)) == (NO_RANK, 2)
    assert list(expecting.joiners) == [11]  # who is a member is no joiner
    assert expecting.with_joiners([member(12)]).find(11) is None


def test_a_joiner_who_becomes_a_member_is_a_joiner_no_more() -> None:
    expecting = THREE.with_joiners([member(11), member(12)])
    moved = expecting.moved_to(members(5, 7, 9, 11, epoch=2))
    assert (moved.rank_of(11), list(moved.joiners)) == (3, [12])


def test_who_left_is_remembered_with_the_epoch_and_the_reason() -> None:
    moved = THREE.moved_to(*without(THREE.membership, 5, "it was silent"))
    assert moved.find(5) is None
    assert moved.former == {5: FormerPeer(2, "it was silent")}
    assert moved.rank == 0
    later = moved.moved_to(*without(moved.membership, 9, "it left"))
    assert later.former == {5: FormerPeer(2, "it was silent"), 9: FormerPeer(3, "it left")}


def test_of_very_many_who_left_the_first_are_forgotten() -> None:
    left = tuple(Departure(node, "gone") for node in range(100, 100 + _MAX_FORMER + 1))
    moved = THREE.moved_to(members(5, 7, 9, epoch=2), Change(2, left=left))
    assert len(moved.former) == _MAX_FORMER
    assert 100 not in moved.former
    assert 100 + _MAX_FORMER in moved.former


@pytest.mark.parametrize("kind", [Introduce, Introduced])
def test_at_the_same_epoch_the_ranks_must_be_the_same(kind: type[Introduce] | type[Introduced]) -> None:
    assert THREE.why_not_accepted(9, kind(rank=2, epoch=1)) is None
    assert THREE.why_not_accepted(9, kind(rank=1, epoch=1)) == (
        "it claims rank 1 at epoch 1, the membership gives it rank 2"
    )


def test_at_another_epoch_there_is_nothing_to_compare() -> None:
    for epoch in (0, 2, 9):
        assert THREE.why_not_accepted(9, Introduce(rank=1, epoch=epoch)) is None


def test_who_has_no_place_is_at_fault_whatever_it_claims() -> None:
    for epoch in (1, 2):
        assert (
            THREE.why_not_accepted(11, Introduce(rank=1, epoch=epoch)) == "it has no place in the membership of epoch 1"
        )
    assert THREE.with_joiners([member(11)]).why_not_accepted(11, Introduce(rank=NO_RANK, epoch=1)) is None


def test_hosts_are_shared_by_members_and_joiners_of_one_host() -> None:
    expecting = THREE.with_joiners([member(11), member(12, "there")])
    assert [expecting.is_on_same_host(node) for node in (5, 11, 12, 13)] == [True, True, False, False]
