"""Successors that were tried in vain: when they are tried again, and when they are given up."""

from nexar.communicator.attempts import Attempts, missed_in
from nexar.errors import OperationTimeout, PeerLost
from nexar.types import AwaitedPeer
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


def test_who_did_not_come_is_remembered_until_the_next_attempt() -> None:
    attempts = Attempts()
    assert attempts.missing(WORLD) == ()
    attempts.failed(WORLD, SECOND, 10.0, (2,))
    attempts.give_up(WORLD, SECOND)
    assert attempts.missing(WORLD) == (2,)
    attempts.forget(WORLD)
    assert attempts.missing(WORLD) == ()


def test_who_was_missed_is_read_from_the_error_and_else_it_may_have_been_anybody() -> None:
    target = membership([1, 2, 3], 2)
    late = OperationTimeout(operation="x", waiting_for=[AwaitedPeer(rank=2, node=3)], timeout=1)
    assert missed_in(late, target, WORLD) == (3,)
    assert missed_in(PeerLost(node=2, cause="gone"), target, WORLD) == (2,)
    assert missed_in(PeerLost(node=9, cause="a stranger"), target, WORLD) == (2, 3)
    assert missed_in(OperationTimeout(operation="x", waiting_for="nobody", timeout=1), target, WORLD) == (2, 3)
    assert missed_in(ZeroDivisionError(), target, WORLD) == (2, 3)
