import threading
from random import Random
from typing import Any, cast

from nexar.links.reconnect import FIRST_PAUSE, LONGEST_PAUSE, Reconnect, pause_before
from nexar.transport.base import Carrier, ConnectRefused


class AdoptingLink:
    """Takes what it is given."""

    def __init__(self) -> None:
        self.adopted: list[object] = []

    def adopt(self, carrier: object) -> None:
        self.adopted.append(carrier)


class Longest(Random):
    """Always draws the upper bound."""

    def uniform(self, a: float, b: float) -> float:
        return b


class AtOnce(Random):
    """Always draws the lower bound, so that no test sleeps."""

    def uniform(self, a: float, b: float) -> float:
        return a


def refused() -> ConnectRefused:
    return ConnectRefused("somewhere", "nobody is there")


def test_the_first_attempt_is_made_at_once() -> None:
    assert pause_before(0, Longest()) == 0.0


def test_the_bound_of_a_pause_doubles_up_to_the_longest() -> None:
    assert [pause_before(attempt, Longest()) for attempt in (1, 2, 3)] == [
        FIRST_PAUSE,
        2 * FIRST_PAUSE,
        4 * FIRST_PAUSE,
    ]
    assert pause_before(50, Longest()) == LONGEST_PAUSE


def test_an_hour_of_attempts_is_counted_without_trouble() -> None:
    assert pause_before(5000, Longest()) == LONGEST_PAUSE


def test_pauses_are_anywhere_below_their_bound() -> None:
    random = Random(1)
    pauses = [pause_before(10, random) for _ in range(1000)]
    assert min(pauses) < 0.1 * LONGEST_PAUSE
    assert 0.9 * LONGEST_PAUSE < max(pauses) <= LONGEST_PAUSE


def test_a_link_is_dialed_until_somebody_answers() -> None:
    link, carrier = AdoptingLink(), object()
    answers: list[Any] = [refused(), OSError("no route"), carrier]

    def connect(deadline: float) -> Carrier:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return cast(Carrier, answer)

    redial = Reconnect(cast(Any, link), connect, 30, AtOnce())
    assert redial.join()
    assert link.adopted == [carrier]
    assert redial.attempts == 3
    assert redial.error is None


def test_dialing_ends_at_the_deadline_and_says_why_it_failed() -> None:
    def connect(deadline: float) -> Carrier:
        raise refused()

    redial = Reconnect(cast(Any, AdoptingLink()), connect, 0.01, AtOnce())
    assert not redial.join()
    assert redial.attempts >= 1
    assert isinstance(redial.error, ConnectRefused)


def test_a_dialing_that_is_stopped_makes_no_further_attempt() -> None:
    tried = threading.Event()

    def connect(deadline: float) -> Carrier:
        tried.set()
        raise refused()

    redial = Reconnect(cast(Any, AdoptingLink()), connect, 600, Longest())
    assert tried.wait(10)
    redial.stop()
    attempts = redial.attempts
    assert not redial.join()
    assert redial.attempts == attempts
