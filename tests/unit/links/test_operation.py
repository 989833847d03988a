import asyncio
import gc
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from nexar.errors import Cancelled, PeerLost
from nexar.links.operation import FINISHED
from nexar.links.waiter import Waiter
from tests.unit.links.waiting import Posted


def post() -> Posted:
    return Posted(threading.Lock())


def lost() -> PeerLost:
    return PeerLost(node=3, cause="it is gone")


async def awaited(operation: Posted) -> Any:
    return await operation


# -- done once -------------------------------------------------------------------------------------------------------


def test_the_first_outcome_stands() -> None:
    operation = post()
    operation.end()
    operation.end(lost())
    assert operation.result() is None


def test_each_result_raises_an_error_of_its_own() -> None:
    operation = post()
    operation.end(lost())
    raised = []
    for _ in range(2):
        with pytest.raises(PeerLost) as caught:
            operation.result()
        raised.append(caught.value)
    assert raised[0] is not raised[1]


def test_every_waiter_of_an_operation_counts_it() -> None:
    operation, other = post(), post()
    waiters = [Waiter() for _ in range(3)]
    for waiter in waiters:
        operation.join(waiter)
        other.join(waiter)
    operation.end()
    assert [waiter.pending for waiter in waiters] == [1, 1, 1]
    other.end()
    assert [waiter.pending for waiter in waiters] == [0, 0, 0]


def test_an_error_leaves_nothing_to_wait_for_to_any_waiter() -> None:
    operation, other = post(), post()
    waiters = [Waiter() for _ in range(3)]
    for waiter in waiters:
        operation.join(waiter)
        other.join(waiter)
    operation.end(lost())
    assert [waiter.pending for waiter in waiters] == [0, 0, 0]
    other.end()
    assert [waiter.pending for waiter in waiters] == [0, 0, 0]


def test_a_waiter_that_has_parted_is_not_told() -> None:
    operation, waiter = post(), Waiter()
    operation.join(waiter)
    operation.part(waiter)
    operation.end()
    assert waiter.pending == 1


# -- asyncio ---------------------------------------------------------------------------------------------------------


def test_awaiting_ends_when_another_thread_finishes_it() -> None:
    async def main() -> None:
        operation = post()
        task = asyncio.ensure_future(awaited(operation))
        await asyncio.sleep(0)
        await asyncio.to_thread(operation.end)
        assert await task is None

    asyncio.run(main())


def test_awaiting_raises_the_error() -> None:
    async def main() -> None:
        operation = post()
        operation.end(lost())
        with pytest.raises(PeerLost):
            await operation
        await FINISHED

    asyncio.run(main())


def test_cancelling_the_task_cancels_the_operation() -> None:
    async def main() -> Posted:
        operation = post()
        task = asyncio.ensure_future(awaited(operation))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return operation

    assert asyncio.run(main()).cancelled


def test_closing_the_coroutine_cancels_the_operation() -> None:
    async def main() -> Posted:
        operation = post()
        coroutine: Coroutine[Any, Any, Any] = awaited(operation)
        coroutine.send(None)
        coroutine.close()
        return operation

    assert asyncio.run(main()).cancelled


def test_any_exception_thrown_into_the_await_cancels_the_operation() -> None:
    async def main() -> Posted:
        operation = post()
        coroutine: Coroutine[Any, Any, Any] = awaited(operation)
        coroutine.send(None)
        with pytest.raises(KeyboardInterrupt):
            coroutine.throw(KeyboardInterrupt)
        return operation

    assert asyncio.run(main()).cancelled


def test_an_operation_may_end_after_the_loop_that_awaited_it() -> None:
    operation, waiter = post(), Waiter()
    loop = asyncio.new_event_loop()
    coroutine = awaited(operation)

    async def begin() -> None:
        coroutine.send(None)

    loop.run_until_complete(begin())
    loop.close()
    with operation.lock:
        operation.join(waiter)
    operation.end()
    assert operation.done
    assert not waiter.pending
    assert not operation.lock.locked()
    coroutine.close()


def test_a_task_that_was_forgotten_with_its_loop_does_not_hurt_the_node() -> None:
    operation = post()
    loop = asyncio.new_event_loop()
    task = loop.create_task(awaited(operation))
    loop.run_until_complete(asyncio.sleep(0))
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # the point of this test
    loop.close()
    del task
    gc.collect()
    operation.end()
    assert operation.done


def test_a_cancelled_operation_says_so() -> None:
    operation = post()
    operation.cancel()
    with pytest.raises(Cancelled):
        operation.result()
