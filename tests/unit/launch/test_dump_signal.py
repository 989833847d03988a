import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nexar.collectives import flight_recorder
from nexar.launch import dump_signal
from nexar.launch.dump_signal import listen
from nexar.launch.plan import MARK_VARIABLE


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_the_signal_makes_every_node_of_the_process_write(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def dump_all(reason: str) -> int:
        asked.append(reason)
        return 1

    monkeypatch.setattr(flight_recorder, "dump_all", dump_all)
    listen()
    signal.raise_signal(signal.SIGUSR1)
    assert asked == ["SIGUSR1"]


def test_a_handler_of_the_users_stays() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    listen()
    signal.raise_signal(signal.SIGUSR1)
    assert seen == [signal.SIGUSR1]
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    listen()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_only_the_main_thread_installs_it() -> None:
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_who_was_launched_and_has_no_communicator_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK_VARIABLE, "a launch")
    monkeypatch.setattr(flight_recorder, "dump_all", lambda _: 0)
    listen()
    signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL


def test_without_a_communicator_the_signal_does_what_it_did_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(MARK_VARIABLE, raising=False)
    monkeypatch.setattr(flight_recorder, "dump_all", lambda _: 0)
    monkeypatch.setattr(dump_signal.os, "kill", lambda process, number: sent.append((process, number)))
    listen()
    signal.raise_signal(signal.SIGUSR1)
    assert sent == [(os.getpid(), signal.SIGUSR1)]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
