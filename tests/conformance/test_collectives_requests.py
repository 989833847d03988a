"""Collectives in flight: many at a time, waited for in any order, awaited, from several threads."""

import asyncio
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from nexar.communicator.communicator import Communicator
from nexar.communicator.request import Request, wait_all
from nexar.errors import Cancelled, CollectiveTimeout, NexarError, OperationTimeout, UsageError
from tests.conformance.collectives.flight import LARGE, awaited, raises_naming, works
from tests.conformance.worlds import ranks_over
from tests.ranks import EVENT_TIMEOUT, on_every


@pytest.fixture(params=[("memory", 3), ("shm", 3), ("tls", 3)], ids=lambda param: param[0])
def world(request: pytest.FixtureRequest) -> Iterator[list[Communicator]]:
    scheme, size = request.param
    with ranks_over(scheme, size) as made:
        yield made


# ---------------------------------------------------------------- many in flight


def test_requests_may_be_waited_for_in_any_order(world: list[Communicator]) -> None:
    counts = [1, LARGE, 3, 0, 1000, LARGE // 3]

    def run(comm: Communicator) -> bool:
        arrays = [np.full(count, comm.rank + index) for index, count in enumerate(counts)]
        requests = [comm.start.all_reduce(array) for array in arrays]
        requests.append(comm.start.barrier())
        requests.append(comm.start.all_gather(np.array([comm.rank])))
        order = np.random.default_rng(comm.rank).permutation(len(requests))
        found: dict[int, Any] = {int(index): requests[index].wait(EVENT_TIMEOUT) for index in order}
        total = sum(range(comm.size))
        right = [np.all(found[index] == total + comm.size * index) for index in range(len(counts))]
        same = all(found[index] is arrays[index] for index in range(len(counts)))
        return all(right) and same and found[len(counts) + 1].ravel().tolist() == list(range(comm.size))

    assert all(on_every(world, run))


def test_every_verb_can_be_started(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> list[str]:
        mine, size = np.full(2 * comm.size, comm.rank), comm.size
        rows = [np.full(each, comm.rank) for each in range(size)]
        wanted: list[tuple[Request, Any]] = [
            (comm.start.broadcast(mine.copy(), 1), np.full(2 * size, 1)),
            (comm.start.reduce(mine.copy(), root=0), np.full(2 * size, sum(range(size))) if comm.rank == 0 else None),
            (comm.start.reduce_scatter(mine), np.full(2, sum(range(size)))),
            (comm.start.all_to_all(mine), np.repeat(range(size), 2)),
            (comm.start.gather(mine, 1), np.repeat([range(size)], 2 * size, 0).T if comm.rank == 1 else None),
            (comm.start.scatter(np.arange(size) if comm.rank == 0 else None), np.array([comm.rank])),
            (comm.start.scan(mine), np.full(2 * size, sum(range(comm.rank + 1)))),
            (comm.start.exclusive_scan(mine), np.full(2 * size, sum(range(comm.rank)))),
            (comm.start.all_to_all_v(rows), [np.full(comm.rank, each) for each in range(size)]),
            (comm.start.broadcast_object({"a": comm.rank}), {"a": 0}),
            (comm.start.all_gather_object(comm.rank), list(range(size))),
            (comm.start.all_reduce(2), 2 * size),
        ]
        bucketed = comm.start.all_reduce_bucketed([np.ones(3), np.ones(2, np.int8)])
        results = wait_all([request for request, _ in wanted], EVENT_TIMEOUT)
        assert [each.tolist() for each in bucketed.wait()] == [[size] * 3, [size] * 2]
        return [str(got) for got, (_, right) in zip(results, wanted, strict=True) if not same(got, right)]

    assert on_every(world, run) == [[]] * len(world)


def same(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    return np.array_equal(got, wanted) if isinstance(wanted, np.ndarray) else bool(got == wanted)


def test_a_request_reports_whether_it_is_done_and_gives_its_result_again_and_again(world: list[Communicator]) -> None:
    first, *others = world
    request = first.start.all_reduce(1.0)
    assert not request.done()
    assert "in flight" in repr(request)
    with pytest.raises(OperationTimeout):
        request.wait(0.02)
    on_every(others, lambda comm: comm.all_reduce(1.0))
    assert request.wait(EVENT_TIMEOUT) == request.wait() == float(len(world))
    assert request.done()
    assert "done" in repr(request)
    for nonsense in (0, -1):
        with pytest.raises(UsageError, match="above 0"):
            request.wait(nonsense)


def test_requests_progress_while_nobody_waits(world: list[Communicator]) -> None:
    """The progress thread runs them: no rank calls anything after it has started its own."""
    arrays = [np.full(LARGE, comm.rank) for comm in world]
    requests = [comm.start.all_reduce(array) for comm, array in zip(world, arrays, strict=True)]
    deadline = time.monotonic() + EVENT_TIMEOUT
    while not all(request.done() for request in requests):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert all((array == sum(range(len(world)))).all() for array in arrays)


def test_several_communicators_have_requests_in_flight_at_once(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> bool:
        other = comm.split(0, -comm.rank)
        assert other is not None
        requests = []
        for number in range(20):
            requests.append(comm.start.all_reduce(number))
            requests.append(other.start.all_gather(np.array([comm.rank, number])))
        results = wait_all(reversed(requests), EVENT_TIMEOUT)[::-1]
        expected = [[comm.size - 1 - rank for rank in range(comm.size)]] * 20
        right = results[::2] == [number * comm.size for number in range(20)]
        other.close()
        return right and [each[:, 0].tolist() for each in results[1::2]] == expected

    assert on_every(world, run) == [True] * len(world)


def test_several_threads_wait_for_the_same_requests(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> list[Any]:
        requests = [comm.start.all_reduce(np.full(1000, number)) for number in range(8)]
        found = on_every(
            [0, 1, 2], lambda turn: [requests[(turn * 3 + n) % 8].wait(EVENT_TIMEOUT)[0] for n in range(8)]
        )
        return [sorted(int(each) for each in got) for got in found]

    expected = [number * len(world) for number in range(8)]
    assert on_every(world, run) == [[expected] * 3] * len(world)


def test_threads_of_one_rank_call_collectives_of_their_own_communicators(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        teams = [comm.split(0), comm.split(0), comm.split(0)]

        def talk(number: int) -> None:
            team = teams[number]
            assert team is not None
            for turn in range(20):
                array = np.full(1 + 997 * (turn % 3), turn + number)
                assert (team.all_reduce(array) == (turn + number) * comm.size).all()

        on_every(range(3), talk)
        for team in teams:
            assert team is not None
            team.close()

    on_every(world, run)


# ---------------------------------------------------------------- wait_all


def test_wait_all_waits_for_all_then_raises_the_first_error_with_the_others(world: list[Communicator]) -> None:
    given_up = threading.Event()

    def run(comm: Communicator) -> None:
        if comm.rank == 1:
            assert given_up.wait(EVENT_TIMEOUT)
        requests = [comm.start.all_reduce(np.ones(LARGE)) for _ in range(4)]
        if comm.rank == 0:
            requests[1].cancel()
            requests[2].cancel()
            given_up.set()
        with pytest.raises(Cancelled) as raised:
            wait_all(requests, EVENT_TIMEOUT)
        assert all(request.done() for request in requests)
        assert [type(each) for each in raised.value.others] == [Cancelled]  # type: ignore[attr-defined]
        assert "also: Cancelled" in "".join(raised.value.__notes__)
        assert requests[3].wait()[0] == comm.size

    on_every(world, run)


def test_wait_all_has_one_timeout_for_all_and_takes_nothing_but_requests(world: list[Communicator]) -> None:
    first, *others = world
    requests = [first.start.all_reduce(1), first.start.all_reduce(2)]
    begin = time.monotonic()
    with pytest.raises(OperationTimeout) as raised:
        wait_all(requests, 0.1)
    assert time.monotonic() - begin < EVENT_TIMEOUT / 2
    assert len(raised.value.others) == 1  # type: ignore[attr-defined]
    on_every(others, lambda comm: [comm.all_reduce(1), comm.all_reduce(2)])
    assert wait_all(requests, EVENT_TIMEOUT) == [len(world), 2 * len(world)]
    assert wait_all([]) == []
    with pytest.raises(UsageError, match="takes requests"):
        wait_all([3])  # type: ignore[list-item]


# ---------------------------------------------------------------- asyncio


def in_loops(world: list[Communicator], task: Any) -> list[Any]:
    """Each rank in a thread with a loop of its own."""
    return on_every(world, lambda comm: asyncio.run(task(comm)))


def test_requests_are_awaited_in_a_running_loop(world: list[Communicator]) -> None:
    async def talk(comm: Communicator) -> bool:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        if comm.rank == 0:
            await asyncio.sleep(0.05)
        one = await comm.start.all_reduce(np.ones(LARGE))
        many = await asyncio.gather(*(awaited(comm.start.all_reduce(number)) for number in range(10)))
        ticking.cancel()
        return bool((one == comm.size).all()) and many == [n * comm.size for n in range(10)] and ticks > 0

    assert in_loops(world, talk) == [True] * len(world)


def test_cancelling_the_task_cancels_the_request(world: list[Communicator]) -> None:
    given_up = threading.Event()

    async def give_up(comm: Communicator) -> None:
        request = comm.start.all_reduce(np.ones(LARGE))
        task = asyncio.create_task(awaited(request))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert request.done()
        given_up.set()

    async def receive(comm: Communicator) -> None:
        if comm.rank == 1:
            assert await asyncio.to_thread(given_up.wait, EVENT_TIMEOUT)
        with raises_naming(0):
            await comm.start.all_reduce(np.ones(LARGE))

    async def talk(comm: Communicator) -> Any:
        await (give_up(comm) if comm.rank == 0 else receive(comm))
        return await comm.start.all_reduce(1)

    assert in_loops(world, talk) == [len(world)] * len(world)


def test_an_awaited_request_that_nobody_answers_ends_at_its_own_timeout(world: list[Communicator]) -> None:
    async def talk() -> None:
        with pytest.raises(CollectiveTimeout):
            await world[0].start.all_reduce(1, timeout=2.0)

    began = time.monotonic()
    asyncio.run(talk())
    assert 2.0 <= time.monotonic() - began < 3.5  # once, not twice
    for comm in world[1:]:
        with pytest.raises(NexarError):
            comm.all_reduce(1)
    assert works(world)


def test_a_started_message_is_awaited_too(world: list[Communicator]) -> None:
    async def talk(comm: Communicator) -> Any:
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sent = comm.start.send(np.full(LARGE, comm.rank), after)
        got = await comm.start.recv(source=before)
        await sent
        return int(got[-1])

    assert in_loops(world, talk) == [(comm.rank - 1) % comm.size for comm in world]


# ---------------------------------------------------------------- the end


def test_closing_ends_what_is_in_flight(world: list[Communicator]) -> None:
    request = world[0].start.all_reduce(np.ones(LARGE))
    team = [comm.start.barrier() for comm in world[:1]]
    ended = threading.Thread(target=partial(_ends, request, team))
    ended.start()
    world[0].close()
    ended.join(EVENT_TIMEOUT)
    assert not ended.is_alive()
    assert request.done()
    with pytest.raises(UsageError, match="closed"):
        world[0].start.barrier()


def _ends(*given: Any) -> None:
    request, others = given
    for each in (request, *others):
        with pytest.raises(NexarError):
            each.wait(EVENT_TIMEOUT)
