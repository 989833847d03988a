import threading
from collections.abc import Iterator

import pytest

from nexar.links import background
from nexar.links.background import Background
from nexar.links.drive import Drive
from nexar.links.leadership import Leadership
from nexar.links.waiter import Waiter
from tests.unit.links.waiting import Sleep, Told


class Stage:
    """A background with everything that it drives."""

    def __init__(self) -> None:
        self.sleep = Sleep()
        self.transport = Told(self.sleep)
        self.drive = Drive(self.sleep, [self.transport], 0.0)
        self.leadership = Leadership(threading.Lock())

    def open(self) -> Background:
        self.background = Background(self.leadership, self.drive)
        return self.background


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.drive.stop()
    made.background.close()


def polled(stage: Stage) -> bool:
    """Does anybody drive?"""
    done = threading.Event()
    stage.transport.tell(done.set)
    return done.wait(10)


def test_it_drives_when_nobody_leads(stage: Stage) -> None:
    stage.open()
    assert polled(stage)


def test_it_hands_over_to_who_follows(stage: Stage) -> None:
    background, waiter = stage.open(), Waiter()
    assert stage.sleep.begun.wait(10)
    waiter.prepare()
    stage.leadership.followers.append(waiter)
    assert background.leads
    stage.sleep.kick()
    waiter.sleep(10)
    assert not waiter.asleep
    stage.leadership.followers.remove(waiter)


def test_it_takes_over_from_a_leader_under_whom_it_parked(stage: Stage) -> None:
    stage.leadership.lead.acquire()
    background = stage.open()
    while not background.parked:  # after some ticks under this one leader
        background._thread.join(0.002)
    stage.leadership.lead.release()
    background.unpark()
    background.unpark()
    assert polled(stage)


def test_it_steps_in_at_once_when_asked_and_nobody_leads(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_TICK", 3600.0)
    made = stage.open()
    assert not stage.sleep.begun.wait(0.01)
    made.step_in()
    assert polled(stage)
    made.step_in()
    assert polled(stage)
