"""Collectives that do not come to their end: given up, dropped, different, late; and the next one, which works."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from nexar.communicator.communicator import Communicator
from nexar.errors import Cancelled, CollectiveMismatch, CollectiveTimeout, NexarError
from tests.conformance.collectives.flight import LARGE, await_news, awaited, raises_naming, works
from tests.conformance.worlds import ranks_over
from tests.ranks import EVENT_TIMEOUT, on_every


@pytest.fixture(params=[("memory", 3), ("shm", 3), ("tls", 3)], ids=lambda param: param[0])
def world(request: pytest.FixtureRequest) -> Iterator[list[Communicator]]:
    scheme, size = request.param
    with ranks_over(scheme, size) as made:
        yield made


@pytest.mark.parametrize("count", [3, LARGE])
def test_a_request_that_one_rank_cancels_raises_on_all_and_names_it(world: list[Communicator], count: int) -> None:
    """Rank 1 is in it, rank 2 comes too late."""
    mine, other = (comm.start.all_reduce(np.ones(count)) for comm in world[:2])
    mine.cancel()
    assert mine.done()
    with pytest.raises(Cancelled):
        mine.wait()
    with raises_naming(0):
        other.wait(EVENT_TIMEOUT)
    await_news(world[2:], 0)
    with raises_naming(0):
        world[2].all_reduce(np.ones(count), timeout=EVENT_TIMEOUT)
    assert works(world)


SYMMETRIC = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_gather_v", "all_gather_object"]


def test_who_comes_after_a_call_was_given_up_ends_it_at_once_and_the_next_one_works(world: list[Communicator]) -> None:
    """Of small arrays, all that a rank needs may have come before: then it has its result."""
    for verb in SYMMETRIC:
        first, *others = world
        getattr(first.start, verb)(np.ones(2 * len(world))).cancel()
        for comm in others:
            with suppress(Cancelled):
                getattr(comm, verb)(np.ones(2 * len(world)), timeout=EVENT_TIMEOUT)
    assert works(world)


def test_a_request_started_after_its_call_was_given_up_fails_when_it_is_waited_for(world: list[Communicator]) -> None:
    """It has taken its number all the same: what is started after it is what the others start after it."""
    first, *others = world
    first.start.all_reduce(1.0).cancel()
    await_news(others, 0)
    for comm in others:
        with raises_naming(0):
            comm.all_reduce(1.0, timeout=EVENT_TIMEOUT)
    given_up, good = (first.start.all_reduce(value) for value in (1.0, 2.0))
    given_up.cancel()
    await_news(others, 1)
    pairs = [(comm.start.all_reduce(1.0), comm.start.all_reduce(2.0)) for comm in others]
    for failing, working in pairs:
        with raises_naming(0):
            failing.wait(EVENT_TIMEOUT)
        assert working.wait(EVENT_TIMEOUT) == 2.0 * len(world)
    assert good.wait(EVENT_TIMEOUT) == 2.0 * len(world)


def test_buckets_that_one_rank_gives_up_are_over_for_all(world: list[Communicator]) -> None:
    arrays = [np.ones(1000) for _ in range(5)]
    first, *others = world
    first.start.all_reduce_bucketed(arrays, bucket_bytes=8000).cancel()
    await_news(others, 0)
    for comm in others:
        with raises_naming(0):
            comm.all_reduce_bucketed([array.copy() for array in arrays], bucket_bytes=8000, timeout=EVENT_TIMEOUT)
    assert works(world)


def test_what_is_cancelled_leaves_its_buffer_alone_and_the_others_go_on(world: list[Communicator]) -> None:
    given_up = threading.Event()

    def run(comm: Communicator) -> bool:
        kept = [np.full(LARGE, comm.rank + number) for number in range(3)]
        if comm.rank == 2:
            assert given_up.wait(EVENT_TIMEOUT)
        requests = [comm.start.all_reduce(array) for array in kept]
        if comm.rank == 1:
            requests[1].cancel()
            kept[1][:] = -1
            given_up.set()
        requests[0].wait(EVENT_TIMEOUT)
        requests[2].wait(EVENT_TIMEOUT)
        with pytest.raises(Cancelled):
            requests[1].wait(EVENT_TIMEOUT)
        total = sum(range(comm.size))
        return (
            bool((kept[0] == total).all())
            and bool((kept[2] == total + 2 * comm.size).all())
            and (comm.rank != 1 or bool((kept[1] == -1).all()))
        )

    assert on_every(world, run) == [True] * len(world)
    assert works(world)


def test_a_request_that_is_dropped_is_cancelled(world: list[Communicator]) -> None:
    first, *others = world
    first.start.all_reduce(np.ones(LARGE))
    gc.collect()
    for comm in others:
        with raises_naming(0):
            comm.all_reduce(np.ones(LARGE), timeout=EVENT_TIMEOUT)
    assert works(world)


def test_requests_that_are_done_may_be_dropped(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        for _ in range(20):
            comm.start.all_reduce(np.ones(10)).wait()

    on_every(world, run)
    assert works(world)


def test_a_function_that_raises_ends_the_call_on_all_ranks(world: list[Communicator]) -> None:
    def fail(left: Any, right: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    def run(comm: Communicator) -> str:
        try:
            comm.all_reduce(np.ones(3), fail if comm.rank == 0 else np.maximum, timeout=EVENT_TIMEOUT)
        except (ZeroDivisionError, NexarError) as error:
            return type(error).__name__
        return "fine"

    ends = on_every(world, run)
    assert "ZeroDivisionError" in ends
    assert set(ends) <= {"ZeroDivisionError", "Cancelled", "fine"}
    assert all(isinstance(each, str) for each in ends)


@pytest.mark.parametrize("awaits", [False, True])
def test_requests_that_differ_and_only_receive_learn_of_it_soon(world: list[Communicator], *, awaits: bool) -> None:
    """Each waits for a root that is not itself: no frame of the one ever comes to the other."""

    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            return
        request = comm.start.scatter_object(None, root=3 - comm.rank)
        with pytest.raises(CollectiveMismatch):
            asyncio.run(awaited(request)) if awaits else request.wait()

    began = time.monotonic()
    on_every(world, run)
    assert time.monotonic() - began < 5.0  # the timeout is 30


@pytest.mark.full
def test_buckets_that_make_progress_last_longer_than_the_timeout(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> bool:
        arrays = [np.full(4, comm.rank) for _ in range(5)]
        if comm.rank == 0:
            comm.start.all_reduce_bucketed(arrays, bucket_bytes=1, timeout=1.0).wait()
        else:
            for array in arrays:  # what buckets are to the others, one by one
                time.sleep(0.5)
                comm.all_reduce(array)
        return all(np.all(array == sum(range(comm.size))) for array in arrays)

    assert all(on_every(world, run))


@pytest.mark.full
@pytest.mark.parametrize("start", [False, True])
def test_a_call_that_makes_progress_lasts_longer_than_the_timeout(world: list[Communicator], *, start: bool) -> None:
    def slow(left: Any, right: Any) -> Any:
        time.sleep(0.1)
        return left + right

    def run(comm: Communicator) -> float:
        array, began = np.full(8 * LARGE, comm.rank), time.monotonic()
        options: dict[str, Any] = {"timeout": 1.5, "commutative": False}
        if start:
            comm.start.all_reduce(array, slow, **options).wait()
        else:
            comm.all_reduce(array, slow, **options)
        assert np.all(array == sum(range(comm.size)))
        return time.monotonic() - began

    on_every(world, run)


def test_who_does_not_come_is_named_and_the_next_call_works(world: list[Communicator]) -> None:
    first, *others = world
    with pytest.raises(CollectiveTimeout) as raised:
        first.start.all_reduce(np.ones(3), timeout=0.2).wait()
    assert 1 in [peer.rank for peer in raised.value.waiting_for]
    for comm in others:
        with pytest.raises((CollectiveTimeout, Cancelled)):
            comm.all_reduce(np.ones(3), timeout=EVENT_TIMEOUT)
    assert works(world)
