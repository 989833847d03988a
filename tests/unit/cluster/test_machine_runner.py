"""Actions are performed in order, one at a time, by one of the threads that put events."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.decisions.membership_events import OwnDelayChanged, RecoverNow, Tick
from nexar.cluster.machine_runner import MachineRunner
from tests.ranks import EVENT_TIMEOUT
from tests.unit.cluster.memory_mesh import eventually


class Scene:
    """A machine whose events are the lists of their actions: numbers."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.done: list[int] = []
        self.delay = 0.0
        self.due_at: float | None = None
        self.loop = ControlLoop()
        self.runner = MachineRunner(cast(Any, self), self.loop, cast(Any, self.perform), own_delay=lambda: self.delay)

    def perform(self, action: int) -> None:
        self.do(action)

    def do(self, action: int) -> None:
        self.done.append(action)

    def put(self, *actions: int) -> list[Any]:
        return self.runner.put(cast(Any, list(actions)))

    # -- the machine

    def step(self, event: Any, now: float) -> list[Any]:
        self.events.append(event)
        return event if isinstance(event, list) else []

    def due(self, now: float) -> float | None:
        return self.due_at


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.runner.stop()
    made.runner.stop()
    made.loop.close()


def test_actions_are_performed_in_order_and_returned(scene: Scene) -> None:
    assert scene.put(1, 2) == [1, 2]
    assert scene.put(3) == [3]
    assert scene.done == [1, 2, 3]
    scene.runner.wait()


def test_what_an_action_puts_is_performed_after_those_that_wait(scene: Scene) -> None:
    def do(action: int) -> None:
        if action == 1:
            assert scene.put(9) == [9]
            assert scene.done == []
            scene.runner.wait()  # inside an action it would never end
        scene.done.append(action)

    scene.do = do  # type: ignore[method-assign]
    scene.put(1, 2)
    assert scene.done == [1, 2, 9]


def test_another_thread_does_not_wait_for_an_action_and_its_own_are_performed_too(scene: Scene) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def do(action: int) -> None:
        if action == 1:
            entered.set()
            assert go_on.wait(EVENT_TIMEOUT)
        scene.done.append(action)

    scene.do = do  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(scene.put, 1)
        assert entered.wait(EVENT_TIMEOUT)
        scene.put(2)
        assert scene.done == []
        waiting = pool.submit(scene.runner.wait)
        assert not waiting.done()
        go_on.set()
        first.result(EVENT_TIMEOUT)
        waiting.result(EVENT_TIMEOUT)
    assert scene.done == [1, 2]


def test_an_action_that_fails_is_logged_and_the_others_are_performed(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.do = lambda action: scene.done.append(1 // action)  # type: ignore[method-assign]
    scene.put(0, 1)
    assert scene.done == [1]
    assert "could not perform int" in caplog.text


def test_the_machine_gets_a_tick_when_it_is_due(scene: Scene) -> None:
    scene.due_at = scene.loop.now() + 0.01
    scene.put()
    eventually(lambda: scene.events.count(Tick()) > 1, "a tick, and another since it is due again")


def test_what_a_finaliser_put_is_handled_with_the_next_event_and_before_it(scene: Scene) -> None:
    scene.runner.put_later(cast(Any, [1]))
    assert scene.events == []
    assert scene.put(2) == [2]
    assert scene.done == [1, 2]


def test_the_machine_learns_of_a_delay_that_has_changed_much(scene: Scene) -> None:
    for scene.delay in (0.1, 0.3, 0.4, 0.0):
        scene.put()
    assert scene.events == [[], OwnDelayChanged(0.3), [], [], OwnDelayChanged(0.0), []]


def test_once_stopped_nothing_is_decided_about_the_membership(scene: Scene) -> None:
    scene.runner.stop()
    assert scene.runner.put(RecoverNow()) == []
    scene.put(1)
    assert (scene.events, scene.done) == ([[1]], [1])


def test_in_a_forked_child_nothing_is_done_though_the_lock_is_held(scene: Scene) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with scene.runner.changed:
            held.set()
            assert done.wait(EVENT_TIMEOUT)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(EVENT_TIMEOUT)
    child = os.fork()
    if child == 0:
        threading.Timer(EVENT_TIMEOUT, os._exit, (1,)).start()
        os._exit(len(scene.put(1)) + len(scene.done))
    done.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
