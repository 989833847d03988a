"""How many threads a pool has, which task gets one first, and what becomes of tasks that fail or come too late."""

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from nexar.cluster.control_loop import DialCancelled
from nexar.cluster.task_pool import Priority, TaskPool
from tests.ranks import EVENT_TIMEOUT
from tests.unit.cluster.memory_mesh import eventually

NAME = "nexar-test-pool"


class Blocker:
    """A task that runs until a test ends it."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.go_on.wait(EVENT_TIMEOUT)


@pytest.fixture
def blockers() -> Iterator[list[Blocker]]:
    made: list[Blocker] = []
    yield made
    for each in made:
        each.go_on.set()


@pytest.fixture
def pool(blockers: list[Blocker]) -> Iterator[TaskPool]:
    made = TaskPool(NAME, 4, reserved=1, idle_seconds=0.05)
    yield made
    for each in blockers:
        each.go_on.set()
    made.close()


def fill(pool: TaskPool, blockers: list[Blocker], count: int, priority: Priority) -> list[Blocker]:
    added = [Blocker() for _ in range(count)]
    blockers.extend(added)
    for each in added:
        pool.submit(each, priority)
    return added


def names() -> set[str]:
    return {each.name for each in threading.enumerate() if each.name.startswith(NAME)}


def test_threads_start_when_needed_up_to_the_bound_and_end_when_idle(pool: TaskPool, blockers: list[Blocker]) -> None:
    assert pool.threads == 0
    added = fill(pool, blockers, 6, Priority.PROBE)
    eventually(lambda: sum(each.begun.is_set() for each in added) == 4, "four run")
    assert names() == {f"{NAME}-{number}" for number in (1, 2, 3, 4)}
    for each in added:
        each.go_on.set()
    eventually(lambda: all(each.begun.is_set() for each in added), "the rest ran too")
    eventually(lambda: not names(), "all threads ended")
    assert pool.threads == 0


def test_an_idle_thread_takes_the_next_task() -> None:
    pool = TaskPool(NAME, 4, idle_seconds=EVENT_TIMEOUT)
    for _ in range(3):
        done = threading.Event()
        pool.submit(done.set)
        assert done.wait(EVENT_TIMEOUT)
        eventually(lambda: pool._idle == 1, "it is idle")
    assert names() == {f"{NAME}-1"}
    pool.close()


def test_waiting_tasks_run_by_priority_then_in_order(pool: TaskPool, blockers: list[Blocker]) -> None:
    added = fill(pool, blockers, 4, Priority.PROBE)
    eventually(lambda: all(each.begun.is_set() for each in added), "all threads are taken")
    ran: list[str] = []
    waiting = [
        ("background", Priority.BACKGROUND),
        ("vote", Priority.CONTROL),
        ("probe", Priority.PROBE),
        ("second vote", Priority.CONTROL),
    ]
    for name, priority in waiting:
        pool.submit(lambda name=name: ran.append(name), priority)  # type: ignore[misc]
    added[0].go_on.set()
    eventually(lambda: len(ran) == 4, "all ran")
    assert ran == ["probe", "vote", "second vote", "background"]


def test_background_tasks_leave_threads_to_the_others(pool: TaskPool, blockers: list[Blocker]) -> None:
    slow = fill(pool, blockers, 5, Priority.BACKGROUND)
    eventually(lambda: sum(each.begun.is_set() for each in slow) == 3, "three run")
    done = threading.Event()
    pool.submit(done.set, Priority.CONTROL)
    assert done.wait(EVENT_TIMEOUT)
    assert sum(each.begun.is_set() for each in slow) == 3
    slow[0].go_on.set()
    eventually(lambda: sum(each.begun.is_set() for each in slow) == 4, "the next runs")


def test_a_task_that_raises_is_logged_and_a_cancelled_one_is_not(
    pool: TaskPool, caplog: pytest.LogCaptureFixture
) -> None:
    def cancelled() -> None:
        raise DialCancelled

    done = threading.Event()
    pool.submit(lambda: 1 // 0, Priority.PROBE)  # type: ignore[arg-type,return-value]
    pool.submit(cancelled, Priority.PROBE)
    pool.submit(done.set, Priority.CONTROL)
    assert done.wait(EVENT_TIMEOUT)
    eventually(lambda: "ZeroDivisionError" in caplog.text, "a traceback")
    assert [record.getMessage() for record in caplog.records] == [f"a task of {NAME} raised"]


def test_closing_waits_for_running_tasks_and_drops_the_others(pool: TaskPool, blockers: list[Blocker]) -> None:
    running = fill(pool, blockers, 3, Priority.BACKGROUND)
    dropped = fill(pool, blockers, 2, Priority.BACKGROUND)
    eventually(lambda: all(each.begun.is_set() for each in running), "they run")
    threading.Timer(0.02, lambda: [each.go_on.set() for each in running]).start()
    pool.close()
    pool.close()
    pool.submit(dropped[0])
    assert not names()
    assert not any(each.begun.is_set() for each in dropped)


def test_a_thread_that_is_about_to_start_is_joined(pool: TaskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    starting, go, ran = threading.Event(), threading.Event(), threading.Event()
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if thread.name.startswith(NAME):
            starting.set()
            go.wait(EVENT_TIMEOUT)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    submitting = threading.Thread(target=pool.submit, args=(ran.set,))
    submitting.start()
    assert starting.wait(EVENT_TIMEOUT)
    threading.Timer(0.02, go.set).start()
    pool.close()
    assert not names()
    submitting.join()


def test_without_any_thread_the_submitter_is_told(pool: TaskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", cannot)
        with pytest.raises(RuntimeError, match="new thread"):
            pool.submit(ran.set)
    done = threading.Event()
    pool.submit(done.set)
    assert done.wait(EVENT_TIMEOUT)
    assert not ran.is_set()


def test_with_some_threads_a_task_waits_for_one_of_them(
    pool: TaskPool, blockers: list[Blocker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    (running,) = fill(pool, blockers, 1, Priority.PROBE)
    assert running.begun.wait(EVENT_TIMEOUT)
    ran = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", cannot)
        pool.submit(ran.set)
    running.go_on.set()
    assert ran.wait(EVENT_TIMEOUT)


def test_an_idle_thread_keeps_no_task_alive() -> None:
    pool = TaskPool(NAME, 1, idle_seconds=EVENT_TIMEOUT)
    task: Callable[[], None] = Blocker()
    assert isinstance(task, Blocker)
    task.go_on.set()
    pool.submit(task)
    assert task.begun.wait(EVENT_TIMEOUT)
    dead = weakref.ref(task)
    del task

    def is_dead() -> bool:
        gc.collect()
        return dead() is None

    eventually(is_dead, "it is collected")
    pool.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_runs_nothing_and_waits_for_nothing(pool: TaskPool, blockers: list[Blocker]) -> None:
    (running,) = fill(pool, blockers, 1, Priority.PROBE)
    assert running.begun.wait(EVENT_TIMEOUT)
    child = os.fork()
    if child == 0:
        pool.submit(lambda: os._exit(1))
        pool.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
