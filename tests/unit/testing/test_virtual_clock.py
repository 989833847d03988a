"""Time moves when asked to, and stops where something is due."""

import pytest

from nexar.testing import VirtualClock


def test_time_stands_still_until_it_is_moved() -> None:
    clock = VirtualClock(start=5.0)
    assert (clock.now(), clock.now()) == (5.0, 5.0)
    clock.advance(0.5)
    assert clock.now() == 5.5


def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="go back"):
        VirtualClock().advance(-1)


def test_callbacks_run_in_order_each_at_its_own_time() -> None:
    clock = VirtualClock()
    seen: list[tuple[str, float]] = []
    for name, when in (("late", 3.0), ("early", 1.0), ("early too", 1.0), ("never", 9.0)):
        clock.at(when, lambda name=name: seen.append((name, clock.now())))  # type: ignore[misc]
    clock.advance(5)
    assert seen == [("early", 1.0), ("early too", 1.0), ("late", 3.0)]
    assert clock.now() == 5


def test_a_callback_may_schedule_another_within_the_same_advance() -> None:
    clock = VirtualClock()
    seen: list[float] = []

    def again() -> None:
        seen.append(clock.now())
        if len(seen) < 4:
            clock.at(clock.now() + 1, again)

    clock.at(1, again)
    clock.advance(10)
    assert seen == [1, 2, 3, 4]


def test_what_was_due_in_the_past_runs_at_the_next_advance() -> None:
    clock = VirtualClock(start=10)
    seen: list[float] = []
    clock.at(3, lambda: seen.append(clock.now()))
    clock.advance(0)
    assert seen == [10]


def test_advancing_to_the_next_moment_reports_whether_there_was_one() -> None:
    clock = VirtualClock()
    clock.at(7, lambda: None)
    assert clock.advance_to_next()
    assert clock.now() == 7
    assert not clock.advance_to_next()


def test_watchers_learn_of_every_move() -> None:
    clock = VirtualClock()
    seen: list[float] = []
    clock.on_advance(lambda: seen.append(clock.now()))
    clock.at(1, lambda: None)
    clock.advance(2)
    assert seen == [1, 2]
