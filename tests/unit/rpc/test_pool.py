import logging
import threading

import pytest

from nexar.rpc.pool import Pool
from tests.ranks import PATIENCE


def test_tasks_run_at_once_and_beside_one_another() -> None:
    pool = Pool("test", 3)
    together = threading.Barrier(4)
    for _ in range(3):
        pool.submit(lambda: together.wait(PATIENCE) and None)
    together.wait(PATIENCE)
    pool.close(PATIENCE)


def test_no_more_threads_are_made_than_the_limit_and_none_for_what_a_free_one_can_do() -> None:
    pool = Pool("test", 2)
    done = threading.Semaphore(0)
    go = threading.Event()

    def task() -> None:
        go.wait(PATIENCE)
        done.release()

    for _ in range(6):
        pool.submit(task)
    assert len(pool._threads) == 2
    go.set()
    for _ in range(6):
        assert done.acquire(timeout=PATIENCE)
    pool.close(PATIENCE)


def test_what_is_submitted_after_the_end_is_dropped() -> None:
    pool = Pool("test", 1)
    pool.close(PATIENCE)
    pool.submit(lambda: pytest.fail("it ran"))
    pool.close(PATIENCE)


def test_closing_from_one_of_its_own_threads_does_not_wait_for_itself() -> None:
    pool = Pool("test", 1)
    closed = threading.Event()

    def task() -> None:
        pool.close(PATIENCE)
        closed.set()

    pool.submit(task)
    assert closed.wait(PATIENCE)
    pool.close(PATIENCE)


def test_a_task_that_does_not_end_is_named_in_the_log_and_ends_later(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool("stubborn", 1)
    go = threading.Event()
    pool.submit(lambda: go.wait(PATIENCE) and None)
    with caplog.at_level(logging.WARNING):
        pool.close(0.01)
    assert "stubborn-1" in caplog.text
    go.set()
    pool.close(PATIENCE)
