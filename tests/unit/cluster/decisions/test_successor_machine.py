"""Which generation comes next, when it is built, and what calls on the old one raise: events and their actions."""

import pytest

from nexar.cluster.decisions.successor_events import (
    AbortBuild,
    AdoptMembership,
    BeginRequested,
    BuildFailed,
    BuildFailure,
    BuildFailureKind,
    BuildFinished,
    CloseGeneration,
    DiscardBuild,
    DropPeer,
    Interrupt,
    Investigate,
    OpenGeneration,
    QuorumLost,
    RecoveryTimedOut,
    RejectBegin,
    ReportDeparture,
    RequestRenewal,
    RevokedBy,
    RevokeReceived,
    SendNotice,
    SetOutcome,
    StartBuild,
    SuccessorAction,
    Superseded,
    Terminated,
    TerminationKind,
)
from nexar.cluster.decisions.successor_machine import FIRST_BUILD, MAX_BUILDS
from nexar.cluster.decisions.successor_state import MAX_CHANGES, MAX_CLOSED, MAX_EARLY
from nexar.cluster.membership import WORLD, Change, Departure
from nexar.wire.control import MAX_CAUSE_CHARACTERS
from tests.unit.cluster.decisions.successor_scene import (
    EXPELLED,
    ME,
    OVERTAKEN,
    PART,
    REJECTED,
    TIMED_OUT,
    TIMEOUT,
    Scene,
    builds,
    key,
    killed,
    kinds,
    left,
    lost,
    membership,
    only,
)

CLOSED = Terminated(TerminationKind.CLOSED)


def closed_by(rank: int) -> RevokedBy:
    return RevokedBy(rank, f"rank {rank} has closed it, and there is no successor without that rank", closed=True)


# ---------------------------------------------------------------- a loss


def test_a_first_generation_is_built_and_opened() -> None:
    scene = Scene()
    (started,) = scene.request()
    assert started == StartBuild(1, WORLD, membership(1, 2, 3), None)
    assert scene.machine.builds() == [1]
    assert scene.step(BuildFinished(1)) == [OpenGeneration(1, key(WORLD, 1), None)]
    assert scene.machine.generations() == [key(WORLD, 1)]
    assert scene.machine.builds() == []


def test_a_loss_interrupts_the_world_before_links_close_and_then_its_successor_is_built() -> None:
    scene = Scene()
    world = scene.begin()
    after = membership(1, 3, epoch=2)
    made = StartBuild(FIRST_BUILD, WORLD, after, world, scene.now + TIMEOUT)
    assert scene.change(left=killed(2)) == [
        Interrupt(world),
        AdoptMembership(Change(2, left=killed(2)), after),
        DropPeer(2, "node 2 was killed"),
        made,
    ]
    assert scene.machine.is_concerned(world)
    assert scene.finish(made, 4) == [
        OpenGeneration(FIRST_BUILD, made.key, world),
        SetOutcome(world, Superseded(made.key, {1: "node 2 was killed"}, (), 4, agreed=False)),
    ]
    assert scene.machine.generations() == [made.key] == [key(WORLD, 2)]
    assert scene.machine.is_concerned(world), "it has a successor"


def test_all_actions_of_a_decided_membership_are_in_order() -> None:
    scene = Scene(1, 2, 3, 4, 5)
    scene.begin()
    for communicator in (PART, PART + 1, PART + 2):
        scene.begin(1, 2, 4, communicator=communicator)
    scene.close(key(PART, 1))
    scene.need(key(PART + 2, 1), 4)
    scene.request(1, 2, communicator=PART + 3)
    assert kinds(scene.change(left=(*killed(2), *left(5)))) == [
        *["Interrupt"] * 3,
        "AdoptMembership",
        *["DropPeer"] * 2,
        "ReportDeparture",
        "AbortBuild",
        *["StartBuild"] * 3,
        "SendNotice",
    ]
    other = scene.begin(1, 4, communicator=PART + 4)
    scene.need(other, 4)
    assert kinds(scene.change(left=left(4)))[-2:] == ["AbortBuild", "RequestRenewal"]


def test_a_joiner_is_named_by_its_new_rank() -> None:
    scene = Scene()
    world = scene.begin()
    made = only(scene.change(left=killed(2), joined=membership(8, 9).members))
    assert made.membership == membership(1, 3, 8, 9, epoch=2)
    (_, outcome) = scene.finish(made)
    assert outcome == SetOutcome(world, Superseded(made.key, {1: "node 2 was killed"}, (2, 3), None, agreed=False))


def test_a_joiner_does_not_enter_parts() -> None:
    scene = Scene()
    scene.begin(1, 2, 3, communicator=PART)
    assert only(scene.change(left=killed(2), joined=membership(8).members)).membership == membership(1, 3, epoch=2)


def test_a_change_that_does_not_concern_a_communicator_produces_no_action_about_it() -> None:
    scene = Scene()
    part = scene.begin(1, 3, communicator=PART)
    assert kinds(scene.change(left=killed(2))) == ["AdoptMembership", "DropPeer"]
    assert scene.machine.generations() == [part]
    assert not scene.machine.is_concerned(part)
    assert scene.machine.outcome(part) is None


@pytest.mark.parametrize("facts", [{"severed": ((2, 3),)}, {"renewed": (PART,)}])
def test_a_severed_pair_or_a_renewal_gives_a_successor_with_the_same_members(facts: dict[str, object]) -> None:
    scene = Scene()
    scene.begin(1, 2, 3, communicator=PART)
    assert only(scene.change(**facts)).membership == membership(1, 2, 3, epoch=2)


def test_text_of_other_nodes_is_made_printable() -> None:
    scene = Scene()
    world = scene.begin()
    made = only(scene.change(left=(Departure(2, "\x1b[31mred"),)))
    outcome = scene.finish(made)[-1]
    assert isinstance(outcome, SetOutcome)
    assert outcome.key == world
    assert isinstance(outcome.outcome, Superseded)
    assert "\x1b" not in outcome.outcome.lost[1]


# ---------------------------------------------------------------- several changes


def test_a_change_during_a_build_aborts_it_and_the_last_one_counts() -> None:
    scene = Scene()
    world = scene.begin()
    first = only(scene.change(left=killed(2)))
    actions = scene.change(left=killed(3))
    assert AbortBuild(first.build, OVERTAKEN) in actions
    assert builds(actions) == [], "one build at a time for each generation"
    second = only(scene.fail(first))
    assert second.membership == membership(1, epoch=3)
    assert second.build != first.build
    (_, outcome) = scene.finish(second)
    causes = {1: "node 2 was killed", 2: "node 3 was killed"}
    assert outcome == SetOutcome(world, Superseded(second.key, causes, (), None, agreed=False))


def test_a_change_that_does_not_concern_a_part_lets_its_build_continue() -> None:
    scene = Scene(1, 2, 3, 4)
    scene.begin(1, 2, 3, communicator=PART)
    first = only(scene.change(left=killed(2)))
    assert "AbortBuild" not in kinds(scene.change(left=killed(4)))
    assert kinds(scene.finish(first)) == ["OpenGeneration", "SetOutcome"]


def test_a_build_that_finishes_though_it_was_overtaken_is_opened_interrupted_and_succeeded() -> None:
    scene = Scene()
    world = scene.begin()
    first = only(scene.change(left=killed(2)))
    scene.change(left=killed(3))
    actions = scene.finish(first)
    assert kinds(actions) == ["OpenGeneration", "Interrupt", "SetOutcome", "StartBuild"]
    assert actions[1] == Interrupt(first.key)
    second = only(actions)
    assert (second.old, second.membership) == (first.key, membership(1, epoch=3))
    both = {outcome.key: outcome.outcome for outcome in scene.finish(second)[1:] if isinstance(outcome, SetOutcome)}
    assert both[first.key] == Superseded(second.key, {1: "node 3 was killed"}, (), None, agreed=False)
    causes = {1: "node 2 was killed", 2: "node 3 was killed"}
    assert both[world] == Superseded(second.key, causes, (), None, agreed=False)


def test_a_first_build_that_a_change_overtakes_is_opened_interrupted_or_rejected() -> None:
    scene = Scene()
    (first,) = scene.request()
    (second,) = scene.request(1, 2, communicator=PART)
    assert isinstance(first, StartBuild)
    assert isinstance(second, StartBuild)
    actions = scene.change(left=killed(2))
    assert [action for action in actions if isinstance(action, AbortBuild)] == [
        AbortBuild(1, OVERTAKEN),
        AbortBuild(2, OVERTAKEN),
    ]
    assert scene.fail(second, TIMED_OUT) == [RejectBegin(2, OVERTAKEN)]
    assert kinds(scene.finish(first)) == ["OpenGeneration", "Interrupt", "StartBuild"]


def test_a_first_build_whose_parent_ends_is_aborted_if_it_does_not_finish_soon() -> None:
    """A member that was interrupted before it asked for the part never takes part in the build."""
    scene = Scene(1, 2, 3, 4)
    world = scene.begin()
    part = BeginRequested(50, PART, membership(1, 2), world)
    assert kinds(scene.step(part)) == ["StartBuild"]
    scene.change(left=killed(4))
    assert scene.machine.due(scene.now) == 102.0
    assert scene.tick(1.9) == []
    assert scene.tick(0.1) == [AbortBuild(50, OVERTAKEN)]
    assert scene.machine.due(scene.now) is None
    assert scene.step(BuildFailed(50, OVERTAKEN)) == [RejectBegin(50, OVERTAKEN)]
    assert scene.step(BeginRequested(51, PART, membership(1, 2), world)) == [RejectBegin(51, OVERTAKEN)]


def test_a_first_build_that_finishes_soon_after_its_parent_ended_is_opened() -> None:
    scene = Scene(1, 2, 3, 4)
    world = scene.begin()
    scene.step(BeginRequested(50, PART, membership(1, 2), world))
    scene.change(left=killed(4))
    scene.tick(1.0)
    assert kinds(scene.step(BuildFinished(50))) == ["OpenGeneration"]
    assert scene.machine.due(scene.now) is None


def test_a_first_build_that_finishes_after_its_abort_is_discarded_because_the_others_may_have_ended_theirs() -> None:
    scene = Scene(1, 2, 3, 4)
    world = scene.begin()
    scene.step(BeginRequested(50, PART, membership(1, 2), world))
    scene.change(left=killed(4))
    scene.tick(2.0)
    assert scene.step(BuildFinished(50)) == [DiscardBuild(50), RejectBegin(50, OVERTAKEN)]
    assert scene.machine.generations() == [world]
    notice = SendNotice((2,), key(PART, 1), 0, "it has closed it", closed=True)
    assert notice in scene.change(renewed=(PART,)), "a member may have opened it before"


def test_a_first_build_that_a_change_of_its_members_aborts_is_opened_and_gets_a_successor() -> None:
    scene = Scene()
    (first,) = scene.request(communicator=PART)
    assert isinstance(first, StartBuild)
    scene.change(left=killed(2))
    assert kinds(scene.finish(first)) == ["OpenGeneration", "Interrupt", "StartBuild"]


def test_none_is_begun_from_an_outdated_membership_or_with_a_departed_member() -> None:
    scene = Scene()
    scene.change(left=left(3))
    assert scene.request(1, 3, communicator=PART) == [RejectBegin(1, lost(3, "it left"))]
    assert scene.begin(1, 2, communicator=PART) == key(PART, 2)
    old = membership(1, 2)
    scene.change(left=killed(2))
    scene.begun += 1
    assert scene.machine.following(WORLD, old) == membership(1, epoch=3)
    (rejected,) = scene.request(1, 2, communicator=PART + 1)
    assert rejected == RejectBegin(4, lost(2, "node 2 was killed"))


def test_a_first_build_that_fails_is_rejected_with_its_own_failure() -> None:
    scene = Scene()
    (first,) = scene.request()
    assert isinstance(first, StartBuild)
    assert scene.fail(first, lost(2)) == [RejectBegin(1, lost(2))]
    assert scene.machine.builds() == []
    assert scene.fail(first, lost(2)) == scene.finish(first) == [], "reported once"


# ---------------------------------------------------------------- ancestors


def test_all_ancestors_lead_to_the_newest_successor_and_collect_losses() -> None:
    scene = Scene()
    keys = [scene.begin()]
    for node in (3, 2):
        made = only(scene.change(left=(Departure(node, "it asked to", willing=True),)))
        actions = scene.finish(made, completed=node)
        keys.append(made.key)
    first, second, third = keys
    assert [action for action in actions if isinstance(action, SetOutcome)] == [
        SetOutcome(first, Superseded(third, {1: "it asked to", 2: "it asked to"}, (), 3, agreed=True)),
        SetOutcome(second, Superseded(third, {1: "it asked to"}, (), 2, agreed=True)),
    ]


def test_a_change_is_agreed_only_if_every_departure_on_the_way_was_willing() -> None:
    scene = Scene(1, 2, 3, 4)
    first = scene.begin()
    second = only(scene.change(left=(Departure(4, "it asked to", willing=True),)))
    scene.finish(second)
    third = only(scene.change(left=killed(3)))
    scene.finish(third)
    fourth = only(scene.change(left=(Departure(2, "it asked to", willing=True),)))
    outcomes = {each.key: each.outcome for each in scene.finish(fourth) if isinstance(each, SetOutcome)}
    agreed = {each: isinstance(outcome, Superseded) and outcome.agreed for each, outcome in outcomes.items()}
    assert agreed == {third.key: True, second.key: False, first: False}


def test_a_released_ancestor_is_forgotten() -> None:
    scene = Scene()
    first = scene.begin()
    second = only(scene.change(left=killed(3)))
    scene.finish(second)
    assert scene.release(first) == []
    assert not scene.machine.is_concerned(first)
    actions = scene.finish(only(scene.change(left=killed(2))))
    assert [action.key for action in actions if isinstance(action, SetOutcome)] == [second.key]
    assert list(scene.machine._superseded) == [second.key]


def test_an_open_generation_is_not_released() -> None:
    scene = Scene()
    world = scene.begin()
    scene.release(world)
    assert scene.machine.generations() == [world]


# ---------------------------------------------------------------- failed builds


def test_a_failed_target_is_not_repeated_and_is_given_up_in_time() -> None:
    scene = Scene()
    world = scene.begin()
    made = only(scene.change(left=killed(2)))
    scene.now += 10.0
    assert scene.fail(made, TIMED_OUT) == []
    assert scene.machine.missing(world) == (2,), "all others, for no member is named"
    assert scene.machine.due(scene.now) == 100.0 + TIMEOUT
    assert scene.tick(TIMEOUT - 10.1) == []
    assert scene.machine.is_concerned(world)
    assert scene.tick(0.1) == [SetOutcome(world, RecoveryTimedOut((2,)))]
    assert not scene.machine.is_concerned(world)
    assert scene.machine.due(scene.now) is None
    assert scene.tick(1000.0) == []
    assert scene.machine.missing(world) == (2,)


def test_a_newer_change_gives_a_failed_generation_another_chance() -> None:
    scene = Scene()
    world = scene.begin()
    scene.fail(only(scene.change(left=killed(2))), TIMED_OUT)
    scene.tick(TIMEOUT)
    made = only(scene.change(renewed=(WORLD,)))
    assert (made.old, made.membership) == (world, membership(1, 3, epoch=3))
    assert scene.machine.missing(world) == ()
    outcome = scene.finish(made)[-1]
    assert isinstance(outcome, SetOutcome)
    assert isinstance(outcome.outcome, Superseded)


def test_a_failed_build_delays_no_other() -> None:
    scene = Scene()
    scene.begin(communicator=PART)
    scene.begin(communicator=PART + 1)
    first, second = builds(scene.change(left=killed(2)))
    assert scene.fail(first, TIMED_OUT) == []
    assert kinds(scene.finish(second)) == ["OpenGeneration", "SetOutcome"]


def test_a_lost_member_is_investigated_and_the_build_waits_for_the_next_change() -> None:
    scene = Scene()
    world = scene.begin()
    made = only(scene.change(left=killed(2)))
    assert scene.fail(made, lost(3)) == [Investigate(3, "connection reset")]
    assert scene.machine.missing(world) == (2,)
    assert only(scene.change(left=killed(3))).membership == membership(1, epoch=3)


def test_a_build_that_missed_a_live_member_requests_a_renewal_until_it_is_given_up() -> None:
    """The other members wait in their builds: only this node knows that the target cannot be built."""
    scene = Scene()
    world = scene.begin()
    first = only(scene.change(left=killed(2)))
    scene.fail(first, lost(3))
    assert scene.machine.due(scene.now) == 102.0
    assert scene.tick(1.9) == []
    assert scene.tick(0.1) == [RequestRenewal((WORLD,), 2)]
    assert scene.tick(1.9) == []
    assert scene.tick(0.1) == [RequestRenewal((WORLD,), 2)]  # another change may have dropped it
    again = only(scene.change(renewed=(WORLD,)))
    assert again.membership == membership(1, 3, epoch=3)
    scene.fail(again, lost(3))
    assert scene.machine.due(scene.now) == 106.0
    assert scene.tick(TIMEOUT - 4.0) == [SetOutcome(world, RecoveryTimedOut((2,)))]  # counted from the first build
    assert scene.machine.due(scene.now) is None


def test_a_renewal_that_is_built_succeeds_the_generation() -> None:
    scene = Scene()
    world = scene.begin()
    scene.fail(only(scene.change(left=killed(2))), lost(3))
    scene.tick(2.0)
    outcome = scene.finish(only(scene.change(renewed=(WORLD,))))[-1]
    assert outcome == SetOutcome(world, Superseded(key(WORLD, 3), {1: "node 2 was killed"}, (), None, agreed=False))


def test_a_renewed_build_ends_when_the_first_target_is_given_up() -> None:
    scene = Scene()
    scene.begin()
    first = only(scene.change(left=killed(2)))
    assert first.until == scene.now + TIMEOUT
    scene.fail(first, lost(3))
    scene.tick(2.0)
    assert only(scene.change(renewed=(WORLD,))).until == first.until


def test_a_renewal_after_the_target_was_given_up_has_the_full_time_again() -> None:
    scene = Scene()
    world = scene.begin()
    scene.fail(only(scene.change(left=killed(2))), lost(3))
    scene.tick(2.0)
    assert scene.tick(TIMEOUT - 2.0) == [SetOutcome(world, RecoveryTimedOut((2,)))]
    assert only(scene.change(renewed=(WORLD,))).until == scene.now + TIMEOUT


def test_a_renewal_after_the_target_was_given_up_is_not_repeated() -> None:
    scene = Scene()
    world = scene.begin()
    scene.fail(only(scene.change(left=killed(2))), lost(3))
    scene.tick(2.0)
    scene.tick(TIMEOUT - 2.0)
    late = only(scene.change(renewed=(WORLD,)))
    assert SetOutcome(world, RecoveryTimedOut((2,))) in scene.fail(late, lost(3))
    assert scene.tick(2.0) == []


def test_a_loss_after_a_renewal_gives_the_full_time_again() -> None:
    scene = Scene(1, 2, 3, 4)
    world = scene.begin()
    scene.fail(only(scene.change(left=killed(2))), lost(3))
    scene.tick(2.0)
    again = only(scene.change(renewed=(WORLD,)))
    scene.tick(20.0)
    scene.change(left=killed(3))
    scene.fail(only(scene.fail(again)), TIMED_OUT)
    assert scene.tick(TIMEOUT - 0.1) == []
    assert scene.tick(0.1) == [SetOutcome(world, RecoveryTimedOut((3,)))]


@pytest.mark.parametrize(
    ("nodes", "missing"), [((3,), (3,)), ((2, 3), (2, 3)), ((9,), (2, 3)), ((), (2, 3)), ((ME,), (2, 3))]
)
def test_missed_members_are_those_named_or_else_all_others(nodes: tuple[int, ...], missing: tuple[int, ...]) -> None:
    scene = Scene(1, 2, 3, 4)
    world = scene.begin()
    made = only(scene.change(left=killed(4)))
    scene.fail(made, BuildFailure(BuildFailureKind.TIMED_OUT, nodes))
    assert scene.machine.missing(world) == tuple(node - 1 for node in missing)


def test_a_fault_is_not_repeated_for_ever() -> None:
    scene = Scene()
    world = scene.begin()
    made = only(scene.change(left=killed(2)))
    assert scene.fail(made, BuildFailure(BuildFailureKind.FAULT)) == []
    assert scene.tick(TIMEOUT) == [SetOutcome(world, RecoveryTimedOut((2,)))]


# ---------------------------------------------------------------- many communicators


def test_a_limited_number_is_built_at_a_time_lowest_keys_first() -> None:
    scene = Scene()
    many = MAX_BUILDS + 3
    for communicator in reversed(range(1, many + 1)):
        scene.begin(communicator=communicator)
    scene.request(1, 3, communicator=99)
    running = builds(scene.change(left=killed(2)))
    assert [each.communicator for each in running] == list(range(1, MAX_BUILDS + 1)), "a first build takes no slot"
    assert only(scene.finish(running[5])).communicator == MAX_BUILDS + 1
    assert only(scene.fail(running[0], TIMED_OUT)).communicator == MAX_BUILDS + 2


def test_without_a_free_slot_the_machine_asks_for_no_tick_and_gives_up_in_time() -> None:
    scene = Scene(1, 2, 3, 4)
    for communicator in range(1, MAX_BUILDS + 2):
        scene.begin(communicator=communicator)
    first, *_ = builds(scene.change(left=killed(2)))
    scene.fail(first, TIMED_OUT)  # another one takes its slot
    assert scene.machine.due(scene.now) == scene.now + TIMEOUT
    scene.change(renewed=(1,))
    assert scene.machine.due(scene.now) is None, "it waits for a slot, not for a time"
    assert scene.tick(10 * TIMEOUT) == []


# ---------------------------------------------------------------- quiet departures and needs


def test_a_quiet_departure_ends_nothing_and_is_reported() -> None:
    scene = Scene()
    world, part = scene.begin(), scene.begin(3, 1, communicator=PART)
    assert scene.change(left=left(3)) == [
        AdoptMembership(Change(2, left=left(3)), membership(1, 2, epoch=2)),
        DropPeer(3, "it left"),
        ReportDeparture(world, 3, "it left"),
        ReportDeparture(part, 3, "it left"),
    ]
    assert scene.machine.gone_from(membership(1, 2, 3)) == {3: "it left"}


def test_a_call_that_needs_a_departed_member_asks_for_a_renewal() -> None:
    scene = Scene()
    world, part = scene.begin(), scene.begin(1, 2, 3, communicator=PART)
    scene.change(left=left(3))
    assert scene.need(world, 3) == [Investigate(3, "connection reset"), RequestRenewal((WORLD,), 2)]
    assert scene.need(part, 3) == [Investigate(3, "connection reset"), RequestRenewal((WORLD, PART), 2)]
    made, other = builds(scene.change(renewed=(WORLD, PART)))
    assert made.membership == other.membership == membership(1, 2, epoch=3)
    outcome = scene.finish(made)[-1]
    assert outcome == SetOutcome(world, Superseded(made.key, {2: "it left"}, (), None, agreed=True))


def test_a_member_needed_before_it_left_is_requested_after_each_change_until_one_concerns_it() -> None:
    scene = Scene(1, 2, 3, 4)
    part = scene.begin(1, 2, 4, communicator=PART)
    assert scene.need(part, 4) == [Investigate(4, "connection reset")]
    assert scene.change(left=left(4))[-1] == RequestRenewal((PART,), 2)
    assert scene.change(left=left(3))[-1] == RequestRenewal((PART,), 3)
    assert "RequestRenewal" not in kinds(scene.change(renewed=(PART,)))
    assert "RequestRenewal" not in kinds(scene.change(left=killed(2)))


def test_only_the_newest_generation_needs_anybody() -> None:
    scene = Scene(1, 2, 3, 4)
    first = scene.begin()
    made = only(scene.change(left=killed(4)))
    scene.finish(made)
    scene.change(left=left(3))
    assert scene.need(first, 3) == [Investigate(3, "connection reset")]
    assert scene.need(made.key, 3)[-1] == RequestRenewal((WORLD,), 3)


def test_a_need_of_a_generation_that_is_not_open_counts_with_its_membership() -> None:
    scene = Scene()
    members = scene.machine.world
    scene.change(left=left(3))
    assert scene.need(key(WORLD, 1), 3) == [Investigate(3, "connection reset")]
    assert scene.need(key(WORLD, 1), 3, members)[-1] == RequestRenewal((WORLD,), 2)


def test_closing_a_communicator_drops_its_needs() -> None:
    scene = Scene()
    part = scene.begin(1, 3, communicator=PART)
    scene.need(part, 3)
    scene.close(part)
    assert "RequestRenewal" not in kinds(scene.change(left=left(3)))


def test_a_build_with_a_member_that_leaves_quietly_is_aborted_and_the_next_change_is_requested() -> None:
    scene = Scene(1, 2, 3, 4)
    world = scene.begin()
    made = only(scene.change(left=killed(2)))
    assert AbortBuild(made.build, lost(4, "it left")) in scene.change(left=left(4))
    assert scene.fail(made, TIMED_OUT) == [Investigate(4, "it left"), RequestRenewal((WORLD,), 3)]
    assert scene.machine.missing(world) == (3,)
    assert only(scene.change(renewed=(WORLD,))).membership == membership(1, 3, epoch=4)


def test_no_build_is_started_with_a_member_that_left_quietly_meanwhile() -> None:
    scene = Scene(1, 2, 3, 4)
    for communicator in range(1, MAX_BUILDS + 1):
        scene.begin(communicator=communicator)
    last = scene.begin(communicator=MAX_BUILDS + 1)
    first, *_ = builds(scene.change(left=killed(2)))
    scene.change(left=left(4))
    actions = scene.finish(first)
    assert builds(actions) == []
    assert Investigate(4, "it left") in actions
    assert actions[-1] == RequestRenewal((MAX_BUILDS + 1,), 3)
    assert scene.machine.missing(last) == (3,)
    assert scene.machine.due(scene.now) == scene.now + TIMEOUT


# ---------------------------------------------------------------- no progress


def test_without_a_quorum_only_generations_with_an_absent_member_end() -> None:
    scene = Scene()
    world, part = scene.begin(), scene.begin(1, 3, communicator=PART)
    stall = QuorumLost((0, 2), 3, ())
    assert scene.stall(alive=(1, 3), needed=3) == [Interrupt(world), SetOutcome(world, stall)]
    assert scene.machine.outcome(part) is None
    assert scene.machine.stalled() == [(world, frozenset({1, 2, 3}))]


def test_members_that_left_are_named_by_their_ranks() -> None:
    scene = Scene()
    world = scene.begin()
    assert scene.stall(alive=(1,), needed=2, left=(2, 3, 99))[-1] == SetOutcome(world, QuorumLost((0,), 2, (1, 2)))


def test_missing_votes_make_it_a_timeout() -> None:
    scene = Scene()
    world = scene.begin()
    assert scene.stall(alive=(1, 2), needed=2, missing_votes=(2, 99))[-1] == SetOutcome(world, RecoveryTimedOut((1,)))


def test_a_stall_ends_a_generation_that_needs_a_departed_member() -> None:
    scene = Scene()
    part, other = scene.begin(1, 3, communicator=PART), scene.begin(1, 3, communicator=PART + 1)
    scene.change(left=left(3))
    scene.need(part, 3)
    assert scene.stall(alive=(1,), needed=2)[-1] == SetOutcome(part, QuorumLost((0,), 2, ()))
    assert scene.machine.outcome(other) is None


def test_a_successor_replaces_the_outcome_of_a_stall() -> None:
    scene = Scene()
    world = scene.begin()
    scene.stall(alive=(1,), needed=2)
    assert scene.stall(alive=(1, 2), needed=2)[-1] == SetOutcome(world, QuorumLost((0, 1), 2, ()))
    actions = scene.change(left=killed(2))
    assert "Interrupt" not in kinds(actions), "it is interrupted already"
    assert kinds(scene.finish(only(actions))) == ["OpenGeneration", "SetOutcome"]


# ---------------------------------------------------------------- closing


def test_a_closed_communicator_gets_no_successor_and_its_members_are_told_at_the_next_change() -> None:
    scene = Scene(1, 2, 3, 4)
    part, other = scene.begin(2, 1, 3, communicator=PART), scene.begin(1, 3, communicator=PART + 1)
    assert [*scene.close(part), *scene.close(other)] == [CloseGeneration(part), CloseGeneration(other)]
    assert scene.machine.generations() == []
    actions = scene.change(left=killed(2))
    assert actions[-1] == SendNotice((3,), part, 1, "it has closed it", closed=True)
    assert builds(actions) == []
    assert scene.change(left=killed(4))[-1] == DropPeer(4, "node 4 was killed"), "this does not concern it"
    assert scene.change(renewed=(PART,))[-1] == SendNotice((3,), part, 1, "it has closed it", closed=True)


def test_closing_after_a_change_is_announced_at_once() -> None:
    scene = Scene()
    part = scene.begin(communicator=PART)
    scene.fail(only(scene.change(left=killed(2))), TIMED_OUT)
    assert scene.close(part) == [CloseGeneration(part), SendNotice((3,), part, 0, "it has closed it", closed=True)]
    assert scene.close(part) == []


def test_closing_during_the_build_is_announced_only_if_that_fails() -> None:
    scene = Scene()
    part = scene.begin(communicator=PART)
    made = only(scene.change(left=killed(2)))
    assert scene.close(part) == [CloseGeneration(part)]
    assert scene.fail(made, lost(3)) == [SendNotice((3,), part, 0, "it has closed it", closed=True)]
    assert scene.machine.due(scene.now) is None


def test_closing_during_the_build_of_a_generation_with_an_outcome_is_announced_at_once() -> None:
    """Its members may already wait in calls on it."""
    scene = Scene()
    part = scene.begin(communicator=PART)
    scene.revoke(part)
    scene.change(left=killed(2))
    assert scene.close(part) == [CloseGeneration(part), SendNotice((3,), part, 0, "it has closed it", closed=True)]


def test_a_generation_built_while_its_user_closed_it_is_not_handed_out_and_later_changes_announce_it() -> None:
    scene = Scene()
    part = scene.begin(communicator=PART)
    made = only(scene.change(left=killed(2)))
    scene.close(part)
    assert scene.finish(made) == [DiscardBuild(made.build)]
    assert scene.machine.generations() == []
    assert scene.change(renewed=(PART,))[-1] == SendNotice((3,), made.key, 0, "it has closed it", closed=True)


def test_a_limited_number_of_closed_communicators_is_remembered() -> None:
    scene = Scene()
    for communicator in range(1, MAX_CLOSED + 3):
        scene.close(scene.begin(1, 2, 3, communicator=communicator))
    told = [action.key.communicator for action in scene.change(left=killed(2)) if isinstance(action, SendNotice)]
    assert told == list(range(3, MAX_CLOSED + 3))


def test_a_member_that_closed_it_ends_the_build_and_the_outcome_names_it() -> None:
    scene = Scene()
    part = scene.begin(communicator=PART)
    made = only(scene.change(left=killed(2)))
    assert scene.hear(3, part, 2, closed=True) == [AbortBuild(made.build, OVERTAKEN)]
    assert scene.machine.is_closed_by_member(part)
    assert scene.fail(made) == [SetOutcome(part, closed_by(2))]
    assert not scene.machine.is_concerned(part)
    assert scene.tick(10 * TIMEOUT) == []
    actions = scene.change(left=killed(3))
    assert only(actions).membership == membership(1, epoch=3), "without that member"
    assert not scene.machine.is_closed_by_member(part)
    assert kinds(scene.finish(only(actions))) == ["OpenGeneration", "SetOutcome"]


def test_a_member_that_closed_it_without_a_change_ends_nothing() -> None:
    scene = Scene()
    part = scene.begin(communicator=PART)
    assert scene.hear(3, part, 2, closed=True) == []
    assert scene.machine.outcome(part) is None
    actions = scene.change(left=killed(2))
    assert builds(actions) == []
    assert actions[-1] == SetOutcome(part, closed_by(2))


def test_a_member_that_closed_it_after_its_build_failed_ends_the_wait_at_once() -> None:
    scene = Scene()
    part = scene.begin(communicator=PART)
    scene.fail(only(scene.change(left=killed(2))), TIMED_OUT)
    assert scene.hear(3, part, 2, closed=True) == [SetOutcome(part, closed_by(2))]


def test_a_generation_built_with_a_member_that_closed_the_old_one_is_discarded() -> None:
    scene = Scene()
    part = scene.begin(communicator=PART)
    made = only(scene.change(left=killed(2)))
    scene.hear(3, part, 2, closed=True)
    assert scene.finish(made) == [DiscardBuild(made.build), SetOutcome(part, closed_by(2))]
    assert scene.machine.generations() == [part]


def test_a_member_that_closed_it_and_left_the_world_does_not_matter() -> None:
    scene = Scene()
    part = scene.begin(communicator=PART)
    scene.hear(3, part, 2, closed=True)
    assert only(scene.change(left=killed(3))).membership == membership(1, 2, epoch=2)


def test_another_closer_replaces_the_first() -> None:
    scene = Scene(1, 2, 3, 4)
    part = scene.begin(communicator=PART)
    scene.hear(3, part, 2, closed=True)
    scene.hear(4, part, 3, closed=True)
    assert scene.change(left=killed(2))[-1] == SetOutcome(part, closed_by(2))
    assert scene.change(left=killed(3))[-1] == SetOutcome(part, closed_by(3))


def test_a_member_that_closed_the_generation_before_takes_no_part_in_the_next_one() -> None:
    """Its own build failed, so it announces the old generation, in which its rank was another."""
    scene = Scene(1, 2, 3)
    part = scene.begin(2, 1, 3, communicator=PART)
    opened = scene.finish(only(scene.change(left=killed(2))))[0]
    assert isinstance(opened, OpenGeneration)
    assert scene.hear(3, part, 2, closed=True) == []
    actions = scene.change(renewed=(PART,))
    assert builds(actions) == []
    assert actions[-1] == SetOutcome(opened.key, closed_by(1))


def test_a_closing_notice_about_the_generation_before_names_the_rank_of_its_sender_there() -> None:
    scene = Scene(1, 2, 3)
    part = scene.begin(2, 1, 3, communicator=PART)
    opened = scene.finish(only(scene.change(left=killed(2))))[0]
    assert isinstance(opened, OpenGeneration)
    assert scene.hear(3, part, 1, closed=True) == []
    assert scene.machine._open[opened.key].closed_by == set()


def test_a_member_that_closed_a_generation_that_this_node_never_opened_takes_no_part_in_the_next_one() -> None:
    """It built that one, and a newer change overtook the build here."""
    scene = Scene(1, 2, 3, 4)
    part = scene.begin(communicator=PART)
    first = only(scene.change(left=killed(2)))
    scene.change(left=killed(4))
    made = only(scene.fail(first))
    assert scene.hear(3, first.key, 1, closed=True) == [AbortBuild(made.build, OVERTAKEN)]
    assert scene.fail(made) == [SetOutcome(part, closed_by(2))]


def test_an_early_closing_notice_counts_for_any_generation_of_its_communicator() -> None:
    scene = Scene(1, 2, 3, 4)
    (started,) = scene.request(communicator=PART)
    assert isinstance(started, StartBuild)
    assert scene.hear(3, key(PART, 2), 1, closed=True) == scene.hear(2, key(PART + 1, 2), 1, closed=True) == []
    scene.finish(started)
    assert scene.machine._open[started.key].closed_by == {3}


def test_a_member_that_goes_on_does_not_announce_the_close_of_the_old_generation() -> None:
    scene = Scene()
    part = scene.begin(communicator=PART)
    scene.finish(only(scene.change(left=killed(2))))
    assert scene.close(part) == []
    assert "SendNotice" not in kinds(scene.change(renewed=(PART,)))


# ---------------------------------------------------------------- revoking


def test_a_revoked_generation_ends_and_all_members_are_told() -> None:
    scene = Scene()
    part = scene.begin(2, 1, 3, communicator=PART)
    assert scene.revoke(part, "enough") == [
        SetOutcome(part, RevokedBy(1, "enough")),
        Interrupt(part),
        SendNotice((2, 3), part, 1, "enough", closed=False),
    ]
    assert scene.revoke(part, "twice") == []


def test_a_notice_is_followed_and_forwarded_once() -> None:
    scene = Scene()
    world = scene.begin()
    assert scene.hear(2, world, 1) == [
        SetOutcome(world, RevokedBy(1, "the data is wrong")),
        Interrupt(world),
        SendNotice((2, 3), world, 1, "the data is wrong", closed=False),
    ]
    assert scene.hear(2, world, 1) == scene.hear(3, world, 1) == scene.hear(3, world, 2) == []


def test_a_forwarding_rank_is_named_here_and_not_to_others() -> None:
    scene = Scene()
    world = scene.begin()
    outcome, _, notice = scene.hear(2, world, 2)
    assert outcome == SetOutcome(world, RevokedBy(2, "the data is wrong (as rank 1 passed on)"))
    assert notice == SendNotice((2, 3), world, 2, "the data is wrong", closed=False)


@pytest.mark.parametrize(
    ("sender", "rank", "closed"),
    [(4, 1, False), (4, 0, False), (2, 0, False), (2, 7, False), (2, -1, False), (2, 2, True), (2, 0, True)],
    ids=[
        "a stranger",
        "a stranger in my name",
        "in my name",
        "a rank that does not exist",
        "a negative rank",
        "closed in another's name",
        "closed in my name",
    ],
)
def test_a_notice_counts_only_from_a_member_and_never_in_this_nodes_name(
    sender: int, rank: int, *, closed: bool
) -> None:
    scene = Scene(1, 2, 3, 4)
    part = scene.begin(1, 2, 3, communicator=PART)
    assert scene.hear(sender, part, rank, closed=closed) == []
    assert not scene.machine.is_closed_by_member(part)


def test_reasons_are_made_safe_and_short() -> None:
    scene = Scene()
    first, second = scene.begin(communicator=PART), scene.begin(communicator=PART + 1)
    outcome, _, notice = scene.revoke(first, "\udcff" * MAX_CAUSE_CHARACTERS)
    assert isinstance(outcome, SetOutcome)
    assert isinstance(outcome.outcome, RevokedBy)
    assert isinstance(notice, SendNotice)
    assert notice.reason == outcome.outcome.reason[:MAX_CAUSE_CHARACTERS] == ("\\udcff" * 1000)[:MAX_CAUSE_CHARACTERS]
    heard = scene.step(RevokeReceived(2, second, 1, "two\nlines", closed=False))
    assert heard[0] == SetOutcome(second, RevokedBy(1, "two lines"))


def test_a_notice_may_come_before_the_generation_is_opened() -> None:
    scene = Scene(1, 2, 3, 4)
    (started,) = scene.request(1, 2, 3, communicator=PART)
    assert isinstance(started, StartBuild)
    for sender, rank, closed in ((4, 1, False), (4, 3, True), (3, 2, True), (2, 1, True), (2, 1, False)):
        assert scene.hear(sender, started.key, rank, closed=closed) == []
    assert kinds(scene.finish(started)) == ["OpenGeneration", "SetOutcome", "Interrupt", "SendNotice"]
    assert scene.machine.outcome(started.key) == RevokedBy(1, "the data is wrong")
    assert scene.machine._open[started.key].closed_by == {2, 3}


def test_a_successor_is_revoked_before_it_is_handed_out() -> None:
    scene = Scene()
    world = scene.begin()
    made = only(scene.change(left=killed(2)))
    scene.hear(3, made.key, 1)
    actions = scene.finish(made)
    assert kinds(actions) == ["OpenGeneration", "SetOutcome", "Interrupt", "SendNotice", "SetOutcome"]
    assert actions[1] == SetOutcome(made.key, RevokedBy(1, "the data is wrong"))
    assert isinstance(actions[-1], SetOutcome)
    assert actions[-1].key == world


def test_a_limited_number_of_early_notices_is_kept() -> None:
    scene = Scene()
    for communicator in range(1, MAX_EARLY + 2):
        scene.hear(2, key(communicator, 1), 1)
    assert len(scene.machine._early) == MAX_EARLY
    first, second = scene.begin(communicator=1), scene.begin(communicator=2)
    assert scene.machine.outcome(first) is None, "the oldest gave way"
    assert isinstance(scene.machine.outcome(second), RevokedBy)


def test_a_superseded_generation_is_not_revoked_any_more() -> None:
    scene = Scene()
    world = scene.begin()
    scene.finish(only(scene.change(left=killed(2))))
    assert scene.revoke(world) == scene.hear(3, world, 2) == []


def test_a_revoked_generation_gets_a_successor_and_no_other_outcome() -> None:
    scene = Scene()
    world = scene.begin()
    scene.revoke(world)
    assert scene.stall(alive=(1,), needed=2) == []
    scene.fail(only(scene.change(renewed=(WORLD,))), TIMED_OUT)
    assert scene.tick(TIMEOUT) == [], "the reason of the revocation says more than a timeout"
    assert not scene.machine.is_concerned(world)
    assert kinds(scene.finish(only(scene.change(renewed=(WORLD,))))) == ["OpenGeneration", "SetOutcome"]


def test_a_closer_replaces_a_revocation_and_not_the_other_way_round() -> None:
    scene = Scene()
    part = scene.begin(communicator=PART)
    scene.revoke(part)
    scene.hear(3, part, 2, closed=True)
    assert scene.change(left=killed(2))[-1] == SetOutcome(part, closed_by(2))
    assert scene.hear(3, part, 2) == []


def test_a_revocation_replaces_the_outcome_of_a_stall() -> None:
    scene = Scene()
    world = scene.begin()
    scene.stall(alive=(1,), needed=2)
    assert kinds(scene.hear(2, world, 1)) == ["SetOutcome", "SendNotice"]


# ---------------------------------------------------------------- the end


def test_a_terminated_node_ends_all_communicators_and_builds() -> None:
    scene = Scene()
    world, part = scene.begin(), scene.begin(3, 1, communicator=PART)
    (first,) = scene.request(1, 2, communicator=PART + 1)
    made = only(scene.change(left=killed(2)))
    assert isinstance(first, StartBuild)
    assert scene.terminate() == [
        SetOutcome(world, EXPELLED),
        Interrupt(part),
        SetOutcome(part, EXPELLED),
        AbortBuild(made.build, REJECTED),
    ]
    assert scene.fail(first) == [RejectBegin(first.build, REJECTED)]
    assert scene.finish(made) == [DiscardBuild(made.build)]
    assert scene.machine.due(scene.now) is None


def test_a_terminated_node_does_nothing_more() -> None:
    scene = Scene()
    world, part = scene.begin(), scene.begin(communicator=PART)
    scene.terminate()
    assert scene.terminate(CLOSED) == [], "the first cause counts"
    assert scene.request(1, 3, communicator=PART + 1) == [RejectBegin(3, REJECTED)]
    nothing: list[list[SuccessorAction]] = [
        scene.revoke(world),
        scene.hear(2, world, 1),
        scene.hear(2, part, 1, closed=True),
        scene.need(world, 2),
        scene.stall(alive=(1,), needed=2),
        scene.tick(TIMEOUT),
    ]
    assert nothing == [[]] * 6
    assert kinds(scene.change(left=killed(2))) == ["AdoptMembership", "DropPeer"]
    assert scene.close(part) == [CloseGeneration(part)], "and nobody is told"
    assert kinds(scene.change(left=killed(3))) == ["AdoptMembership", "DropPeer"]


def test_termination_replaces_a_revocation_and_a_stall() -> None:
    scene = Scene()
    world, part = scene.begin(), scene.begin(communicator=PART)
    scene.revoke(world)
    scene.stall(alive=(1,), needed=2)
    assert scene.terminate() == [SetOutcome(world, EXPELLED), SetOutcome(part, EXPELLED)]


def test_a_first_build_that_finishes_after_the_termination_is_opened_with_that_outcome() -> None:
    scene = Scene()
    (first,) = scene.request()
    assert isinstance(first, StartBuild)
    scene.terminate()
    assert scene.finish(first) == [
        OpenGeneration(1, first.key, None),
        Interrupt(first.key),
        SetOutcome(first.key, EXPELLED),
    ]


def test_a_node_that_its_user_closes_interrupts_nothing_and_discards_what_is_built() -> None:
    scene = Scene()
    world = scene.begin()
    (first,) = scene.request(1, 2, communicator=PART)
    assert isinstance(first, StartBuild)
    assert scene.terminate(CLOSED) == [SetOutcome(world, CLOSED), AbortBuild(first.build, REJECTED)]
    assert scene.finish(first) == [DiscardBuild(first.build)]


# ---------------------------------------------------------------- the history


def test_the_oldest_changes_are_forgotten() -> None:
    scene = Scene()
    part = scene.begin(1, 2, communicator=PART)
    for _ in range(MAX_CHANGES + 5):
        scene.change(renewed=(PART + 1,))
    assert len(scene.machine._history._changes) == MAX_CHANGES
    assert only(scene.change(left=killed(2))).membership.epoch == scene.machine.world.epoch
    assert scene.machine.gone_from(membership(1, 2, 9)) == {2: "node 2 was killed", 9: "it is no longer a member"}
    assert scene.machine.membership(part) == membership(1, 2)


def test_a_target_is_remembered_longer_than_the_change_that_made_it() -> None:
    scene = Scene()
    part = scene.begin(1, 2, 3, communicator=PART)
    scene.fail(only(scene.change(left=killed(2))), TIMED_OUT)
    for _ in range(MAX_CHANGES + 1):
        scene.change(renewed=(PART + 1,))
    assert scene.machine.is_concerned(part)


def test_events_about_unknown_generations_and_builds_do_nothing() -> None:
    scene = Scene()
    unknown = key(PART, 3)
    assert scene.close(unknown) == scene.revoke(unknown) == scene.release(unknown) == scene.tick() == []
    assert scene.step(BuildFinished(77)) == []
    assert scene.machine.missing(unknown) == ()
    assert scene.machine.outcome(unknown) is scene.machine.membership(unknown) is None
    assert not scene.machine.is_concerned(unknown)


def test_only_a_generation_without_a_successor_is_closed() -> None:
    scene = Scene()
    part = scene.begin(1, 2, 3, communicator=PART)
    (*_, made) = scene.change(left=killed(2))
    assert isinstance(made, StartBuild)
    scene.finish(made)
    assert scene.close(part) == []
    assert not scene.machine.is_closed(part)
    assert scene.close(made.key) == [CloseGeneration(made.key)]
    assert scene.machine.is_closed(made.key)


def test_notices_about_generations_that_are_over_here_are_not_kept() -> None:
    scene = Scene()
    world, part = scene.begin(), scene.begin(1, 2, 3, communicator=PART)
    scene.close(part)
    scene.hear(2, part, 1, closed=True)
    (made,) = (action for action in scene.change(left=killed(2)) if isinstance(action, StartBuild))
    scene.finish(made)
    scene.hear(3, world, 2)
    assert scene.machine.remembered()[2] == 0
    scene.hear(3, key(PART + 1, 2), 1)
    assert scene.machine.remembered()[2] == 1
