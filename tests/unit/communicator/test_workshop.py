"""Threads that make successors: so many at once, one for each, and all are waited for."""

import threading

from nexar.communicator.workshop import AT_ONCE, Workshop
from tests.ranks import PATIENCE
from tests.unit.communicator.branches import branch


def test_so_many_are_made_at_once_and_whoever_waits_for_room_is_woken() -> None:
    changed, go_on = threading.Condition(), threading.Event()
    workshop = Workshop(changed)
    branches = [branch([1, 2], communicator=number) for number in range(AT_ONCE)]
    with changed:
        for each in branches:
            assert not workshop.is_full
            assert not workshop.is_at(each)
            workshop.start(each, lambda: assert_waits(go_on))
            assert workshop.is_at(each)
        assert workshop.is_full
        go_on.set()
        assert changed.wait_for(lambda: not any(map(workshop.is_at, branches)), PATIENCE)
        assert not workshop.is_full


def test_who_made_one_is_at_that_too_until_it_has_handed_it_over() -> None:
    changed, took, go_on = threading.Condition(), threading.Event(), threading.Event()
    workshop, old, new = Workshop(changed), branch([1, 2]), branch([1], epoch=2)

    def make() -> None:
        with changed:
            workshop.take(new)
        took.set()
        assert_waits(go_on)

    with changed:
        workshop.start(old, make)
    assert_waits(took)
    with changed:
        assert workshop.is_at(old)
        assert workshop.is_at(new)
        go_on.set()
        assert changed.wait_for(lambda: not workshop.is_at(old), PATIENCE)
        assert not workshop.is_at(new)


def test_closing_waits_for_what_is_made() -> None:
    changed, ended = threading.Condition(), []
    workshop = Workshop(changed)
    go_on = threading.Event()
    with changed:
        workshop.start(branch([1]), lambda: (assert_waits(go_on), ended.append("it")))
    threading.Timer(0.01, go_on.set).start()
    workshop.close()
    assert ended == ["it"]
    workshop.close()


def assert_waits(event: threading.Event) -> None:
    assert event.wait(PATIENCE)
