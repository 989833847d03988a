import io
import sys
import threading

import pytest

from nexar.cluster import wait_notice
from nexar.cluster.wait_notice import NoticeTimes, WaitNotice, seconds_left, tell_on_stderr
from tests.ranks import EVENT_TIMEOUT


def test_the_first_notice_comes_after_two_seconds_and_the_next_ones_ever_later() -> None:
    times, reported = NoticeTimes(10.0), []
    for _ in range(4):
        reported.append(times.next)
        times.advance(times.next)
    assert reported == [12.0, 16.0, 24.0, 40.0]


def test_what_is_waited_for_is_reported_until_the_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_notice, "FIRST_NOTICE", 0.001)
    reported, twice = [], threading.Event()

    def report(text: str) -> None:
        reported.append(text)
        if len(reported) == 2:
            twice.set()

    with WaitNotice(report, lambda: "the seed"):
        assert twice.wait(EVENT_TIMEOUT)
    assert set(reported) == {"the seed"}


def test_a_notice_that_nobody_takes_does_not_hold_up_the_end_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_notice, "FIRST_NOTICE", 0.001)
    monkeypatch.setattr(wait_notice, "_LAST_NOTICE", 0.001)
    reported, taken = threading.Event(), threading.Event()

    def report(_: str) -> None:
        reported.set()
        taken.wait(EVENT_TIMEOUT)

    notice = WaitNotice(report, lambda: "the seed")
    with notice:
        assert reported.wait(EVENT_TIMEOUT)
    assert notice._thread.is_alive()
    taken.set()
    notice._thread.join(EVENT_TIMEOUT)


@pytest.mark.parametrize("closed", [True, False])
def test_a_notice_that_nobody_can_read_fails_no_call(monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if closed else None)
    tell_on_stderr("waiting for rank 1")


def test_without_a_listener_there_is_no_thread() -> None:
    before = threading.active_count()
    with WaitNotice(None, lambda: "the seed"):
        assert threading.active_count() == before


def test_no_end_is_named_where_there_is_none() -> None:
    assert seconds_left(float("inf")) == ""
