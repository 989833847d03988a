"""Actions are performed in order, one at a time, by one of the threads that add them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from nexar.cluster.control_loop import ActionQueue
from tests.ranks import EVENT_TIMEOUT


class Scene:
    """A queue of numbers; those in `held` are held back."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.done: list[int] = []
        self.held: set[int] = set()
        self.queue = ActionQueue[int](self.changed, self.do, self.held.__contains__)

    def do(self, action: int) -> None:
        self.done.append(action)

    def put(self, *actions: int) -> None:
        with self.changed:
            self.queue.add(actions)
        self.queue.perform()


def test_actions_are_performed_in_order() -> None:
    scene = Scene()
    scene.put(1, 2)
    scene.put(3)
    assert scene.done == [1, 2, 3]
    scene.queue.wait()


def test_what_is_held_back_holds_back_all_that_follows() -> None:
    scene = Scene()
    scene.held.add(2)
    scene.put(1, 2, 3)
    assert scene.done == [1]
    with scene.changed:
        scene.held.clear()
    scene.queue.perform()
    assert scene.done == [1, 2, 3]


def test_what_an_action_adds_is_performed_after_it() -> None:
    scene = Scene()

    def do(action: int) -> None:
        if action == 1:
            scene.put(9)
            assert scene.done == []
            scene.queue.wait()  # inside an action it would never end
        scene.done.append(action)

    scene.do = do  # type: ignore[method-assign]
    scene.queue = ActionQueue[int](scene.changed, do, scene.held.__contains__)
    scene.put(1, 2)
    assert scene.done == [1, 2, 9]


def test_another_thread_does_not_wait_for_an_action_and_its_own_are_performed_too() -> None:
    scene, entered, go_on = Scene(), threading.Event(), threading.Event()

    def do(action: int) -> None:
        if action == 1:
            entered.set()
            assert go_on.wait(EVENT_TIMEOUT)
        scene.done.append(action)

    scene.queue = ActionQueue[int](scene.changed, do, scene.held.__contains__)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(scene.put, 1)
        assert entered.wait(EVENT_TIMEOUT)
        scene.put(2)
        assert scene.done == []
        waiting = pool.submit(scene.queue.wait)
        assert not waiting.done()
        go_on.set()
        first.result(EVENT_TIMEOUT)
        waiting.result(EVENT_TIMEOUT)
    assert scene.done == [1, 2]


def test_an_action_that_fails_is_logged_and_the_others_are_performed(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()

    def do(action: int) -> None:
        scene.done.append(1 // action)

    scene.queue = ActionQueue[int](scene.changed, do, scene.held.__contains__)
    scene.put(0, 1)
    assert scene.done == [1]
    assert "could not perform int" in caplog.text
