"""How slow this node is, by the clock of a test."""

import pytest

from nexar.cluster.decisions.own_delay import LONGEST, OwnDelay


def test_a_node_whose_timers_are_punctual_has_no_delay() -> None:
    delay = OwnDelay()
    for second in range(20):
        delay.timer_ran(float(second), second + 0.01)
        delay.threads_used(second * 0.2, second * 0.05, float(second))
    assert delay.seconds == 0.0


def test_timers_that_run_late_again_and_again_are_a_delay_of_several_times_that() -> None:
    delay = OwnDelay()
    for second in range(20):
        delay.timer_ran(float(second), second + 0.5)
    assert delay.seconds == pytest.approx(5.0)


def test_threads_that_wait_for_a_cpu_longer_than_they_have_one_are_a_delay() -> None:
    delay = OwnDelay()
    for second in range(20):
        delay.threads_used(second * 0.1, second * 0.9, float(second))
    assert delay.seconds == pytest.approx(9.0)


def test_a_single_pause_is_forgotten_within_seconds() -> None:
    delay = OwnDelay()
    for second in range(5):
        delay.timer_ran(float(second), second + 0.001)
    delay.timer_ran(5.0, 65.0)
    assert 0.0 < delay.seconds <= LONGEST
    for second in range(66, 82):
        delay.timer_ran(float(second), second + 0.001)
    assert delay.seconds == 0.0


@pytest.mark.parametrize(("longest", "most"), [(4.0, 4.0), (1000.0, LONGEST)])
def test_the_delay_has_a_bound(longest: float, most: float) -> None:
    delay = OwnDelay(longest)
    for second in range(10):
        delay.timer_ran(100.0 * second, 100.0 * second + 99.0)
        delay.threads_used(second * 0.001, second * 50.0, 100.0 * second)
    assert delay.seconds == most


def test_totals_that_go_down_because_a_thread_ended_measure_nothing() -> None:
    delay = OwnDelay()
    delay.threads_used(1.0, 50.0, 0.0)
    delay.threads_used(1.1, 2.0, 1.0)
    assert delay.seconds == 0.0
