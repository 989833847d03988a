"""Membership and successors in one machine: what one decides, the other follows."""

from random import Random

import pytest

from nexar.cluster.decisions.membership_events import (
    ChangeRequested,
    MessageReceived,
    NoProgress,
    PeerLossFound,
    PeerReachable,
    RecoverNow,
    SelfExpelled,
    SendMessage,
    Tick,
)
from nexar.cluster.decisions.node_machine import NodeAction, NodeMachine
from nexar.cluster.decisions.successor_events import (
    AbortBuild,
    AdoptMembership,
    BeginRequested,
    BuildFailed,
    BuildFailure,
    BuildFailureKind,
    BuildFinished,
    GenerationKey,
    Interrupt,
    MemberNeeded,
    QuorumLost,
    RecoveryTimedOut,
    SetOutcome,
    StartBuild,
    Terminated,
    TerminationKind,
)
from nexar.cluster.membership import WORLD, Change, Departure, Membership
from nexar.wire.control import Chosen, Prepare
from tests.losses import silent
from tests.unit.cluster.decisions.successor_scene import (
    PART,
    TIMED_OUT,
    TIMEOUT,
    key,
    killed,
    left,
    membership,
)


class Node:
    """Node 1 with open communicators."""

    def __init__(self, *nodes: int) -> None:
        self.machine = NodeMachine(1, membership(*nodes), recovery_timeout=TIMEOUT, random=Random(0))
        self.now = 100.0
        self.begun = 0

    def step(self, event: object) -> list[NodeAction]:
        return self.machine.step(event, self.now)  # type: ignore[arg-type]

    def begin(self, members: Membership, communicator: int = WORLD) -> GenerationKey:
        self.begun += 1
        self.step(BeginRequested(self.begun, communicator, members))
        self.step(BuildFinished(self.begun))
        return key(communicator, members.epoch)

    def chosen(self, change: Change) -> list[NodeAction]:
        """Another member sends a decided change."""
        return self.step(MessageReceived(2, Chosen((0, change.epoch - 1, 0), change.encode())))


def types(actions: list[NodeAction]) -> list[type]:
    return [type(action) for action in actions]


def test_a_decided_membership_becomes_the_actions_of_the_successor_machine_in_order() -> None:
    node = Node(1, 2, 3)
    world = node.begin(membership(1, 2, 3))
    change = Change(2, left=killed(3))
    actions = [action for action in node.chosen(change) if not isinstance(action, SendMessage)]
    assert actions[:2] == [Interrupt(world), AdoptMembership(change, membership(1, 2, epoch=2))]
    assert isinstance(actions[-1], StartBuild)
    assert node.machine.membership_machine.membership == node.machine.successor_machine.world


def test_removed_nodes_are_told_first() -> None:
    node = Node(1, 2, 3, 4)
    node.begin(membership(1, 2, 3, 4))
    change = Change(2, left=(*killed(3), *left(4)))
    told = [SendMessage(gone, Chosen((0, 1, 0), change.encode())) for gone in (3, 4)]
    actions = node.chosen(change)
    first = actions.index(told[0])
    assert actions[first : first + 2] == told
    assert first + 2 == types(actions).index(Interrupt)


def test_that_this_node_was_expelled_may_be_reported_and_the_first_report_counts() -> None:
    node = Node(1, 2, 3)
    world = node.begin(membership(1, 2, 3))
    report = SelfExpelled(5, "it was silent")
    outcome = SetOutcome(world, Terminated(TerminationKind.EXPELLED, epoch=5, reason="it was silent"))
    assert node.step(report) == [report, Interrupt(world), outcome]
    assert not node.machine.has_left
    agreed = SelfExpelled(5, "as agreed", willing=True)
    assert node.step(agreed) == [agreed]
    assert node.machine.has_left


def test_several_changes_of_one_step_are_followed_in_order() -> None:
    node = Node(1, 2, 3)
    node.begin(membership(1, 2, 3))
    later = Change(3, left=killed(3))
    assert all(isinstance(action, SendMessage) for action in node.chosen(later)), "it came too early"
    actions = node.chosen(Change(2, left=left(2)))
    adopted = [action.change.epoch for action in actions if isinstance(action, AdoptMembership)]
    assert adopted == [2, 3]
    started = [action for action in actions if isinstance(action, StartBuild)]
    assert [each.membership for each in started] == [membership(1, epoch=3)]


def test_a_renewal_is_requested_from_the_membership_machine() -> None:
    """A world of one decides at once."""
    node = Node(1, 2)
    world = node.begin(membership(1, 2))
    node.chosen(Change(2, left=left(2)))
    actions = node.step(MemberNeeded(world, 2, "connection reset"))
    kinds = [each for each in types(actions) if each is not SendMessage]
    assert kinds[1:] == [Interrupt, AdoptMembership, StartBuild]
    assert node.machine.successor_machine.world == membership(1, epoch=3)


def test_a_renewal_that_a_later_change_of_the_same_step_overtakes_is_dropped() -> None:
    node = Node(1, 2, 3)
    part = node.begin(membership(1, 2), PART)
    node.step(MemberNeeded(part, 2, "connection reset"))
    node.chosen(Change(3, renewed=(PART,)))
    actions = node.chosen(Change(2, left=left(2)))
    assert [action.change.epoch for action in actions if isinstance(action, AdoptMembership)] == [2, 3]
    assert [action.membership for action in actions if isinstance(action, StartBuild)] == [membership(1, epoch=3)]
    assert not any(isinstance(action, SendMessage) and isinstance(action.message, Prepare) for action in actions)


def test_no_progress_sets_outcomes_and_is_passed_on() -> None:
    node = Node(1, 2, 3)
    world = node.begin(membership(1, 2, 3))
    node.step(PeerLossFound(2, silent()))
    node.step(PeerLossFound(3, silent()))
    node.step(RecoverNow())
    actions: list[NodeAction] = []
    while not any(isinstance(action, NoProgress) for action in actions):
        due = node.machine.due(node.now)
        assert due is not None
        node.now = due
        actions = node.step(Tick())
    place = types(actions).index(NoProgress)
    assert actions[place + 1 : place + 3] == [Interrupt(world), SetOutcome(world, QuorumLost((0,), 2, ()))]


def test_stalled_communicators_are_renewed_when_all_their_members_are_back() -> None:
    node = Node(1, 2, 3)
    node.begin(membership(1, 2, 3))
    for gone in (2, 3):
        node.step(PeerLossFound(gone, silent()))
    while not node.machine.successor_machine.stalled():
        node.now = node.machine.due(node.now) or node.now
        node.step(Tick())
    assert not _proposes(node, PeerReachable(2)), "node 3 is still lost"
    assert _proposes(node, PeerReachable(3))


def _proposes(node: Node, event: object) -> bool:
    """Whether the membership machine has a reason to decide on a renewal after this event."""
    node.step(event)
    draft = node.machine.membership_machine._pending_changes.draft(
        node.machine.membership_machine._suspicions, may_remove_lost=False
    )
    return draft is not None and draft.renewed == (WORLD,)


def test_an_expelled_node_ends_its_communicators() -> None:
    node = Node(1, 2, 3)
    world = node.begin(membership(1, 2, 3))
    node.step(BeginRequested(7, PART, membership(1, 2)))
    actions = [action for action in node.chosen(Change(2, left=killed(1))) if not isinstance(action, SendMessage)]
    cause = Terminated(TerminationKind.EXPELLED, epoch=2, reason="node 1 was killed")
    assert actions == [
        SelfExpelled(2, "node 1 was killed"),
        Interrupt(world),
        SetOutcome(world, cause),
        AbortBuild(7, BuildFailure(BuildFailureKind.REJECTED)),
    ]
    assert node.machine.due(node.now) is None


def test_it_is_due_when_the_first_of_both_machines_is() -> None:
    node = Node(1)
    assert node.machine.due(node.now) is None
    world = node.begin(membership(1))
    (started,) = [each for each in node.step(ChangeRequested(renewed=(WORLD,))) if isinstance(each, StartBuild)]
    node.step(BuildFailed(started.build, TIMED_OUT))
    assert node.machine.due(node.now) == node.now + TIMEOUT
    node.now += TIMEOUT
    assert node.step(Tick()) == [SetOutcome(world, RecoveryTimedOut(()))]


@pytest.mark.parametrize(
    "removed",
    [SelfExpelled(2, "no member of epoch 2"), MessageReceived(2, Chosen((0, 1, 0), Change(2, killed(1)).encode()))],
    ids=["a member reports the removal", "the change calls it lost"],
)
def test_a_node_that_the_members_release_has_left_however_it_learns_that(removed: object) -> None:
    node, expelled = Node(1, 2, 3), Node(1, 2, 3)
    node.step(ChangeRequested(left=(Departure(1, "it wanted to leave", willing=True),), epoch=1))
    node.step(removed)
    expelled.step(removed)
    assert (node.machine.has_left, expelled.machine.has_left) == (True, False)
