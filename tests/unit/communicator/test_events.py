import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from nexar.communicator import events
from nexar.communicator.events import QUEUE_LENGTH, EventFeed, FailureEvent, FailureFeed, MembershipEvent, Subscription
from nexar.errors import UsageError
from tests.ranks import EVENT_TIMEOUT


@pytest.fixture
def feed() -> Iterator[EventFeed[int]]:
    made: EventFeed[int] = EventFeed("numbers")
    yield made
    made.close()


async def collect(subscription: AsyncIterator[int], count: int = -1) -> list[int]:
    found: list[int] = []
    while len(found) != count:
        try:
            found.append(await asyncio.wait_for(anext(subscription), EVENT_TIMEOUT))
        except StopAsyncIteration:
            break
    return found


def test_events_are_values() -> None:
    event = FailureEvent(3, 42, "its process has ended", "lost", 7)
    assert event == FailureEvent(rank=3, node=42, cause="its process has ended", state="lost", epoch=7)
    with pytest.raises(AttributeError):
        event.rank = 4  # type: ignore[misc]
    change = MembershipEvent(2, 3, 2, 2, 1, (), {0: "killed"}, communicator=None)
    assert (change.old_size, change.size, change.old_rank, change.rank) == (3, 2, 2, 1)


def test_nothing_runs_until_somebody_wants_a_callback(feed: EventFeed[int]) -> None:
    before = threading.active_count()
    feed.publish(1)
    subscription = feed.subscribe()
    feed.publish(2)
    assert threading.active_count() == before
    subscription.close()


def test_an_iterator_gets_what_is_published_after_it_subscribed_then_ends_with_the_feed(feed: EventFeed[int]) -> None:
    feed.publish(0)
    subscription = feed.subscribe()
    for number in (1, 2, 3):
        feed.publish(number)
    feed.close()
    feed.publish(4)
    assert asyncio.run(collect(subscription)) == [1, 2, 3]


def test_a_task_that_waits_is_woken_by_another_thread(feed: EventFeed[int]) -> None:
    async def listen() -> list[int]:
        subscription = feed.subscribe()
        listening = asyncio.create_task(collect(subscription, 2))
        await asyncio.sleep(0)
        await asyncio.to_thread(feed.publish, 1)
        await asyncio.to_thread(feed.publish, 2)
        return await listening

    assert asyncio.run(listen()) == [1, 2]


def test_a_task_that_waits_is_notified_of_the_end(feed: EventFeed[int]) -> None:
    async def listen() -> list[int]:
        listening = asyncio.create_task(collect(feed.subscribe()))
        await asyncio.sleep(0)
        await asyncio.to_thread(feed.close)
        return await listening

    assert asyncio.run(listen()) == []


def test_a_task_that_nobody_else_holds_lives_while_it_waits(feed: EventFeed[int]) -> None:
    async def listen() -> list[int]:
        received: list[int] = []
        done = asyncio.Event()

        async def one() -> None:
            async for number in feed.subscribe():
                received.append(number)
                break
            done.set()

        asyncio.create_task(one())  # noqa: RUF006 - this is what is tested
        await asyncio.sleep(0)
        gc.collect()
        feed.publish(1)
        await asyncio.wait_for(done.wait(), EVENT_TIMEOUT)
        return received

    assert asyncio.run(listen()) == [1]


def test_a_loop_that_is_left_leaves_nothing_behind(feed: EventFeed[int]) -> None:
    async def listen() -> None:
        async for number in _with(feed, 1):
            assert number == 1
            break

    asyncio.run(listen())
    gc.collect()
    assert feed._subscriptions() == []
    assert not feed._awaited


def _with(feed: EventFeed[int], number: int) -> Subscription[int]:
    subscription = feed.subscribe()
    feed.publish(number)
    return subscription


def test_an_event_is_not_lost_with_the_task_that_gave_up_waiting(feed: EventFeed[int]) -> None:
    async def listen() -> list[int]:
        subscription = feed.subscribe()
        impatient = asyncio.create_task(anext(subscription))
        await asyncio.sleep(0)
        impatient.cancel()
        feed.publish(1)  # the task is cancelled, and has not run since
        with pytest.raises(asyncio.CancelledError):
            await impatient
        return await collect(subscription, 1)

    assert asyncio.run(listen()) == [1]
    assert not feed._awaited


def test_only_one_task_may_wait(feed: EventFeed[int]) -> None:
    async def listen() -> None:
        subscription = feed.subscribe()
        first = asyncio.create_task(anext(subscription))
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="another task"):
            await anext(subscription)
        feed.publish(1)
        assert await first == 1

    asyncio.run(listen())


def test_a_loop_that_was_closed_does_not_disturb_who_publishes(feed: EventFeed[int]) -> None:
    subscription = feed.subscribe()
    loop = asyncio.new_event_loop()
    subscription._waiter = loop, loop.create_future()  # as if a task of that loop had waited
    loop.close()
    feed.publish(1)
    assert asyncio.run(collect(subscription, 1)) == [1]


def test_the_newest_are_kept_and_what_was_dropped_is_counted(feed: EventFeed[int]) -> None:
    subscription = feed.subscribe()
    for number in range(QUEUE_LENGTH + 3):
        feed.publish(number)
    feed.close()
    assert subscription.dropped == 3
    assert asyncio.run(collect(subscription)) == list(range(3, QUEUE_LENGTH + 3))


def test_a_callback_gets_every_event_in_order_in_a_thread_of_ours(feed: EventFeed[int]) -> None:
    received: list[tuple[int, str]] = []
    with feed.subscribe(lambda number: received.append((number, threading.current_thread().name))):
        for number in range(100):
            feed.publish(number)
        feed.close()  # what was published is delivered before
    assert received == [(number, "nexar-numbers") for number in range(100)]


def test_what_a_callback_raises_is_logged_and_the_others_and_the_next_are_called(
    feed: EventFeed[int], caplog: pytest.LogCaptureFixture
) -> None:
    received: list[int] = []
    tried: list[int] = []

    def fail(number: int) -> None:
        tried.append(number)
        raise ValueError(f"no {number}, please")

    feed.subscribe(fail)
    feed.subscribe(received.append)
    feed.publish(1)
    feed.publish(2)
    feed.close()
    assert (received, tried) == ([1, 2], [1, 2])
    assert "ValueError: no 1, please" in caplog.text
    assert "Traceback" in caplog.text


def test_a_callback_that_blocks_holds_up_neither_the_publisher_nor_the_others(feed: EventFeed[int]) -> None:
    free, received = threading.Event(), threading.Event()
    slow = feed.subscribe(lambda _: free.wait(EVENT_TIMEOUT))
    feed.subscribe(lambda _: received.set())
    feed.publish(1)
    assert received.wait(EVENT_TIMEOUT)
    free.set()
    slow.close()


def test_a_closed_subscription_receives_nothing_more(feed: EventFeed[int]) -> None:
    received: list[int] = []
    subscription = feed.subscribe(received.append)
    subscription.close()
    subscription.close()
    feed.publish(1)
    feed.close()
    assert received == []
    iterated = feed.subscribe()
    iterated.close()
    assert asyncio.run(collect(iterated)) == []


def test_a_callback_may_close_its_own_subscription_and_the_feed(feed: EventFeed[int]) -> None:
    received: list[int] = []
    ready = threading.Event()

    def once(number: int) -> None:
        ready.wait(EVENT_TIMEOUT)
        received.append(number)
        mine.close()
        feed.close()

    mine = feed.subscribe(once)
    feed.publish(1)
    feed.publish(2)
    ready.set()
    assert mine._thread is not None
    mine._thread.join(EVENT_TIMEOUT)
    assert received == [1]


def test_a_callback_that_never_returns_is_named_and_not_waited_for(
    feed: EventFeed[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_CALLBACK_TIMEOUT", 0.01)
    free, entered = threading.Event(), threading.Event()

    def hang(_: int) -> None:
        entered.set()
        free.wait(EVENT_TIMEOUT)

    feed.subscribe(hang)
    feed.publish(1)
    assert entered.wait(EVENT_TIMEOUT)
    with caplog.at_level(logging.WARNING):
        feed.close()
    assert "hang" in caplog.text
    free.set()


def test_the_events_of_a_callback_cannot_be_iterated(feed: EventFeed[int]) -> None:
    with feed.subscribe(lambda _: None) as subscription, pytest.raises(UsageError, match="callback"):
        asyncio.run(collect(subscription, 1))


@pytest.mark.parametrize("callback", [None, print])
def test_who_subscribes_to_a_closed_feed_learns_that_it_has_ended(feed: EventFeed[int], callback: object) -> None:
    feed.close()
    subscription = feed.subscribe(callback)  # type: ignore[arg-type]
    feed.publish(1)
    if callback is None:
        assert asyncio.run(collect(subscription)) == []
    subscription.close()


def test_one_loss_is_reported_once_until_who_was_lost_is_back() -> None:
    failures, received = FailureFeed("failures"), list[tuple[int, str]]()
    reported = [
        (5, "stuck"),
        (5, "lost"),
        (5, "lost"),
        (6, "left"),
        (6, "lost"),
        (5, "stuck"),
        (5, "back"),
        (5, "lost"),
    ]
    with failures.subscribe(lambda event: received.append((event.node, event.state))):
        for node, state in reported:
            failures.publish(FailureEvent(1, node, "a cause", state, 1))  # type: ignore[arg-type]
        failures.close()
    assert received == [(5, "stuck"), (5, "lost"), (6, "left"), (5, "back"), (5, "lost")]


def test_of_many_that_are_gone_the_newest_are_remembered() -> None:
    failures = FailureFeed("failures")
    for node in range(QUEUE_LENGTH + 2):
        failures.publish(FailureEvent(1, node, "a cause", "lost", 1))
    assert len(failures._gone) == QUEUE_LENGTH
    failures.close()
