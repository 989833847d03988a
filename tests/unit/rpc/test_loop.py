import asyncio
import logging
import threading
import time
from typing import Any

import pytest

from nexar.rpc.loop import Loop
from tests.ranks import PATIENCE


def started(loop: Loop, work: Any) -> threading.Event:
    """Set when the task has ended."""
    ended = threading.Event()
    loop.soon(lambda: loop.start(work(), lambda _: ended.set()) and None)
    return ended


def test_coroutines_run_beside_one_another() -> None:
    loop = Loop("test")
    meet = asyncio.Barrier(3)

    async def work() -> None:
        await meet.wait()

    endings = [started(loop, work) for _ in range(3)]
    assert all(each.wait(PATIENCE) for each in endings)
    loop.close(PATIENCE)


def test_closing_cancels_what_runs_and_leaves_no_thread() -> None:
    loop = Loop("test")
    begun = threading.Event()
    seen: list[str] = []

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    ended = started(loop, work)
    assert begun.wait(PATIENCE)
    loop.close(PATIENCE)
    assert ended.wait(PATIENCE)
    assert seen == ["cancelled"]
    loop.soon(lambda: pytest.fail("it ran"))
    loop.close(PATIENCE)


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_who_wants_to_end_the_process_ends_only_itself(end: type[BaseException]) -> None:
    loop = Loop("test")
    errors: list[BaseException | None] = []
    ended = threading.Event()

    async def work() -> None:
        raise end

    def told(task: asyncio.Task[None]) -> None:
        errors.append(task.exception())
        ended.set()

    def begin() -> None:
        loop.start(work(), told)

    loop.soon(begin)
    assert ended.wait(PATIENCE)
    assert [type(error) for error in errors] == [end]
    assert started(loop, lambda: asyncio.sleep(0)).wait(PATIENCE), "others go on"
    loop.close(PATIENCE)


def test_who_stops_the_loop_stops_nobody() -> None:
    loop = Loop("test")

    async def work() -> None:
        asyncio.get_running_loop().stop()

    assert started(loop, work).wait(PATIENCE)
    assert started(loop, lambda: asyncio.sleep(0)).wait(PATIENCE)
    loop.close(PATIENCE)


def test_a_loop_that_is_blocked_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop("stubborn")
    go, begun = threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        while not go.is_set():
            time.sleep(0.001)  # noqa: ASYNC251 - a function that blocks the loop is what this is about

    ended = started(loop, work)
    assert begun.wait(PATIENCE)
    with caplog.at_level(logging.WARNING):
        loop.close(0.01)
    assert "stubborn" in caplog.text
    go.set()
    assert ended.wait(PATIENCE)
    loop.close(PATIENCE)
