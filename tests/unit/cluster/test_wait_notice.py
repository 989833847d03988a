import io
import sys
import threading

import pytest

from nexar.cluster import wait_notice
from nexar.cluster.wait_notice import NoticeTimes, WaitNotice, seconds_left, tell_on_stderr
from tests.ranks import PATIENCE


def test_the_first_notice_comes_after_two_seconds_and_the_next_ones_ever_later() -> None:
    times, told = NoticeTimes(10.0), []
    for _ in range(4):
        told.append(times.next)
        times.advance(times.next)
    assert told == [12.0, 16.0, 24.0, 40.0]


def test_what_is_waited_for_is_told_until_the_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_notice, "FIRST_NOTICE", 0.001)
    told, twice = [], threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            twice.set()

    with WaitNotice(tell, lambda: "the seed"):
        assert twice.wait(PATIENCE)
    assert set(told) == {"the seed"}


def test_a_notice_that_nobody_takes_does_not_hold_up_the_end_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_notice, "FIRST_NOTICE", 0.001)
    monkeypatch.setattr(wait_notice, "_LAST_NOTICE", 0.001)
    told, taken = threading.Event(), threading.Event()

    def tell(_: str) -> None:
        told.set()
        taken.wait(PATIENCE)

    notice = WaitNotice(tell, lambda: "the seed")
    with notice:
        assert told.wait(PATIENCE)
    assert notice._thread.is_alive()
    taken.set()
    notice._thread.join(PATIENCE)


@pytest.mark.parametrize("closed", [True, False])
def test_a_notice_that_nobody_can_read_fails_no_call(monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if closed else None)
    tell_on_stderr("waiting for rank 1")


def test_nobody_to_tell_costs_no_thread() -> None:
    before = threading.active_count()
    with WaitNotice(None, lambda: "the seed"):
        assert threading.active_count() == before


def test_no_end_is_named_where_there_is_none() -> None:
    assert seconds_left(float("inf")) == ""
