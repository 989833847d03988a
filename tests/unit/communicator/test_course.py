"""The changes of the world, as one communicator sees them."""

from typing import Any, cast

from nexar.cluster.change import WORLD, Change, Departure
from nexar.communicator import course as room
from nexar.communicator.course import Course
from nexar.errors import LinkClosed, PeerLost
from tests.unit.communicator.branches import FakeGroup, branch
from tests.unit.communicator.scripted import membership

PART = 7
GONE = Change(2, left=(Departure(3, "killed"),))


def group(*nodes: int, communicator: int = PART, epoch: int = 1) -> Any:
    return cast(Any, FakeGroup(membership(list(nodes), epoch), communicator, 1))


def test_without_a_change_nothing_has_a_successor() -> None:
    course = Course(membership([1, 2, 3], 1))
    assert course.after(branch([1, 2, 3])) is None
    assert not course.overtakes(group(1, 2, 3, communicator=WORLD))


def test_a_change_concerns_the_world_and_who_lost_a_member() -> None:
    course = Course(membership([1, 2, 3], 1))
    course.add(GONE, membership([1, 2], 2))
    assert course.after(branch([1, 2, 3])) == membership([1, 2], 2)
    assert course.after(branch([1, 2], communicator=PART)) is None
    assert course.overtakes(group(1, 2, 3, communicator=WORLD))
    assert course.overtakes(group(1, 3))
    assert not course.overtakes(group(1, 2))
    assert not course.overtakes(group(1, 3, epoch=2))


def test_the_changes_between_two_epochs_are_told_and_the_oldest_are_forgotten() -> None:
    course = Course(membership([1, 2], 1))
    changes = [Change(epoch, renewed=(PART,)) for epoch in range(2, room._MOST_CHANGES + 5)]
    for change in changes:
        course.add(change, membership([1, 2], change.epoch))
    newest = changes[-1].epoch
    assert course.between(newest - 2, newest - 1) == [changes[-2]]
    assert course.between(1, newest) == changes[-room._MOST_CHANGES :]


def test_what_is_being_made_ends_when_a_change_concerns_it_or_it_lacks_a_member() -> None:
    course = Course(membership([1, 2, 3, 4], 1))
    assert course.end_of(group(1, 2, 3, 4)) is None
    course.add(Change(2, left=(Departure(4, "it left", willing=True, quiet=True),)), membership([1, 2, 3], 2))
    assert course.end_of(group(1, 2, 3)) is None
    loss = course.end_of(group(1, 2, 4))
    assert isinstance(loss, PeerLost)
    assert (loss.rank, loss.node, loss.cause) == (2, 4, "it left")
    assert course.gone_from(membership([4, 1, 9], 1)) == {4: "it left", 9: "it is no member any more"}
    course.add(Change(3, renewed=(PART,)), membership([1, 2, 3], 3))
    assert isinstance(course.end_of(group(1, 2, 4)), LinkClosed)
