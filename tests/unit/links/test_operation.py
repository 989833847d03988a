import asyncio
import gc
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from nexar.errors import Cancelled, PeerLost
from nexar.links.operation import FINISHED, DeferredIO, Waiter
from nexar.transport.base import CarrierLost
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
        operation.add_waiter(waiter)
        other.add_waiter(waiter)
    operation.end()
    assert [waiter.pending for waiter in waiters] == [1, 1, 1]
    other.end()
    assert [waiter.pending for waiter in waiters] == [0, 0, 0]


def test_an_error_leaves_nothing_to_wait_for_to_any_waiter() -> None:
    operation, other = post(), post()
    waiters = [Waiter() for _ in range(3)]
    for waiter in waiters:
        operation.add_waiter(waiter)
        other.add_waiter(waiter)
    operation.end(lost())
    assert [waiter.pending for waiter in waiters] == [0, 0, 0]
    other.end()
    assert [waiter.pending for waiter in waiters] == [0, 0, 0]


def test_a_waiter_that_has_parted_is_not_notified() -> None:
    operation, waiter = post(), Waiter()
    operation.add_waiter(waiter)
    operation.remove_waiter(waiter)
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
        operation.add_waiter(waiter)
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


def test_calls_are_made_in_order_and_once() -> None:
    outbox, made = DeferredIO(), []
    for number in range(3):
        outbox.add(made.append, number)
    outbox.flush()
    outbox.flush()
    assert made == [0, 1, 2]


def test_a_call_may_leave_more_to_do() -> None:
    outbox, made = DeferredIO(), []
    outbox.add(lambda: outbox.add(made.append, "more"))
    outbox.flush()
    assert made == ["more"]


def test_a_lost_carrier_does_not_keep_the_others_from_sending() -> None:
    def lost() -> None:
        raise CarrierLost("peer", "gone")

    outbox, made = DeferredIO(), []
    outbox.add(lost)
    outbox.add(made.append, "other")
    outbox.flush()
    assert made == ["other"]


def test_a_wake_before_the_sleep_ends_it() -> None:
    waiter = Waiter()
    waiter.prepare()
    waiter.wake()
    waiter.sleep(60)


def test_a_wake_ends_the_sleep_of_another_thread() -> None:
    waiter = Waiter()
    waiter.prepare()
    sleeper = threading.Thread(target=waiter.sleep, args=(60,))
    sleeper.start()
    waiter.wake()
    sleeper.join(10)
    assert not sleeper.is_alive()


def test_a_wake_that_nobody_prepared_for_does_nothing() -> None:
    waiter = Waiter()
    waiter.wake()
    waiter.prepare()
    waiter.wake()
    waiter.wake()
    waiter.sleep(60)


def test_the_last_operation_wakes() -> None:
    waiter = Waiter()
    waiter.pending = 2
    waiter.prepare()
    waiter.count(None)
    assert waiter.asleep
    waiter.count(None)
    waiter.sleep(60)
    assert not waiter.pending


def test_the_first_error_wakes_and_what_ends_later_changes_nothing() -> None:
    waiter = Waiter()
    waiter.pending = 3
    waiter.prepare()
    waiter.count(ValueError())
    waiter.sleep(60)
    waiter.count(None)
    assert waiter.pending == 0
