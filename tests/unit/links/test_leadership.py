import threading

import pytest

from nexar.errors import UsageError
from nexar.links.leadership import Leadership
from nexar.links.waiter import Waiter


@pytest.fixture
def leadership() -> Leadership:
    return Leadership(threading.Lock())


def follow(leadership: Leadership, count: int) -> list[Waiter]:
    waiters = [Waiter() for _ in range(count)]
    for waiter in waiters:
        waiter.prepare()
        leadership.followers.append(waiter)
    return waiters


def test_an_offer_wakes_one_follower_and_the_next_offer_the_next(leadership: Leadership) -> None:
    waiters = follow(leadership, 3)
    leadership.offer()
    assert [waiter.asleep for waiter in waiters] == [False, True, True]
    leadership.offer()
    assert [waiter.asleep for waiter in waiters] == [False, False, True]


def test_an_offer_to_nobody_is_fine(leadership: Leadership) -> None:
    leadership.offer()


def test_the_end_wakes_every_follower_and_stands_for_later_ones(leadership: Leadership) -> None:
    waiters = follow(leadership, 5)
    leadership.end(UsageError("over"))
    assert not any(waiter.asleep for waiter in waiters)
    assert leadership.ended is not None


def test_in_a_forked_child_nobody_follows(leadership: Leadership) -> None:
    waiters = follow(leadership, 2)
    leadership.abandon(UsageError("the parent's"))
    assert leadership.followers == []
    assert all(waiter.asleep for waiter in waiters), "a child takes no lock"
