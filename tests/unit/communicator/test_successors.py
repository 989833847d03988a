"""What calls raise on communicators that are over: with what to go on, or why there is nothing.

The communicators of one node, from change to change: who is interrupted, and what follows.
"""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from nexar.cluster.decisions.completion import NEW_MEMBER, NONE_COMPLETED
from nexar.cluster.decisions.membership_events import MembershipAction, MembershipDecided, NoProgress
from nexar.cluster.decisions.successor_events import GenerationKey, Released, StartBuild
from nexar.cluster.membership import WORLD, Change
from nexar.communicator import successors
from nexar.communicator.communicator import Communicator
from nexar.communicator.events import FailureEvent, MembershipEvent
from nexar.communicator.generation import Generation
from nexar.communicator.local import local_communicators
from nexar.communicator.successors import Successors
from nexar.config import Config
from nexar.errors import (
    CollectiveTimeout,
    Expelled,
    LinkClosed,
    MembershipChanged,
    NexarError,
    NoQuorum,
    OperationTimeout,
    PeerError,
    PeerLost,
    PeerMisbehaved,
    RecoveryTimeout,
    Revoked,
    UsageError,
)
from nexar.group import deadline_after
from tests.ranks import EVENT_TIMEOUT, on_every
from tests.unit.cluster.memory_mesh import eventually, soon
from tests.unit.communicator.generations import interruptions
from tests.unit.communicator.scripted import membership
from tests.unit.communicator.successor_worlds import PART, Story, expel, nodes

# ---------------------------------------------------------------- what calls raise


def test_what_is_no_consequence_of_a_change_is_raised_as_it_is(story: Story) -> None:
    world = story.begin()
    for error in (
        UsageError("a mistake"),
        CollectiveTimeout(operation="barrier", sequence=1, waiting_for=[], timeout=1),
    ):
        assert story.successors.resolve_error(world, error) is error
    story.change(2)
    story.successor(world)
    assert story.successors.resolve_error(world, error) is error


def test_a_caller_waits_longer_while_this_node_is_delayed(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    world, now, deadlines = story.begin(), [100.0], list[float]()

    def times_out(_: object, deadline: float) -> None:
        deadlines.append(deadline)
        now[0] = deadline
        raise OperationTimeout(operation="recovery", waiting_for=[], timeout=1)

    monkeypatch.setattr(successors, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(world.group, "wait", times_out)
    monkeypatch.setattr(story.runner, "own_delay", lambda: 2.0 if now[0] > 100.0 else 0.0)
    lost = PeerLost(rank=1, node=2, cause="gone")
    assert story.successors.resolve_error(world, lost) is lost
    first = 100.0 + 1.5 * story.successors._config.recovery_timeout
    assert deadlines == [first, first + 2.0]


def test_a_task_waits_longer_while_this_node_is_delayed(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """It suspends until the same deadlines as a thread."""
    world, deadlines = story.begin(), [float("-inf"), time.monotonic() + 0.05, float("-inf")]
    monkeypatch.setattr(story.successors, "_wait_deadlines", lambda _: iter(deadlines))
    lost = PeerLost(rank=1, node=2, cause="gone")
    assert asyncio.run(story.successors.resolve_awaited_error(world, lost)) is lost


def test_under_the_automatic_policy_a_lost_peer_is_looked_into_and_waited_for(story: Story) -> None:
    world = story.begin()
    story.report_unreachable = lambda node, _: story.soon(lambda: story.change(node))  # type: ignore[method-assign]
    change = story.raised(world, PeerLost(rank=2, cause="connection reset"))
    assert isinstance(change, MembershipChanged)
    assert change.lost == {2: "node 3 was killed"}


@pytest.mark.parametrize("error", [PeerLost(node=3, cause="no member"), LinkClosed(rank=9, node=3)])
def test_who_went_quietly_is_missed_by_who_needs_it_and_then_there_is_a_successor(
    story: Story, error: NexarError
) -> None:
    world, part = story.begin(), story.begin(1, 2, 3, communicator=PART)
    story.change(3, quiet=True)
    assert not world.interrupted
    assert story.builder.lost == [3], "who waits for it is told"
    story.machine.renew = lambda which, epoch: story.soon(lambda: story.change(renewed=which)) if epoch == 2 else None
    change = story.raised(world, error)
    assert isinstance(change, MembershipChanged)
    assert change.lost == {2: "it left"}
    assert not part.interrupted


def test_who_needed_it_before_it_went_asks_again_after_each_change_that_is_none_for_it(story: Story) -> None:
    story.widen()
    part = story.begin(1, 2, 4, communicator=PART)
    result = story.successors.outcome_to_await(part, PeerLost(node=4, cause="connection reset"))
    assert (result, story.missed, story.renewals) == (part.outcome, [4], [])
    story.change(4, quiet=True)
    story.change(3, quiet=True)
    assert story.renewals == [((PART,), 2), ((PART,), 3)]
    story.change(renewed=(PART,))
    assert nodes(story.successor(part)) == [1, 2]
    story.change(2)
    assert len(story.renewals) == 2


def test_without_a_quorum_who_needs_one_that_went_quietly_is_notified_and_others_are_not(story: Story) -> None:
    part, other = (story.begin(1, 3, communicator=each) for each in (PART, PART + 1))
    story.change(3, quiet=True)
    assert story.successors.outcome_to_await(part, PeerLost(node=3, cause="it left")) is part.outcome
    story.runner.put(NoProgress(alive=(1,), needed=2))
    assert isinstance(story.raised(part), NoQuorum)
    assert not other.interrupted


def test_under_the_manual_policy_who_went_quietly_is_named_by_its_rank_there(make_story: Callable[..., Story]) -> None:
    story = make_story(recovery_policy="manual")
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
def test_under_the_other_policies_a_lost_peer_is_raised_at_once(make_story: Callable[..., Story], policy: str) -> None:
    story = make_story(recovery_policy=policy)
    error = PeerLost(rank=1, node=2, cause="connection reset", operation="barrier #3")
    given = story.raised(story.begin(), error)
    assert isinstance(given, PeerLost)
    assert (given.rank, given.node, given.cause, given.operation) == (1, 2, "connection reset", "barrier #3")
    assert (given is error) == (policy == "abort")
    assert ("comm.shrink()" in str(given)) == (policy == "manual")
    assert story.missed == ([2] if policy == "manual" else []), "it is looked into, and who shrinks does so without it"


@pytest.mark.parametrize("policy", ["automatic", "manual", "abort"])
def test_a_member_is_named_by_its_rank_there_and_not_by_that_of_its_link(
    make_story: Callable[..., Story], policy: str
) -> None:
    story = make_story(recovery_policy=policy)
    part = story.begin(3, 1, communicator=PART)
    errors: list[PeerError] = [PeerMisbehaved(rank=2, node=3, what="nonsense")]
    if policy == "abort":  # the others await an outcome, or ask for it
        errors.append(PeerLost(rank=2, node=3, cause="connection reset", operation="barrier #3"))
    for error in errors:
        given = story.raised(part, error)
        assert isinstance(given, type(error))
        assert (given.rank, given.node) == (0, 3)
        assert "rank 0" in str(given)
        assert "rank 2" not in str(given)


def test_under_the_manual_policy_calls_on_the_old_one_say_how_to_get_the_next(make_story: Callable[..., Story]) -> None:
    story = make_story(recovery_policy="manual")
    world = story.begin()
    story.change(2)
    story.successor(world)
    error = story.raised(world)
    assert isinstance(error, PeerLost)
    assert (error.rank, error.node) == (1, 2)
    assert error.cause == "node 2 was killed"
    assert str(error).endswith("comm.shrink() gives the next communicator")


def test_without_a_quorum_who_needs_the_lost_is_notified_and_others_are_not(story: Story) -> None:
    world, part = story.begin(), story.begin(1, 3, communicator=PART)
    story.runner.put(NoProgress(alive=(1, 3), needed=3))
    error = story.raised(world)
    assert isinstance(error, NoQuorum)
    assert (list(error.alive), error.needed) == ([0, 2], 3)
    assert not part.outcome.done
    assert not part.interrupted


def test_who_has_no_quorum_may_still_learn_that_the_others_went_on(story: Story) -> None:
    world = story.begin()
    story.runner.put(NoProgress(alive=(1,), needed=2))
    assert isinstance(story.raised(world), NoQuorum)
    story.change(2)
    story.successor(world)
    assert isinstance(story.raised(world), MembershipChanged)


def test_ranks_that_left_are_named_where_the_rest_is_no_majority(story: Story) -> None:
    world = story.begin()
    story.runner.put(NoProgress(alive=(1,), needed=2, left=(2, 3)))
    error = story.raised(world)
    assert isinstance(error, NoQuorum)
    assert list(error.left) == [1, 2]
    assert "network" not in str(error)


def test_votes_that_are_missing_are_named(story: Story) -> None:
    world = story.begin()
    story.runner.put(NoProgress(alive=(1, 2), needed=2, missing_votes=(2, 99)))
    error = story.raised(world)
    assert isinstance(error, RecoveryTimeout)
    assert list(error.missing_votes) == [1]


def test_who_was_expelled_is_notified_on_every_communicator_and_makes_no_other(story: Story) -> None:
    world, part = story.begin(), story.begin(3, 1, communicator=PART)
    expel(story.runner, 4, "it was silent")
    for generation, rank in ((world, 0), (part, 1)):
        error = story.raised(generation)
        assert isinstance(error, Expelled)
        assert (error.epoch, error.reason, error.rank) == (4, "it was silent", rank)
    with pytest.raises(Expelled):
        story.successors.wait_for_successor(world, soon())
    assert story.successors.wait_for_following(WORLD, story.world, soon()) is None


def test_who_is_expelled_while_a_communicator_is_made_is_notified(story: Story) -> None:
    story.begin()
    story.builder.held = threading.Event()
    threading.Timer(0.02, expel, (story.runner, 4, "it was silent")).start()
    with pytest.raises(Expelled):
        story.begin(1, 2, communicator=PART)


def test_who_is_expelled_before_it_has_any_communicator_is_notified(story: Story) -> None:
    story.on_opened = lambda _: expel(story.runner, 4, "it was silent")  # type: ignore[method-assign]
    error = story.raised(story.begin())
    assert isinstance(error, Expelled)
    assert error.rank == 0


# ---------------------------------------------------------------- successors


def test_a_loss_interrupts_the_world_and_its_calls_raise_with_the_successor(story: Story) -> None:
    world = story.begin()
    story.change(2)
    assert interruptions(world)
    successor = story.successor(world)
    assert (nodes(successor), successor.membership.epoch) == ([1, 3], 2)
    change = story.raised(world)
    assert isinstance(change, MembershipChanged)
    assert change.communicator == ("communicator of", successor)
    assert (change.lost, change.joined) == ({1: "node 2 was killed"}, ())
    assert story.opened == [world, successor]
    assert story.successors.generations() == [successor]


def test_who_joined_is_named_by_its_new_rank(story: Story) -> None:
    world = story.begin()
    story.change(2, joined=(8, 9))
    story.successor(world)
    change = story.raised(world)
    assert isinstance(change, MembershipChanged)
    assert (change.lost, change.joined) == ({1: "node 2 was killed"}, (2, 3))


@pytest.mark.parametrize(
    ("mine", "others", "reported"), [(4, 3, 3), (4, 9, 4), (4, NONE_COMPLETED, None), (NONE_COMPLETED, 4, None)]
)
def test_the_last_call_that_all_completed_is_reported(
    story: Story, mine: int, others: int, reported: int | None
) -> None:
    world = story.begin()
    cast(Any, world.context).completed = mine
    story.builder.least = others
    story.change(2)
    story.successor(world)
    change = story.raised(world)
    assert isinstance(change, MembershipChanged)
    assert change.completed_by_all == reported


def test_a_part_that_lost_nobody_is_left_alone(story: Story) -> None:
    world, part = story.begin(), story.begin(1, 3, communicator=PART)
    story.change(2)
    story.successor(world)
    assert not interruptions(part)
    assert not part.outcome.done
    assert part in story.successors.generations()
    assert not story.successors.is_concerned(part)


def test_each_communicator_that_is_concerned_gets_its_own(story: Story) -> None:
    later, part, world = (story.begin(1, 2, communicator=each) for each in (PART + 1, PART, WORLD))
    story.builder.begun.clear()
    story.change(2)
    for generation in (world, part, later):
        story.successor(generation)
    assert sorted(group.communicator for group in story.builder.begun) == [WORLD, PART, PART + 1]


def test_a_change_that_comes_while_a_successor_is_made_ends_that_and_the_last_one_counts(story: Story) -> None:
    world = story.begin()
    story.builder.held = threading.Event()
    story.change(2)
    eventually(lambda: len(story.builder.begun) == 2, "a successor in the making")
    story.change(3)
    assert story.builder.begun[1].closed.is_set()
    story.builder.held.set()
    successor = story.successor(world)
    assert (nodes(successor), successor.membership.epoch) == ([1], 3)
    change = story.raised(world)
    assert isinstance(change, MembershipChanged)
    assert change.lost == {1: "node 2 was killed", 2: "node 3 was killed"}


def test_a_build_has_the_deadline_that_the_machine_gives_it(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    story.begin()
    step = story.machine.successor_machine.step

    def limited(event: Any, now: float) -> Any:
        actions = step(event, now)
        return [msgspec.structs.replace(act, until=now - 1) if isinstance(act, StartBuild) else act for act in actions]

    monkeypatch.setattr(story.machine.successor_machine, "step", limited)
    story.change(2)
    assert story.builder.timeouts == [0.0]


def test_a_change_that_does_not_concern_a_part_lets_its_successor_be_made(story: Story) -> None:
    story.widen()
    part = story.begin(1, 2, 3, communicator=PART)
    story.builder.held = threading.Event()
    story.change(2)
    eventually(lambda: len(story.builder.begun) == 2, "a successor in the making")
    story.change(4)
    assert not story.builder.begun[1].closed.is_set()
    story.builder.held.set()
    assert (nodes(story.successor(part)), story.successor(part).membership.epoch) == ([1, 3], 2)


def test_a_communicator_that_was_made_while_a_member_died_is_interrupted_at_once(story: Story) -> None:
    part = _begin_before_hearing(story)
    assert interruptions(part)
    assert nodes(story.successor(part)) == [1, 3]


def _begin_before_hearing(story: Story) -> Generation:
    """All were there when it was made; the change was received before it was handed out."""
    story.live_in(membership([1, 2, 3], 2))
    changed: list[Generation] = []

    def opened(generation: Generation) -> None:
        if not changed:
            changed.append(generation)
            story.change(2)

    story.on_opened = opened  # type: ignore[method-assign]
    return story.begin(communicator=PART)


def test_one_that_was_made_when_its_making_was_aborted_is_closed_and_not_handed_out(story: Story) -> None:
    """A member that left quietly: the others may have ended their part in it."""
    story.on_opened = lambda _: story.change(3, quiet=True)  # type: ignore[method-assign]
    with pytest.raises(PeerLost, match="it left"):
        story.begin(1, 2, 3, communicator=PART)
    assert [(group.left, group.closed.is_set()) for group in story.builder.begun] == [(1, True)]
    assert story.successors.generations() == []


def test_one_that_cannot_be_made_names_who_is_missed_and_waits_for_the_next_change(story: Story) -> None:
    world = story.begin()
    story.builder.failures = [PeerLost(rank=1, node=3, cause="it died as well")]
    story.change(2)
    eventually(lambda: story.missed == [3], "a word about who is missed")
    assert not world.outcome.done
    story.change(3)
    assert nodes(story.successor(world)) == [1]


def test_where_no_other_change_comes_there_is_none(make_story: Callable[..., Story]) -> None:
    story = make_story(recovery_timeout=0.05)
    world = story.begin()
    story.builder.failures = [PeerLost(rank=1, node=3, cause="it died as well")]
    story.change(2)
    late = story.raised(world)
    assert isinstance(late, RecoveryTimeout)
    assert late.missing_votes == story.successors.missing(world) == (2,)
    assert not story.successors.is_concerned(world)
    story.change(renewed=(WORLD,))  # asked for
    assert nodes(story.successor(world)) == [1, 3]


def test_one_that_cannot_be_made_holds_up_no_other(story: Story) -> None:
    part, other = (story.begin(1, 2, 3, communicator=each) for each in (PART, PART + 1))
    story.builder.failures, story.builder.only = [PeerLost(rank=1, node=3, cause="it has closed this part")], PART
    story.change(2)
    assert nodes(story.successor(other)) == [1, 3]
    eventually(lambda: story.missed == [3], "it has failed")
    assert not part.outcome.done
    story.change(renewed=(PART,))
    assert nodes(story.successor(part)) == [1, 3]


def test_one_whose_members_do_not_come_keeps_no_other_waiting(story: Story) -> None:
    part, other = (story.begin(1, 2, 3, communicator=each) for each in (PART, PART + 1))
    story.builder.held, story.builder.only = threading.Event(), PART
    story.change(2)
    assert nodes(story.successor(other)) == [1, 3]
    assert not part.is_superseded
    story.builder.held.set()
    assert nodes(story.successor(part)) == [1, 3]


def test_a_mistake_of_ours_is_logged_and_calls_do_not_wait_for_ever(
    make_story: Callable[..., Story], caplog: pytest.LogCaptureFixture
) -> None:
    story = make_story(recovery_timeout=0.05)
    world = story.begin()
    story.builder.failures = [ZeroDivisionError("in our code")]
    story.change(2)
    assert isinstance(story.raised(world), RecoveryTimeout)
    assert "no successor of communicator 0" in caplog.text


def test_a_successor_is_handed_over_before_it_gets_one_itself(story: Story) -> None:
    world, order = story.begin(), list[str]()
    make = story.builder.make

    def wrap(generation: Generation) -> tuple[str, Generation]:
        if generation.membership.epoch == 2:
            story.change(3)  # gives it a successor before anybody holds it
        order.append(f"wrapped {generation.membership.epoch}")
        return "communicator of", generation

    def counting(members: Any, *facts: Any) -> Any:
        order.append(f"made {members.epoch}")
        return make(members, *facts)

    story.wrap, story.builder.make = wrap, counting  # type: ignore[method-assign]
    story.change(2)
    eventually(lambda: nodes(story.successor(world)) == [1], "that it leads to the newest")
    assert order == ["made 2", "wrapped 2", "made 3", "wrapped 3"]


def test_one_that_its_user_closes_while_its_successor_is_made_has_none(story: Story) -> None:
    part = story.begin(1, 2, 3, communicator=PART)
    story.builder.held = threading.Event()
    story.change(2)
    eventually(lambda: len(story.builder.begun) == 2, "a successor in the making")
    story.successors.forget(part)
    story.builder.held.set()
    eventually(story.builder.begun[1].closed.is_set, "it is closed")
    assert story.successors.generations() == []
    assert story.builder.begun[1].left == 1, "a member that opened it does not wait"
    assert part.successor is None


def test_the_driver_does_not_wait_for_the_listeners_of_one_that_its_user_closed(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a feed waits for its callbacks, which may wait for the driver."""
    part, ended_by = story.begin(1, 2, 3, communicator=PART), list[str]()
    end = Generation.end

    def recorded(generation: Generation) -> None:
        ended_by.append(threading.current_thread().name)
        end(generation)

    monkeypatch.setattr(Generation, "end", recorded)
    story.builder.held = threading.Event()
    story.change(2)
    eventually(lambda: len(story.builder.begun) == 2, "a successor in the making")
    story.successors.forget(part)
    story.builder.held.set()
    eventually(lambda: not story.successors._in_background, "it is discarded")
    assert story.builder.begun[1].closed.is_set()
    assert ended_by == [threading.current_thread().name]
    assert part.failures._closed


def test_who_waits_has_the_outcome_with_the_successor(story: Story) -> None:
    world = story.begin()
    world.successor = "about to be handed over"
    assert story.successors.wait_for_successor(world, time.monotonic() + 0.01) == "about to be handed over"
    given: list[Any] = []
    waits = threading.Thread(target=lambda: given.append(story.successors.wait_for_successor(world, soon())))
    waits.start()
    story.change(2)
    waits.join()
    assert isinstance(world.outcome.error, MembershipChanged)
    assert given == [world.outcome.error.communicator]


def test_a_successor_notifies_the_listeners_of_the_one_before_from_the_moment_it_can_be_found(story: Story) -> None:
    world = story.begin()
    feeds: list[bool] = []

    def wrap(generation: Generation) -> tuple[str, Generation]:
        assert story.successors.generations() == [generation]
        feeds.append(generation.failures is world.failures)
        return "communicator of", generation

    story.wrap = wrap  # type: ignore[method-assign]
    story.change(2)
    story.successor(world)
    assert feeds == [True]


def test_listeners_learn_of_each_step_and_go_on_with_the_successor(story: Story) -> None:
    world = story.begin()
    steps: list[MembershipEvent] = []
    with world.memberships.subscribe(steps.append):
        story.change(2)
        successor = story.successor(world)
        story.change(3)
        story.successor(successor)
        eventually(lambda: len(steps) == 2, "two events")
    assert [(step.epoch, step.old_size, step.size, step.rank) for step in steps] == [(2, 3, 2, 0), (3, 2, 1, 0)]
    assert steps[1].left == {1: "node 3 was killed"}


def test_one_that_the_user_has_closed_gets_none(story: Story) -> None:
    story.begin()
    part = story.begin(1, 2, communicator=PART)
    assert story.successors.find(PART, 1) is part
    story.successors.forget(part)
    assert story.successors.find(PART, 1) is None
    story.change(2)
    assert not part.interrupted


def test_closing_one_that_has_a_successor_does_not_end_the_events_of_the_successor(story: Story) -> None:
    part = story.begin(1, 2, 3, communicator=PART)
    events: list[Any] = []
    part.memberships.subscribe(events.append)
    story.change(2)
    successor = story.successor(part)
    story.successors.forget(part)
    story.change(3)
    story.successor(successor)
    eventually(lambda: [event.epoch for event in events] == [2, 3], "events of both changes")


def test_closing_one_ends_the_waits_of_other_threads_for_its_outcome_and_successor(story: Story) -> None:
    part = story.begin(1, 2, 3, communicator=PART)
    story.builder.held = threading.Event()
    story.change(2)
    eventually(lambda: len(story.builder.begun) == 2, "a successor in the making")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(story.successors.wait_for_successor, part, time.monotonic() + 3600.0)
        story.successors.forget(part)
        with pytest.raises(UsageError, match="this communicator is closed"):
            waiting.result(EVENT_TIMEOUT)
    assert isinstance(part.outcome.error, LinkClosed)
    story.builder.held.set()


def test_others_are_notified_what_is_closed_here_when_they_make_a_successor_of_it(story: Story) -> None:
    part, other = story.begin(1, 2, 3, communicator=PART), story.begin(1, 3, communicator=PART + 1)
    story.successors.forget(part)
    story.successors.forget(other)
    assert story.notices == []
    story.change(2)
    assert [(notice.key, notice.nodes, notice.closed) for notice in story.notices] == [((PART, 1), (3,), True)]


def test_what_is_closed_while_its_successor_is_made_is_reported_if_that_fails(story: Story) -> None:
    part = story.begin(1, 2, 3, communicator=PART)
    story.builder.held, story.builder.failures = threading.Event(), [PeerLost(node=3, cause="it died")]
    story.change(2)
    eventually(lambda: len(story.builder.begun) == 2, "a successor in the making")
    story.successors.forget(part)
    assert story.notices == []
    story.builder.held.set()
    eventually(lambda: [notice.key for notice in story.notices] == [(PART, 1)], "a word to the others")


def test_a_member_that_closed_it_ends_the_making_and_the_outcome_names_it(story: Story) -> None:
    part = story.begin(1, 2, 3, communicator=PART)
    story.builder.held = threading.Event()
    story.change(2)
    eventually(lambda: len(story.builder.begun) == 2, "a successor in the making")
    story.closed_by(part, 3)
    error = story.raised(part)
    assert isinstance(error, Revoked)
    assert (error.rank, error.closed) == (2, True)
    assert story.successors.is_blocked_by_close(part)
    assert story.successors.wait_for_successor(part, soon()) is None
    story.builder.held.set()
    story.change(3)
    assert not story.successors.is_blocked_by_close(part)
    assert nodes(story.successor(part)) == [1]


def test_a_member_that_closed_it_before_the_making_has_begun_is_not_waited_for(story: Story) -> None:
    part = story.begin(1, 2, 3, communicator=PART)
    story.builder.held = threading.Event()
    make = story.builder.make

    def closing(*facts: Any) -> Any:  # the last moment before the group is made
        story.closed_by(part, 3)
        return make(*facts)

    story.builder.make = closing  # type: ignore[method-assign]
    story.change(2)
    assert isinstance(story.raised(part), Revoked)
    story.builder.held.set()


def test_one_that_was_made_in_the_moment_a_member_closed_it_is_given_up(story: Story) -> None:
    part = story.begin(1, 2, 3, communicator=PART)

    def opened(made: Generation) -> None:
        if made is not part:
            story.closed_by(part, 3)

    story.on_opened = opened  # type: ignore[method-assign]
    story.change(2)
    assert isinstance(story.raised(part), Revoked)
    eventually(cast(Any, story.builder.made[-1].group).closed.is_set, "it is closed")
    assert story.successors.generations() == [part]


def test_who_waits_for_what_comes_after_a_generation_gets_it_or_none_in_time(story: Story) -> None:
    first = story.world
    story.change(3, quiet=True)
    assert story.successors.wait_for_following(WORLD, first, time.monotonic() + 0.01) is None
    threading.Timer(0.01, story.change, (2,)).start()
    assert story.successors.wait_for_following(WORLD, first, soon()) == membership([1], 3)


# ---------------------------------------------------------------- the end


def test_closing_ends_every_communicator_and_whoever_waits(story: Story) -> None:
    world = story.begin()
    story.builder.held = threading.Event()
    story.change(2)
    eventually(lambda: len(story.builder.begun) == 2, "a successor in the making")
    story.successors.close()
    with pytest.raises(UsageError, match="this node is closed"):
        story.successors.wait_for_successor(world, soon())
    with pytest.raises(UsageError, match="closed"):
        world.outcome.check()
    assert story.successors.generations() == []


def test_what_is_made_in_the_very_moment_of_closing_is_closed_too(story: Story) -> None:
    world = story.begin()
    closing: list[threading.Thread] = []

    def close_meanwhile(generation: Generation) -> None:
        if generation is not world:
            closes = threading.Thread(target=story.successors.close)
            closes.start()
            closing.append(closes)
            eventually(lambda: story.machine.successor_machine.terminated is not None, "it closes")

    story.on_opened = close_meanwhile  # type: ignore[method-assign]
    story.change(2)
    eventually(lambda: closing and not closing[0].is_alive(), "it has closed")
    closing[0].join()
    assert [cast(Any, made.group).closed.is_set() for made in story.builder.made] == [True, True]
    assert story.successors.generations() == []


def test_what_a_user_makes_in_the_very_moment_of_closing_is_closed_too(story: Story) -> None:
    story.on_opened = lambda _: story.successors.close()  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="closed"):
        story.begin()
    assert [cast(Any, made.group).closed.is_set() for made in story.builder.made] == [True]


def test_who_waits_for_the_successor_of_a_barred_generation_is_notified_at_once(story: Story) -> None:
    part = story.begin(1, 2, 3, communicator=PART)
    story.builder.held = threading.Event()
    story.change(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(story.successors.wait_for_successor, part, time.monotonic() + 3600.0)
        story.closed_by(part, 3)
        assert waiting.result(EVENT_TIMEOUT) is None
    story.builder.held.set()


def test_a_change_that_comes_when_a_successor_was_just_made_interrupts_it(story: Story) -> None:
    world = story.begin()
    changed: list[Generation] = []

    def opened(made: Generation) -> None:  # it is made, and not listed yet
        if made is not world and not changed:
            changed.append(made)
            story.change(3)

    story.on_opened = opened  # type: ignore[method-assign]
    story.change(2)
    eventually(lambda: world.is_superseded, "a successor")
    first = changed[0]
    eventually(lambda: bool(interruptions(first)), "its calls end")
    assert nodes(story.successor(first)) == [1]


def test_who_waits_is_notified_the_bar_also_when_the_successor_was_tried_in_vain_before(
    make_story: Callable[..., Story],
) -> None:
    story = make_story(recovery_timeout=10 * EVENT_TIMEOUT)
    part = story.begin(1, 2, 3, communicator=PART)
    story.builder.failures, story.builder.only = [LinkClosed(owner="a test")], PART
    story.change(2)
    eventually(lambda: story.successors.missing(part) != (), "it has failed")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(story.successors.wait_for_successor, part, time.monotonic() + 2 * EVENT_TIMEOUT)
        story.closed_by(part, 3)
        assert waiting.result(EVENT_TIMEOUT) is None


OTHER = 77


@pytest.fixture
def four() -> Iterator[list[Communicator]]:
    with local_communicators(4, Config()) as made:
        yield made


def successors_of(comm: Communicator) -> Successors:
    return comm._runtime.successors


class Making:
    """One rank makes a communicator with others, who never take part; begun when this has returned."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.raised: NexarError | None = None
        self._thread = threading.Thread(target=self._make)
        self._thread.start()
        while not successors_of(comm)._building:
            self._thread.join(0.001)

    def _make(self) -> None:
        comm = self._comm
        try:
            successors_of(comm).begin(comm.membership, OTHER, deadline_after(10 * EVENT_TIMEOUT), completed=NEW_MEMBER)
        except NexarError as error:
            self.raised = error

    def end(self) -> NexarError | None:
        self._thread.join(EVENT_TIMEOUT)
        return self.raised


def meanwhile(comm: Communicator, happening: Callable[[], None]) -> NexarError | None:
    making = Making(comm)
    happening()
    return making.end()


def test_who_makes_a_communicator_does_not_wait_for_those_that_a_change_has_called_away(
    four: list[Communicator],
) -> None:
    """The first rank waits for the last, which has learned of the change and will never take part."""
    raising = ValueError("no")
    assert isinstance(meanwhile(four[0], lambda: four[2].__exit__(ValueError, raising, None)), LinkClosed)
    survivors = [four[0], four[1], four[3]]
    successors = on_every(survivors, lambda comm: comm.shrink())
    assert on_every(successors, lambda comm: comm.all_reduce(1)) == [3, 3, 3]
    assert successors_of(four[0])._building == {}


def test_who_makes_a_communicator_with_one_that_closes_is_notified_and_then_there_is_a_successor(
    four: list[Communicator],
) -> None:
    raised = meanwhile(four[0], four[2].close)
    assert isinstance(raised, PeerLost)
    survivors = [four[0], four[1], four[3]]
    successors = on_every(survivors, lambda comm: comm.shrink())
    assert on_every(successors, lambda comm: comm.all_reduce(1)) == [3, 3, 3]


def test_who_is_expelled_before_its_first_communicator_learns_why(four: list[Communicator]) -> None:
    all_successors = successors_of(four[0])
    all_successors.forget(four[0]._generation)
    raised = meanwhile(four[0], lambda: expel(four[0]._runtime._runner, 2, "nobody could reach it"))
    assert isinstance(raised, Expelled)
    assert raised.reason == "nobody could reach it"


# ---------------------------------------------------------------- order of performing


def test_a_change_that_an_action_causes_is_performed_after_it(story: Story) -> None:
    """The last member of a world decides at once that it continues without a departed one."""
    part = story.begin(1, 3, communicator=PART)
    story.change(3, quiet=True)

    def renew(which: tuple[int, ...], epoch: int) -> list[MembershipAction]:
        return [MembershipDecided(Change(epoch + 1, renewed=which))]

    story.machine.renew = renew
    change = story.raised(part, PeerLost(node=3, cause="it left"))
    assert isinstance(change, MembershipChanged)
    assert nodes(story.successor(part)) == [1]


def test_an_ancestor_that_nobody_refers_to_is_forgotten(story: Story) -> None:
    world = story.begin()
    story.change(2)
    second = story.successor(world)
    del world
    story.opened.clear()
    story.builder.made.clear()
    story.builder.begun.clear()

    def is_forgotten() -> bool:
        gc.collect()
        return list(story.runner._deferred) == [Released(GenerationKey(WORLD, 1))]

    eventually(is_forgotten, "the garbage collector has found it")
    story.change(3)
    story.successor(second)
    assert set(story.machine.successor_machine._superseded) == {(WORLD, 2)}


# ---------------------------------------------------------------- who goes quietly


def test_one_that_is_made_with_who_went_quietly_is_made_again_without_it(story: Story) -> None:
    story.widen()
    world = story.begin()
    story.builder.held = threading.Event()
    story.change(2)
    eventually(lambda: len(story.builder.begun) == 2, "a successor in the making")
    story.change(4, quiet=True)
    eventually(lambda: story.renewals == [((WORLD,), 3)], "a wish for the next")
    story.builder.held.set()
    story.change(renewed=(WORLD,))
    successor = story.successor(world)
    assert (nodes(successor), successor.membership.epoch) == ([1, 3], 4)
    change = story.raised(world)
    assert isinstance(change, MembershipChanged)
    assert change.lost == {1: "node 2 was killed", 3: "it left"}


def test_none_is_begun_with_who_went_quietly(story: Story) -> None:
    first = story.world
    story.change(3, quiet=True)
    with pytest.raises(PeerLost, match="it left"):
        story.successors.begin(first, PART, soon())
    assert story.begin(1, 2, communicator=PART + 1).membership.size == 2


def test_listeners_learn_who_went_quietly(story: Story) -> None:
    part = story.begin(3, 1, communicator=PART)
    received: list[FailureEvent] = []
    with part.failures.subscribe(received.append):
        story.change(3, quiet=True)
        story.change(2)
        eventually(lambda: bool(received), "an event")
    assert [(each.rank, each.node, each.cause, each.state) for each in received] == [(0, 3, "it left", "left")]
