"""Communicators that were closed here: which of them a change concerns."""

from nexar.cluster.change import Change, Departure
from nexar.communicator import absences as room
from nexar.communicator.absences import Absence, Absences
from tests.unit.communicator.branches import branch
from tests.unit.communicator.scripted import membership

PART = 7


def test_a_change_touches_what_loses_a_member_or_is_asked_for_anew() -> None:
    absences = Absences()
    closed = absences.add(branch([1, 2], communicator=PART))
    assert closed == Absence(PART, membership([1, 2], 1))
    assert absences.touched(Change(2, left=(Departure(2, "killed"),))) == [closed]
    assert absences.touched(Change(2, renewed=(PART,))) == [closed]
    assert absences.touched(Change(2, severed=((1, 2),))) == [closed]
    assert absences.touched(Change(2, left=(Departure(3, "killed"),), renewed=(8,))) == []


def test_of_one_communicator_the_newest_generation_is_remembered() -> None:
    absences = Absences()
    absences.add(branch([1, 2, 3], communicator=PART))
    newest = absences.add(branch([1, 2], communicator=PART, epoch=4))
    assert absences.touched(Change(5, renewed=(PART,))) == [newest]


def test_the_newest_are_remembered() -> None:
    absences = Absences()
    for communicator in range(1, room._KEPT + 3):
        absences.add(branch([1, 2], communicator=communicator))
    found = [each.communicator for each in absences.touched(Change(2, left=(Departure(2, "killed"),)))]
    assert found == list(range(3, room._KEPT + 3))
