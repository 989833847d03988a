"""The communicators of one node, from change to change: who is interrupted, and what follows."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from nexar.cluster.change import WORLD, Change, Departure
from nexar.communicator.absences import Absence
from nexar.communicator.branch import Branch
from nexar.communicator.events import MembershipEvent
from nexar.communicator.settling import NOTHING
from nexar.errors import (
    LinkClosed,
    MembershipChanged,
    PeerLost,
    RecoveryTimeout,
    Revoked,
    UsageError,
)
from tests.ranks import PATIENCE
from tests.unit.cluster.memory_mesh import eventually, soon
from tests.unit.communicator.branches import interruptions
from tests.unit.communicator.lineages import PART, Story, nodes
from tests.unit.communicator.scripted import membership

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
    assert story.lineage.branches() == [successor]


def test_who_joined_is_told_by_its_new_rank(story: Story) -> None:
    world = story.begin()
    story.change(2, joined=(8, 9))
    story.successor(world)
    change = story.raised(world)
    assert isinstance(change, MembershipChanged)
    assert (change.lost, change.joined) == ({1: "node 2 was killed"}, (2, 3))


@pytest.mark.parametrize(("mine", "others", "told"), [(4, 3, 3), (4, 9, 4), (4, NOTHING, None), (NOTHING, 4, None)])
def test_the_last_call_that_all_completed_is_told(story: Story, mine: int, others: int, told: int | None) -> None:
    world = story.begin()
    cast(Any, world.assembly).completed = mine
    story.maker.least = others
    story.change(2)
    story.successor(world)
    change = story.raised(world)
    assert isinstance(change, MembershipChanged)
    assert change.completed_by_all == told


def test_a_part_that_lost_nobody_is_left_alone(story: Story) -> None:
    world, part = story.begin(), story.begin(1, 3, communicator=PART)
    story.change(2)
    story.successor(world)
    assert not interruptions(part)
    assert not part.fate.done
    assert part in story.lineage.branches()
    assert not story.lineage.is_concerned(part)


def test_each_communicator_that_is_concerned_gets_its_own(story: Story) -> None:
    later, part, world = (story.begin(1, 2, communicator=each) for each in (PART + 1, PART, WORLD))
    story.maker.begun.clear()
    story.change(2)
    for branch in (world, part, later):
        story.successor(branch)
    assert sorted(group.communicator for group in story.maker.begun) == [WORLD, PART, PART + 1]


def test_a_change_that_comes_while_a_successor_is_made_ends_that_and_the_last_one_counts(story: Story) -> None:
    world = story.begin()
    story.maker.held = threading.Event()
    story.change(2)
    eventually(lambda: len(story.maker.begun) == 2, "a successor in the making")
    story.change(3)
    assert story.maker.begun[1].closed.is_set()
    story.maker.held.set()
    successor = story.successor(world)
    assert (nodes(successor), successor.membership.epoch) == ([1], 3)
    change = story.raised(world)
    assert isinstance(change, MembershipChanged)
    assert change.lost == {1: "node 2 was killed", 2: "node 3 was killed"}


def test_a_change_that_does_not_concern_a_part_lets_its_successor_be_made(story: Story) -> None:
    story.world = membership([1, 2, 3, 4], 1)
    part = story.begin(1, 2, 3, communicator=PART)
    story.maker.held = threading.Event()
    story.change(2)
    eventually(lambda: len(story.maker.begun) == 2, "a successor in the making")
    story.change(4)
    assert not story.maker.begun[1].closed.is_set()
    story.maker.held.set()
    assert (nodes(story.successor(part)), story.successor(part).membership.epoch) == ([1, 3], 2)


def test_a_communicator_that_was_made_while_a_member_died_is_interrupted_at_once(story: Story) -> None:
    part = _begin_before_hearing(story)
    assert interruptions(part)
    assert nodes(story.successor(part)) == [1, 3]


def _begin_before_hearing(story: Story) -> Branch:
    """All were there when it was made; the change was heard before it was handed out."""
    story.world = membership([1, 3], 2)
    changed: list[Branch] = []

    def opened(branch: Branch) -> None:
        if not changed:
            changed.append(branch)
            story.lineage.changed(Change(3, left=(Departure(2, "killed"),)), membership([1, 3], 3))

    story.lineage.opened = opened
    return story.lineage.begin(membership([1, 2, 3], 2), PART, soon())


def test_one_that_cannot_be_made_names_who_is_missed_and_waits_for_the_next_change(story: Story) -> None:
    world = story.begin()
    story.maker.failures = [PeerLost(rank=1, node=3, cause="it died as well")]
    story.change(2)
    eventually(lambda: story.missed == [3], "a word about who is missed")
    assert not world.fate.done
    story.change(3)
    assert nodes(story.successor(world)) == [1]


def test_where_no_other_change_comes_there_is_none(tell: Callable[..., Story]) -> None:
    story = tell(recovery_timeout=0.05)
    world = story.begin()
    story.maker.failures = [PeerLost(rank=1, node=3, cause="it died as well")]
    story.change(2)
    late = story.raised(world)
    assert isinstance(late, RecoveryTimeout)
    assert late.missing_votes == story.lineage.missing(world) == (2,)
    assert not story.lineage.is_concerned(world)
    story.change(renewed=(WORLD,))  # asked for
    assert nodes(story.successor(world)) == [1, 3]


def test_one_that_cannot_be_made_holds_up_no_other(story: Story) -> None:
    part, other = (story.begin(1, 2, 3, communicator=each) for each in (PART, PART + 1))
    story.maker.failures, story.maker.only = [PeerLost(rank=1, node=3, cause="it has closed this part")], PART
    story.change(2)
    assert nodes(story.successor(other)) == [1, 3]
    eventually(lambda: story.missed == [3], "it has failed")
    assert not part.fate.done
    story.change(renewed=(PART,))
    assert nodes(story.successor(part)) == [1, 3]


def test_one_whose_members_do_not_come_keeps_no_other_waiting(story: Story) -> None:
    part, other = (story.begin(1, 2, 3, communicator=each) for each in (PART, PART + 1))
    story.maker.held, story.maker.only = threading.Event(), PART
    story.change(2)
    assert nodes(story.successor(other)) == [1, 3]
    assert not part.is_succeeded
    story.maker.held.set()
    assert nodes(story.successor(part)) == [1, 3]


def test_a_mistake_of_ours_is_logged_and_calls_do_not_wait_for_ever(
    tell: Callable[..., Story], caplog: pytest.LogCaptureFixture
) -> None:
    story = tell(recovery_timeout=0.05)
    world = story.begin()
    story.maker.failures = [ZeroDivisionError("in our code")]
    story.change(2)
    assert isinstance(story.raised(world), RecoveryTimeout)
    assert "no successor of communicator 0" in caplog.text


def test_a_successor_is_handed_over_before_it_gets_one_itself(story: Story) -> None:
    world, wrapped = story.begin(), list[int]()
    story.lineage.listed = lambda made: story.change(3) if made.membership.epoch == 2 else None

    def wrap(branch: Branch) -> tuple[str, Branch]:
        with story.lineage._changed:
            assert story.lineage._workshop.is_at(branch)  # so nobody else is
        wrapped.append(branch.membership.epoch)
        return "communicator of", branch

    story.lineage.wrap = wrap
    story.change(2)
    eventually(lambda: nodes(story.successor(world)) == [1], "that it leads to the newest")
    assert wrapped == [2, 3]


def test_one_that_its_user_closes_while_its_successor_is_made_has_none(story: Story) -> None:
    part = story.begin(1, 2, 3, communicator=PART)
    story.maker.held = threading.Event()
    story.change(2)
    eventually(lambda: len(story.maker.begun) == 2, "a successor in the making")
    story.lineage.forget(part)
    story.maker.held.set()
    eventually(story.maker.begun[1].closed.is_set, "it is closed")
    assert story.lineage.branches() == []
    assert part.successor is None


def test_who_waits_has_the_fate_with_the_successor(story: Story) -> None:
    world = story.begin()
    world.successor = "about to be handed over"
    assert story.lineage.wait_for_successor(world, time.monotonic() + 0.01) == "about to be handed over"
    given: list[Any] = []
    waits = threading.Thread(target=lambda: given.append(story.lineage.wait_for_successor(world, soon())))
    waits.start()
    story.change(2)
    waits.join()
    assert isinstance(world.fate.error, MembershipChanged)
    assert given == [world.fate.error.communicator]


def test_a_successor_tells_the_listeners_of_the_one_before_from_the_moment_it_can_be_found(story: Story) -> None:
    world = story.begin()
    feeds: list[bool] = []
    story.lineage.listed = lambda branch: feeds.append(branch.failures is world.failures)
    story.change(2)
    story.successor(world)
    assert feeds == [True]


def test_listeners_hear_of_each_step_and_go_on_with_the_successor(story: Story) -> None:
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
    assert story.lineage.find(PART, 1) is part
    story.lineage.forget(part)
    assert story.lineage.find(PART, 1) is None
    story.change(2)
    assert not part.interrupted


def test_others_are_told_what_is_closed_here_when_they_make_a_successor_of_it(story: Story) -> None:
    told: list[Absence] = []
    story.lineage.absent = told.append
    part, other = story.begin(1, 2, 3, communicator=PART), story.begin(1, 3, communicator=PART + 1)
    story.lineage.forget(part)
    story.lineage.forget(other)
    assert told == []
    story.change(2)
    assert told == [Absence(PART, part.membership)]


def test_what_is_closed_while_its_successor_is_made_is_told_of_if_that_fails(story: Story) -> None:
    told: list[Absence] = []
    story.lineage.absent = told.append
    part = story.begin(1, 2, 3, communicator=PART)
    story.maker.held, story.maker.failures = threading.Event(), [PeerLost(node=3, cause="it died")]
    story.change(2)
    eventually(lambda: len(story.maker.begun) == 2, "a successor in the making")
    story.lineage.forget(part)
    assert told == []
    story.maker.held.set()
    eventually(lambda: told == [Absence(PART, part.membership)], "a word to the others")


def test_a_member_that_closed_it_ends_the_making_and_the_fate_names_it(story: Story) -> None:
    part = story.begin(1, 2, 3, communicator=PART)
    story.maker.held = threading.Event()
    story.change(2)
    eventually(lambda: len(story.maker.begun) == 2, "a successor in the making")
    story.lineage.closed_by(part, 3)
    error = story.raised(part)
    assert isinstance(error, Revoked)
    assert (error.rank, error.closed) == (2, True)
    assert story.lineage.is_barred(part)
    assert story.lineage.wait_for_successor(part, soon()) is None
    story.maker.held.set()
    story.change(3)
    assert not story.lineage.is_barred(part)
    assert nodes(story.successor(part)) == [1]


def test_a_member_that_closed_it_before_the_making_has_begun_is_not_waited_for(story: Story) -> None:
    part = story.begin(1, 2, 3, communicator=PART)
    story.maker.held = threading.Event()
    take = story.lineage._attempts.forget

    def forget(branch: Branch) -> None:  # the last thing before the group is made
        take(branch)
        part.closers.add(3)

    story.lineage._attempts.forget = forget  # type: ignore[method-assign]
    story.change(2)
    assert isinstance(story.raised(part), Revoked)
    story.maker.held.set()


def test_one_that_was_made_in_the_moment_a_member_closed_it_is_given_up(story: Story) -> None:
    part = story.begin(1, 2, 3, communicator=PART)

    def opened(made: Branch) -> None:
        if made is not part:
            story.lineage.closed_by(part, 3)

    story.lineage.opened = opened
    story.change(2)
    assert isinstance(story.raised(part), Revoked)
    eventually(cast(Any, story.maker.made[-1].group).closed.is_set, "it is closed")
    assert story.lineage.branches() == [part]


def test_who_waits_for_what_comes_after_a_generation_gets_it_or_none_in_time(story: Story) -> None:
    first = story.world
    story.change(3, quiet=True)
    assert story.lineage.wait_for_following(WORLD, first, time.monotonic() + 0.01) is None
    threading.Timer(0.01, story.change, (2,)).start()
    assert story.lineage.wait_for_following(WORLD, first, soon()) == membership([1], 3)


# ---------------------------------------------------------------- the end


def test_closing_ends_every_communicator_and_whoever_waits(story: Story) -> None:
    world = story.begin()
    story.maker.held = threading.Event()
    story.change(2)
    eventually(lambda: len(story.maker.begun) == 2, "a successor in the making")
    story.lineage.close()
    assert story.lineage.wait_for_successor(world, soon()) is None
    with pytest.raises(UsageError, match="closed"):
        world.fate.check()
    assert story.lineage.branches() == []


def test_what_is_made_in_the_very_moment_of_closing_is_closed_too(story: Story) -> None:
    world = story.begin()
    closing: list[threading.Thread] = []

    def close_meanwhile(branch: Branch) -> None:
        if branch is not world:
            closes = threading.Thread(target=story.lineage.close)
            closes.start()
            closing.append(closes)
            eventually(lambda: story.lineage._closed, "it closes")

    story.lineage.opened = close_meanwhile
    story.change(2)
    eventually(lambda: closing and not closing[0].is_alive(), "it has closed")
    closing[0].join()
    assert [cast(Any, made.group).closed.is_set() for made in story.maker.made] == [True, True]
    assert story.lineage.branches() == []


def test_what_a_user_makes_in_the_very_moment_of_closing_is_closed_too(story: Story) -> None:
    story.lineage.opened = lambda _: story.lineage.close()
    with pytest.raises(UsageError, match="closed"):
        story.begin()
    assert [cast(Any, made.group).closed.is_set() for made in story.maker.made] == [True]


def test_who_waits_for_the_successor_of_a_barred_generation_is_told_at_once(story: Story) -> None:
    part = story.begin(1, 2, 3, communicator=PART)
    story.maker.held = threading.Event()
    story.change(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(story.lineage.wait_for_successor, part, time.monotonic() + 3600.0)
        story.lineage.closed_by(part, 3)
        assert waiting.result(PATIENCE) is None
    story.maker.held.set()


def test_a_change_that_comes_when_a_successor_was_just_made_interrupts_it(story: Story) -> None:
    world = story.begin()
    changed: list[Branch] = []

    def opened(made: Branch) -> None:  # it is made, and not listed yet
        if made is not world and not changed:
            changed.append(made)
            story.change(3)

    story.lineage.opened = opened
    story.change(2)
    eventually(lambda: world.is_succeeded, "a successor")
    first = changed[0]
    eventually(lambda: bool(interruptions(first)), "its calls end")
    assert nodes(story.successor(first)) == [1]


def test_who_waits_is_told_of_the_bar_also_when_the_successor_was_tried_in_vain_before(
    tell: Callable[..., Story],
) -> None:
    story = tell(recovery_timeout=10 * PATIENCE)
    part = story.begin(1, 2, 3, communicator=PART)
    story.maker.failures, story.maker.only = [LinkClosed(owner="a test")], PART
    story.change(2)
    eventually(lambda: story.lineage.missing(part) != (), "it has failed")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(story.lineage.wait_for_successor, part, time.monotonic() + 2 * PATIENCE)
        eventually(lambda: not story.lineage._workshop.is_at(part), "nobody is at it")
        story.lineage.closed_by(part, 3)
        assert waiting.result(PATIENCE) is None
