"""Successors that were tried in vain: when they are tried again, and when they are given up."""

from nexar.communicator.attempts import Attempts
from tests.unit.communicator.branches import branch
from tests.unit.communicator.scripted import membership

WORLD = branch([1, 2, 3])
SECOND, THIRD = membership([1, 2], 2), membership([1, 2], 3)


def test_what_was_never_tried_is_due() -> None:
    attempts = Attempts()
    assert attempts.is_due(WORLD, SECOND, 0.0)
    assert not attempts.give_up(WORLD, SECOND)
    assert not attempts.is_given_up(WORLD, SECOND)
    assert attempts.pause(0.0) is None


def test_what_failed_rests_until_it_is_given_up_and_another_one_is_due_at_once() -> None:
    attempts = Attempts()
    attempts.failed(WORLD, SECOND, 10.0)
    assert not attempts.is_due(WORLD, SECOND, 9.0)
    assert attempts.is_due(WORLD, THIRD, 9.0)
    assert attempts.pause(9.0) == 1.0
    assert attempts.pause(11.0) == 0.0
    assert attempts.is_due(WORLD, SECOND, 10.0)
    assert not attempts.is_given_up(WORLD, SECOND)


def test_what_is_given_up_is_never_due_again() -> None:
    attempts = Attempts()
    attempts.failed(WORLD, SECOND, 10.0)
    assert not attempts.give_up(WORLD, THIRD)
    assert attempts.give_up(WORLD, SECOND)
    assert attempts.is_given_up(WORLD, SECOND)
    assert not attempts.is_due(WORLD, SECOND, 99.0)
    assert attempts.pause(9.0) is None


def test_what_is_forgotten_was_never_tried() -> None:
    attempts = Attempts()
    attempts.failed(WORLD, SECOND, 10.0)
    attempts.forget(WORLD)
    attempts.forget(WORLD)
    assert attempts.is_due(WORLD, SECOND, 0.0)
