import signal

import pytest

from nexar.links.interrupt import Interrupts


@pytest.fixture
def interrupts() -> object:
    before = signal.getsignal(signal.SIGINT)
    yield Interrupts()
    signal.signal(signal.SIGINT, before)


def test_a_signal_while_waiting_wakes_the_wait_and_raises_when_it_is_settled(interrupts: Interrupts) -> None:
    woken: list[bool] = []
    interrupts.begin(lambda: woken.append(True))
    signal.raise_signal(signal.SIGINT)
    assert woken
    assert interrupts.pending
    with pytest.raises(KeyboardInterrupt):
        interrupts.settle()
    interrupts.end()


def test_a_signal_that_was_not_settled_raises_at_the_end(interrupts: Interrupts) -> None:
    interrupts.begin(lambda: None)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupts.end()


def test_a_signal_at_any_other_time_raises_at_once(interrupts: Interrupts) -> None:
    interrupts.begin(lambda: None)
    interrupts.end()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_the_users_own_handler_is_called_and_not_replaced(interrupts: Interrupts) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    interrupts.begin(lambda: None)
    signal.raise_signal(signal.SIGINT)
    assert not seen
    interrupts.settle()
    assert seen == [signal.SIGINT]
    interrupts.end()


def test_an_ignored_signal_stays_ignored(interrupts: Interrupts) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.begin(lambda: None)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    interrupts.end()
