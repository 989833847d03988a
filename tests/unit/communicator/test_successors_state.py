"""Communicators that were closed here: which of them a change concerns.

Successors that were tried in vain: when they are tried again, and when they are given up.

The changes of the world, as one communicator sees them.

Who is needed though it has left the world is asked for again, until there is a successor without it.

Threads that make successors: so many at once, one for each, and all are waited for.
"""

import threading
from typing import Any, cast

from nexar.cluster.membership import WORLD, Change, Departure
from nexar.communicator import successors_state as room
from nexar.communicator.successors_state import (
    MAX_BUILDS,
    BuildThreads,
    ChangeHistory,
    ClosedCommunicator,
    ClosedCommunicators,
    FailedBuilds,
    NeededMembers,
    members_missed_in,
)
from nexar.errors import LinkClosed, OperationTimeout, PeerLost
from nexar.types import AwaitedPeer
from tests.ranks import EVENT_TIMEOUT
from tests.unit.communicator.generations import FakeGroup, generation
from tests.unit.communicator.scripted import membership

PART = 7


def test_a_change_touches_what_loses_a_member_or_is_asked_for_anew() -> None:
    closed_communicators = ClosedCommunicators()
    closed = closed_communicators.add(generation([1, 2], communicator=PART))
    assert closed == ClosedCommunicator(PART, membership([1, 2], 1))
    assert closed_communicators.touched(Change(2, left=(Departure(2, "killed"),))) == [closed]
    assert closed_communicators.touched(Change(2, renewed=(PART,))) == [closed]
    assert closed_communicators.touched(Change(2, severed=((1, 2),))) == [closed]
    assert closed_communicators.touched(Change(2, left=(Departure(3, "killed"),), renewed=(8,))) == []


def test_of_one_communicator_the_newest_generation_is_remembered() -> None:
    closed_communicators = ClosedCommunicators()
    closed_communicators.add(generation([1, 2, 3], communicator=PART))
    newest = closed_communicators.add(generation([1, 2], communicator=PART, epoch=4))
    assert closed_communicators.touched(Change(5, renewed=(PART,))) == [newest]


def test_the_newest_are_remembered() -> None:
    closed_communicators = ClosedCommunicators()
    for communicator in range(1, room._MAX_CLOSED + 3):
        closed_communicators.add(generation([1, 2], communicator=communicator))
    found = [each.communicator for each in closed_communicators.touched(Change(2, left=(Departure(2, "killed"),)))]
    assert found == list(range(3, room._MAX_CLOSED + 3))


WORLD_GENERATION = generation([1, 2, 3])
SECOND, THIRD = membership([1, 2], 2), membership([1, 2], 3)


def test_what_was_never_tried_is_due() -> None:
    attempts = FailedBuilds()
    assert attempts.is_due(WORLD_GENERATION, SECOND, 0.0)
    assert not attempts.give_up(WORLD_GENERATION, SECOND)
    assert not attempts.is_given_up(WORLD_GENERATION, SECOND)
    assert attempts.pause(0.0) is None


def test_what_failed_rests_until_it_is_given_up_and_another_one_is_due_at_once() -> None:
    attempts = FailedBuilds()
    attempts.failed(WORLD_GENERATION, SECOND, 10.0)
    assert not attempts.is_due(WORLD_GENERATION, SECOND, 9.0)
    assert attempts.is_due(WORLD_GENERATION, THIRD, 9.0)
    assert attempts.pause(9.0) == 1.0
    assert attempts.pause(11.0) == 0.0
    assert attempts.is_due(WORLD_GENERATION, SECOND, 10.0)
    assert not attempts.is_given_up(WORLD_GENERATION, SECOND)


def test_what_is_given_up_is_never_due_again() -> None:
    attempts = FailedBuilds()
    attempts.failed(WORLD_GENERATION, SECOND, 10.0)
    assert not attempts.give_up(WORLD_GENERATION, THIRD)
    assert attempts.give_up(WORLD_GENERATION, SECOND)
    assert attempts.is_given_up(WORLD_GENERATION, SECOND)
    assert not attempts.is_due(WORLD_GENERATION, SECOND, 99.0)
    assert attempts.pause(9.0) is None


def test_what_is_forgotten_was_never_tried() -> None:
    attempts = FailedBuilds()
    attempts.failed(WORLD_GENERATION, SECOND, 10.0)
    attempts.forget(WORLD_GENERATION)
    attempts.forget(WORLD_GENERATION)
    assert attempts.is_due(WORLD_GENERATION, SECOND, 0.0)


def test_who_did_not_come_is_remembered_until_the_next_attempt() -> None:
    attempts = FailedBuilds()
    assert attempts.missing(WORLD_GENERATION) == ()
    attempts.failed(WORLD_GENERATION, SECOND, 10.0, (2,))
    attempts.give_up(WORLD_GENERATION, SECOND)
    assert attempts.missing(WORLD_GENERATION) == (2,)
    attempts.forget(WORLD_GENERATION)
    assert attempts.missing(WORLD_GENERATION) == ()


def test_who_was_missed_is_read_from_the_error_and_else_it_may_have_been_anybody() -> None:
    target = membership([1, 2, 3], 2)
    late = OperationTimeout(operation="x", waiting_for=[AwaitedPeer(rank=2, node=3)], timeout=1)
    assert members_missed_in(late, target, WORLD_GENERATION) == (3,)
    assert members_missed_in(PeerLost(node=2, cause="gone"), target, WORLD_GENERATION) == (2,)
    assert members_missed_in(PeerLost(node=9, cause="a stranger"), target, WORLD_GENERATION) == (2, 3)
    assert members_missed_in(
        OperationTimeout(operation="x", waiting_for="nobody", timeout=1), target, WORLD_GENERATION
    ) == (2, 3)
    assert members_missed_in(ZeroDivisionError(), target, WORLD_GENERATION) == (2, 3)


GONE = Change(2, left=(Departure(3, "killed"),))


def group(*nodes: int, communicator: int = PART, epoch: int = 1) -> Any:
    return cast(Any, FakeGroup(membership(list(nodes), epoch), communicator, 1))


def test_without_a_change_nothing_has_a_successor() -> None:
    history = ChangeHistory(membership([1, 2, 3], 1))
    assert history.after(generation([1, 2, 3])) is None
    assert not history.overtakes(group(1, 2, 3, communicator=WORLD))


def test_a_change_concerns_the_world_and_who_lost_a_member() -> None:
    history = ChangeHistory(membership([1, 2, 3], 1))
    history.add(GONE, membership([1, 2], 2))
    assert history.after(generation([1, 2, 3])) == membership([1, 2], 2)
    assert history.after(generation([1, 2], communicator=PART)) is None
    assert history.overtakes(group(1, 2, 3, communicator=WORLD))
    assert history.overtakes(group(1, 3))
    assert not history.overtakes(group(1, 2))
    assert not history.overtakes(group(1, 3, epoch=2))


def test_the_changes_between_two_epochs_are_reported_and_the_oldest_are_forgotten() -> None:
    history = ChangeHistory(membership([1, 2], 1))
    changes = [Change(epoch, renewed=(PART,)) for epoch in range(2, room._MAX_CHANGES + 5)]
    for change in changes:
        history.add(change, membership([1, 2], change.epoch))
    newest = changes[-1].epoch
    assert history.between(newest - 2, newest - 1) == [changes[-2]]
    assert history.between(1, newest) == changes[-room._MAX_CHANGES :]


def test_what_is_being_made_ends_when_a_change_concerns_it_or_it_lacks_a_member() -> None:
    history = ChangeHistory(membership([1, 2, 3, 4], 1))
    assert history.end_of(group(1, 2, 3, 4)) is None
    history.add(Change(2, left=(Departure(4, "it left", willing=True, quiet=True),)), membership([1, 2, 3], 2))
    assert history.end_of(group(1, 2, 3)) is None
    loss = history.end_of(group(1, 2, 4))
    assert isinstance(loss, PeerLost)
    assert (loss.rank, loss.node, loss.cause) == (2, 4, "it left")
    assert history.gone_from(membership([4, 1, 9], 1)) == {4: "it left", 9: "it is no member any more"}
    history.add(Change(3, renewed=(PART,)), membership([1, 2, 3], 3))
    assert isinstance(history.end_of(group(1, 2, 4)), LinkClosed)


FIRST = membership([1, 2, 3, 4], 1)


class Years:
    """A world, and what its node needs."""

    def __init__(self) -> None:
        self.history = ChangeHistory(FIRST)
        self.needs = NeededMembers(self.history)

    def leave(self, node: int) -> None:
        self._choose(Change(self.history.world.epoch + 1, left=(Departure(node, "it left", willing=True, quiet=True),)))

    def renew(self, *communicators: int) -> None:
        self._choose(Change(self.history.world.epoch + 1, renewed=communicators))

    def _choose(self, change: Change) -> None:
        self.history.add(change, change.apply(self.history.world))


def test_who_is_still_a_member_is_somebody_elses_matter() -> None:
    years = Years()
    years.needs.add(WORLD, FIRST, 4)
    assert years.needs.unmet() == ()
    years.leave(4)
    assert years.needs.unmet() == (WORLD,), "it was needed before it left"


def test_what_is_needed_is_remembered_until_something_concerns_that_communicator() -> None:
    years = Years()
    years.leave(4)
    years.needs.add(PART, FIRST, 4)
    years.needs.add(WORLD, FIRST, 4)
    for _ in range(2):
        assert years.needs.unmet() == (WORLD, PART)
        years.leave(years.history.world.members[-1].node)
    years.renew(PART)
    assert years.needs.unmet() == (WORLD,)
    years.renew(WORLD)
    assert years.needs.unmet() == ()


def test_a_generation_that_is_over_needs_nobody_and_a_newer_one_counts() -> None:
    years = Years()
    years.leave(4)
    years.renew(PART)
    years.needs.add(PART, FIRST, 4)
    assert years.needs.unmet() == ()
    newer = membership([1, 2, 3], 3)
    years.leave(3)
    years.needs.add(PART, newer, 3)
    years.needs.add(PART, FIRST, 4)
    assert years.needs.unmet() == (PART,)


def test_what_its_user_has_closed_is_forgotten() -> None:
    years = Years()
    years.leave(4)
    years.needs.add(PART, FIRST, 4)
    years.needs.add(PART, FIRST, 3)
    years.needs.forget(PART)
    years.needs.forget(PART)
    assert years.needs.unmet() == ()


def test_so_many_are_made_at_once_and_whoever_waits_for_room_is_woken() -> None:
    changed, go_on = threading.Condition(), threading.Event()
    build_threads = BuildThreads(changed)
    branches = [generation([1, 2], communicator=number) for number in range(MAX_BUILDS)]
    with changed:
        for each in branches:
            assert not build_threads.is_full
            assert not build_threads.is_at(each)
            build_threads.start(each, lambda: assert_waits(go_on))
            assert build_threads.is_at(each)
        assert build_threads.is_full
        go_on.set()
        assert changed.wait_for(lambda: not any(map(build_threads.is_at, branches)), EVENT_TIMEOUT)
        assert not build_threads.is_full


def test_who_made_one_is_at_that_too_until_it_has_handed_it_over() -> None:
    changed, took, go_on = threading.Condition(), threading.Event(), threading.Event()
    build_threads, old, new = BuildThreads(changed), generation([1, 2]), generation([1], epoch=2)

    def make() -> None:
        with changed:
            build_threads.take(new)
        took.set()
        assert_waits(go_on)

    with changed:
        build_threads.start(old, make)
    assert_waits(took)
    with changed:
        assert build_threads.is_at(old)
        assert build_threads.is_at(new)
        go_on.set()
        assert changed.wait_for(lambda: not build_threads.is_at(old), EVENT_TIMEOUT)
        assert not build_threads.is_at(new)


def test_closing_waits_for_what_is_made() -> None:
    changed, ended = threading.Condition(), []
    build_threads = BuildThreads(changed)
    go_on = threading.Event()
    with changed:
        build_threads.start(generation([1]), lambda: (assert_waits(go_on), ended.append("it")))
    threading.Timer(0.01, go_on.set).start()
    build_threads.close()
    assert ended == ["it"]
    build_threads.close()


def assert_waits(event: threading.Event) -> None:
    assert event.wait(EVENT_TIMEOUT)
