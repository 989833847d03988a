import os
import select
import signal

import pytest

from nexar.launch.event_sources import STOP_SIGNALS, SignalInbox


def readable(inbox):
    return bool(select.select([inbox], [], [], 5)[0])


@pytest.mark.parametrize("number", [*STOP_SIGNALS, signal.SIGUSR1, signal.SIGCHLD, signal.SIGCONT])
def test_a_signal_can_be_waited_for(number):
    with SignalInbox() as inbox:
        os.kill(os.getpid(), number)
        assert readable(inbox)
        assert inbox.take() == [number]


def test_nothing_came_means_nothing():
    with SignalInbox() as inbox:
        assert inbox.take() == []


def test_what_was_before_is_restored():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
    with SignalInbox():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
    assert before == after


def test_an_ignored_signal_stays_ignored():
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalInbox() as inbox:
            os.kill(os.getpid(), signal.SIGHUP)
            assert inbox.take() == []
    finally:
        signal.signal(signal.SIGHUP, former)
