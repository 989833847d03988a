"""What calls raise on communicators that are over: with what to go on, or why there is nothing."""

import threading
from collections.abc import Callable

import pytest

from nexar.cluster.change import WORLD
from nexar.cluster.decisions.succession_events import Stall
from nexar.errors import (
    CollectiveTimeout,
    Expelled,
    LinkClosed,
    MembershipChanged,
    NexarError,
    NoQuorum,
    PeerLost,
    RecoveryTimeout,
    UsageError,
)
from tests.unit.cluster.memory_mesh import soon
from tests.unit.communicator.lineages import PART, Story, expel, nodes

# ---------------------------------------------------------------- what calls raise


def test_what_is_no_consequence_of_a_change_is_raised_as_it_is(story: Story) -> None:
    world = story.begin()
    for error in (
        UsageError("a mistake"),
        CollectiveTimeout(operation="barrier", sequence=1, waiting_for=[], timeout=1),
    ):
        assert story.lineage.judge(world, error) is error
    story.change(2)
    story.successor(world)
    assert story.lineage.judge(world, error) is error


def test_under_the_automatic_policy_a_lost_peer_is_looked_into_and_waited_for(story: Story) -> None:
    world = story.begin()
    threading.Timer(0.02, story.change, (3,)).start()
    change = story.raised(world, PeerLost(rank=2, cause="connection reset"))
    assert story.missed == [3]
    assert isinstance(change, MembershipChanged)
    assert change.lost == {2: "node 3 was killed"}


@pytest.mark.parametrize("error", [PeerLost(node=3, cause="no member"), LinkClosed(rank=9, node=3)])
def test_who_went_quietly_is_missed_by_who_needs_it_and_then_there_is_a_successor(
    story: Story, error: NexarError
) -> None:
    world, part = story.begin(), story.begin(1, 2, 3, communicator=PART)
    story.change(3, quiet=True)
    assert not world.interrupted
    assert story.maker.lost == [3], "who waits for it is told"
    threading.Timer(0.02, lambda: story.change(renewed=(WORLD,))).start()
    change = story.raised(world, error)
    assert isinstance(change, MembershipChanged)
    assert change.lost == {2: "it left"}
    assert story.renewals == [((WORLD,), 2)]
    assert not part.interrupted


def test_who_needed_it_before_it_went_asks_again_after_each_change_that_is_none_for_it(story: Story) -> None:
    story.widen()
    part = story.begin(1, 2, 4, communicator=PART)
    fate = story.lineage.fate_after(part, PeerLost(node=4, cause="connection reset"))
    assert (fate, story.missed, story.renewals) == (part.fate, [4], [])
    story.change(4, quiet=True)
    story.change(3, quiet=True)
    assert story.renewals == [((PART,), 2), ((PART,), 3)]
    story.change(renewed=(PART,))
    assert nodes(story.successor(part)) == [1, 2]
    story.change(2)
    assert len(story.renewals) == 2


def test_without_a_quorum_who_needs_one_that_went_quietly_is_told_and_others_are_not(story: Story) -> None:
    part, other = (story.begin(1, 3, communicator=each) for each in (PART, PART + 1))
    story.change(3, quiet=True)
    assert story.lineage.fate_after(part, PeerLost(node=3, cause="it left")) is part.fate
    story.lineage.stalled(Stall(alive=(1,), needed=2))
    assert isinstance(story.raised(part), NoQuorum)
    assert not other.interrupted


def test_under_the_manual_policy_who_went_quietly_is_named_by_its_rank_there(tell: Callable[..., Story]) -> None:
    story = tell(recovery_policy="manual")
    part = story.begin(3, 1, communicator=PART)
    story.change(3, quiet=True)
    error = story.raised(part, LinkClosed(rank=2, node=3, operation="send"))
    assert isinstance(error, PeerLost)
    assert (error.rank, error.cause, error.operation) == (0, "it left", "send")
    assert "comm.shrink()" in str(error)


def test_a_lost_peer_of_somebody_else_is_raised_as_it_is(story: Story) -> None:
    world = story.begin()
    for error in (
        PeerLost(node=99, cause="a stranger"),
        PeerLost(rank=9, cause="no such rank"),
        PeerLost(cause="who?"),
    ):
        assert story.raised(world, error) is error
    assert story.missed == []


@pytest.mark.parametrize("policy", ["manual", "abort"])
def test_under_the_other_policies_a_lost_peer_is_raised_at_once(tell: Callable[..., Story], policy: str) -> None:
    story = tell(recovery_policy=policy)
    error = PeerLost(rank=1, node=2, cause="connection reset", operation="barrier #3")
    given = story.raised(story.begin(), error)
    assert isinstance(given, PeerLost)
    assert (given.rank, given.node, given.cause, given.operation) == (1, 2, "connection reset", "barrier #3")
    assert (given is error) == (policy == "abort")
    assert ("comm.shrink()" in str(given)) == (policy == "manual")
    assert story.missed == ([2] if policy == "manual" else []), "it is looked into, and who shrinks does so without it"


def test_under_the_manual_policy_calls_on_the_old_one_say_how_to_get_the_next(tell: Callable[..., Story]) -> None:
    story = tell(recovery_policy="manual")
    world = story.begin()
    story.change(2)
    story.successor(world)
    error = story.raised(world)
    assert isinstance(error, PeerLost)
    assert (error.rank, error.node) == (1, 2)
    assert error.cause == "node 2 was killed"
    assert str(error).endswith("comm.shrink() gives the next communicator")


def test_without_a_quorum_who_needs_the_lost_is_told_and_others_are_not(story: Story) -> None:
    world, part = story.begin(), story.begin(1, 3, communicator=PART)
    story.lineage.stalled(Stall(alive=(1, 3), needed=3))
    error = story.raised(world)
    assert isinstance(error, NoQuorum)
    assert (list(error.alive), error.needed) == ([0, 2], 3)
    assert not part.fate.done
    assert not part.interrupted


def test_who_has_no_quorum_may_still_hear_that_the_others_went_on(story: Story) -> None:
    world = story.begin()
    story.lineage.stalled(Stall(alive=(1,), needed=2))
    assert isinstance(story.raised(world), NoQuorum)
    story.change(2)
    story.successor(world)
    assert isinstance(story.raised(world), MembershipChanged)


def test_ranks_that_left_are_named_where_the_rest_is_no_majority(story: Story) -> None:
    world = story.begin()
    story.lineage.stalled(Stall(alive=(1,), needed=2, left=(2, 3)))
    error = story.raised(world)
    assert isinstance(error, NoQuorum)
    assert list(error.left) == [1, 2]
    assert "network" not in str(error)


def test_votes_that_are_missing_are_named(story: Story) -> None:
    world = story.begin()
    story.lineage.stalled(Stall(alive=(1, 2), needed=2, missing_votes=(2, 99)))
    error = story.raised(world)
    assert isinstance(error, RecoveryTimeout)
    assert list(error.missing_votes) == [1]


def test_who_was_expelled_is_told_on_every_communicator_and_makes_no_other(story: Story) -> None:
    world, part = story.begin(), story.begin(3, 1, communicator=PART)
    expel(story.lineage, 4, "it was silent")
    for branch, rank in ((world, 0), (part, 1)):
        error = story.raised(branch)
        assert isinstance(error, Expelled)
        assert (error.epoch, error.reason, error.rank) == (4, "it was silent", rank)
    with pytest.raises(Expelled):
        story.lineage.wait_for_successor(world, soon())
    assert story.lineage.wait_for_following(WORLD, story.world, soon()) is None


def test_who_is_expelled_while_a_communicator_is_made_is_told_so(story: Story) -> None:
    story.begin()
    story.maker.held = threading.Event()
    threading.Timer(0.02, expel, (story.lineage, 4, "it was silent")).start()
    with pytest.raises(Expelled):
        story.begin(1, 2, communicator=PART)


def test_who_is_expelled_before_it_has_any_communicator_is_told_so(story: Story) -> None:
    story.lineage.opened = lambda _: expel(story.lineage, 4, "it was silent")
    error = story.raised(story.begin())
    assert isinstance(error, Expelled)
    assert error.rank == 0
