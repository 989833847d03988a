"""Remote calls over every transport: values, errors, threads, nesting, deadlines, and ends."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nexar.communicator.communicator import Communicator
from nexar.errors import (
    LinkClosed,
    PeerLost,
    RemoteError,
    RpcCancelled,
    RpcOverloaded,
    RpcTimeout,
    UnknownFunction,
    UsageError,
)
from tests.conformance.worlds import SCHEMES, ranks_over
from tests.ranks import EVENT_TIMEOUT, on_every

SOON = 5.0
"""Seconds within which an error comes, on a busy machine: far below every timeout that could bring it instead."""


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(scheme: str) -> Iterator[list[Communicator]]:
    with ranks_over(scheme, 2, rpc_concurrency=4) as made:
        yield made


def add(x: Any, y: Any = 1) -> Any:
    return x + y


class Held:
    """A function that returns when it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()

    def __call__(self) -> str:
        self.begun.release()
        self.go.wait(EVENT_TIMEOUT)
        return "done"

    def wait(self, times: int = 1) -> None:
        for _ in range(times):
            assert self.begun.acquire(timeout=EVENT_TIMEOUT)


# ---------------------------------------------------------------- values


def test_a_function_is_called_by_name_by_number_and_with_any_argument(pair: list[Communicator]) -> None:
    left, right = pair
    right.serve(add)
    right.serve("odd name!")(add)
    right.serve(name="numbered", id=65535)(add)
    assert left.on(1).add(2) == 3
    assert left.on(1).add(2, y=3) == 5
    assert left.on(1).call("odd name!", "a", "b") == "ab"
    assert left.on(1).call(65535, [1], [2]) == [1, 2]
    assert right.on(1).add(4) == 5


@pytest.mark.parametrize("count", [0, 10, 2000, 300_000])
def test_arrays_of_all_sizes_go_there_and_come_back(pair: list[Communicator], count: int) -> None:
    pair[1].serve(add)
    sent = np.arange(count, dtype=np.float32)
    for rank in (0, 1):
        pair[rank].serve(add)
        came = pair[0].on(rank).add(sent, sent[::-1].copy())
        assert came.dtype == np.float32
        assert np.array_equal(came, sent + sent[::-1])
        came[:] = 0  # it is the caller's
    assert count == 0 or sent.any()


def test_an_async_function_is_awaited_and_several_run_beside_one_another(pair: list[Communicator]) -> None:
    meet = asyncio.Barrier(3)

    @pair[1].serve
    async def together(x: int) -> int:
        await meet.wait()
        return x

    started = [pair[0].start.on(1).together(number) for number in range(3)]
    assert [each.wait(EVENT_TIMEOUT) for each in started] == [0, 1, 2]


def test_what_only_turns_out_to_be_async_is_awaited_too(pair: list[Communicator]) -> None:
    async def later(x: int) -> int:
        await asyncio.sleep(0)
        return x

    pair[1].serve("f")(lambda x: later(x + 1))
    assert pair[0].on(1).f(7) == 8


def test_a_call_is_awaited_in_a_loop(pair: list[Communicator]) -> None:
    pair[1].serve(add)

    async def main() -> list[int]:
        return await asyncio.gather(*(pair[0].start.on(1).add(number) for number in range(4)))

    assert asyncio.run(main()) == [1, 2, 3, 4]


def test_pickled_values_must_be_asked_for_on_both_sides(pair: list[Communicator]) -> None:
    left, right = pair
    right.serve(add)
    right.serve(add, name="trusting", pickle=True)
    with pytest.raises(UsageError, match="pickle=True"):
        left.on(1).add(range(3))
    with pytest.raises(RemoteError, match="serve it with pickle=True"):
        left.on(1, pickle=True).add(range(3))
    assert left.on(1, pickle=True).trusting(complex(1, 2)) == 2 + 2j
    right.serve(name="slice", pickle=True)(lambda start: range(start, 5))
    assert left.on(1, pickle=True).slice(2) == range(2, 5)
    with pytest.raises(RemoteError, match="cannot be sent"):
        left.on(1).slice(2)


def test_registering_again_replaces(pair: list[Communicator]) -> None:
    pair[1].serve(add)
    pair[1].serve("add")(lambda x: -x)
    assert pair[0].on(1).add(2) == -2


# ---------------------------------------------------------------- who calls whom


def test_handlers_call_others_and_back_to_the_caller(scheme: str) -> None:
    with ranks_over(scheme, 3) as ranks:
        for comm in ranks:

            @comm.serve
            def down(depth: int, comm: Communicator = comm) -> list[int]:
                if depth == 0:
                    return [comm.rank]
                return [comm.rank, *comm.on((comm.rank + 1) % comm.size).down(depth - 1)]

            @comm.serve(name="down_async")
            async def _down(depth: int, comm: Communicator = comm) -> list[int]:
                if depth == 0:
                    return [comm.rank]
                return [comm.rank, *await comm.start.on((comm.rank + 1) % comm.size).down_async(depth - 1)]

        for name in ("down", "down_async"):
            assert ranks[0].on(1).call(name, 7) == [1, 2, 0, 1, 2, 0, 1, 2]


def test_all_ranks_and_several_threads_call_at_once(scheme: str) -> None:
    with ranks_over(scheme, 3, rpc_concurrency=64) as ranks:
        for comm in ranks:
            comm.serve("where")(lambda x, rank=comm.rank: (rank, x))

        def ask(caller: tuple[Communicator, int]) -> bool:
            comm, thread = caller
            return all(comm.on(n % 3).where(thread * n) == (n % 3, thread * n) for n in range(30))

        assert all(on_every([(comm, thread) for comm in ranks for thread in range(4)], ask))


def test_a_part_of_the_communicator_serves_its_own_functions(pair: list[Communicator]) -> None:
    parts = on_every(pair, lambda comm: comm.split(0, key=-comm.rank))
    assert parts[0] is not None
    assert parts[1] is not None
    parts[1].serve("who")(lambda: "of the part")
    pair[1].serve("who")(lambda: "of the whole")
    assert pair[0].on(1).who() == "of the whole"
    assert parts[0].on(0).who() == "of the part"  # ranked the other way round
    parts[1].close()
    begin = time.monotonic()
    with pytest.raises((RpcCancelled, PeerLost)):
        parts[0].on(0).who()
    assert time.monotonic() - begin < SOON
    assert pair[0].on(1).who() == "of the whole"
    parts[0].close()


def test_calls_do_not_wait_for_messages_that_nobody_takes(pair: list[Communicator]) -> None:
    left, right = pair
    right.serve(add)
    unread = [left.start.send(np.zeros(2000), 1, tag=1) for _ in range(200)]
    assert left.on(1, timeout=SOON).add(1) == 2
    into = np.empty(2000)
    for each in unread:
        right.recv(into, source=0, tag=1)
        each.wait(EVENT_TIMEOUT)


# ---------------------------------------------------------------- errors


def test_an_unknown_function_is_named_with_what_there_is(pair: list[Communicator]) -> None:
    with pytest.raises(UnknownFunction, match="rank 1 serves nothing"):
        pair[0].on(1).evaluate()
    pair[1].serve(add, name="evaluate")
    with pytest.raises(UnknownFunction, match="did you mean evaluate") as raised:
        pair[0].on(1).evalute()
    assert (raised.value.rank, raised.value.function, raised.value.registered) == (1, "evalute", ("evaluate",))
    with pytest.raises(UnknownFunction, match="call 7 on rank 1"):
        pair[0].on(1).call(7, np.zeros(100_000))


def test_what_a_function_raises_comes_with_its_traceback(pair: list[Communicator]) -> None:
    @pair[1].serve
    def broken() -> None:
        raise KeyError("the key")

    @pair[1].serve
    async def broken_too() -> None:
        raise SystemExit(3)

    with pytest.raises(RemoteError, match="KeyError: 'the key'") as raised:
        pair[0].on(1).broken()
    assert "in broken" in raised.value.traceback
    assert "nexar/rpc" not in raised.value.traceback
    with pytest.raises(RemoteError, match="SystemExit: 3"):
        pair[0].on(1).broken_too()
    with pytest.raises(RemoteError, match="unexpected keyword argument"):
        pair[0].on(1).broken(step=3)


def test_a_call_that_takes_too_long_times_out_and_its_function_is_notified(pair: list[Communicator]) -> None:
    cancelled = threading.Event()
    held = Held()
    pair[1].serve("held")(held)

    @pair[1].serve
    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(RpcTimeout, match="50 ms"):
        pair[0].on(1, timeout=0.05).forever()
    assert cancelled.wait(EVENT_TIMEOUT)
    with pytest.raises(RpcTimeout):
        pair[0].on(1, timeout=0.05).held()
    request = pair[0].start.on(1, timeout=0.05).held()
    with pytest.raises(RpcTimeout):
        request.wait()
    held.go.set()


def test_a_cancelled_call_raises_and_its_function_is_notified(pair: list[Communicator]) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    @pair[1].serve
    async def forever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    request = pair[0].start.on(1).forever()
    assert begun.wait(EVENT_TIMEOUT)
    request.cancel()
    assert cancelled.wait(EVENT_TIMEOUT)
    with pytest.raises(RpcCancelled):
        request.wait(EVENT_TIMEOUT)


def test_too_many_calls_are_turned_away_at_once_and_places_become_free_again(pair: list[Communicator]) -> None:
    held = Held()
    pair[1].serve("held")(held)
    pair[1].serve(add)
    running = [pair[0].start.on(1).held() for _ in range(4)]
    held.wait(4)
    for argument in (1, np.zeros(200_000)):
        begin = time.monotonic()
        with pytest.raises(RpcOverloaded, match="4 calls"):
            pair[0].on(1).add(argument)
        assert time.monotonic() - begin < SOON
    held.go.set()
    assert [each.wait(EVENT_TIMEOUT) for each in running] == ["done"] * 4
    assert all(pair[0].on(1).add(number) == number + 1 for number in range(50))


def test_arguments_that_are_too_large_are_refused_here_and_results_there(pair: list[Communicator]) -> None:
    huge = np.zeros(257 << 20, np.uint8)
    pair[1].serve(add, name="f")
    with pytest.raises(UsageError, match=r"256 MiB.*send\(\)"):
        pair[0].on(1).f(huge)
    pair[1].serve("huge")(lambda: huge)
    with pytest.raises(RemoteError, match="256 MiB"):
        pair[0].on(1).huge()


def test_wrong_calls_are_refused_before_anything_is_sent(pair: list[Communicator]) -> None:
    with pytest.raises(UsageError, match="ranks 0 to 1"):
        pair[0].on(2)
    with pytest.raises(UsageError, match="above 0"):
        pair[0].on(1, timeout=0)
    with pytest.raises(UsageError, match="0 to 65535"):
        pair[0].on(1).call(-1)
    with pytest.raises(UsageError, match="cannot be sent"):
        pair[0].on(1).f(object())


# ---------------------------------------------------------------- ends


def test_closing_raises_here_for_those_who_wait(pair: list[Communicator]) -> None:
    held = Held()
    pair[1].serve("held")(held)
    seen: list[BaseException] = []

    def ask() -> None:
        try:
            pair[0].on(1).held()
        except (LinkClosed, UsageError) as error:
            seen.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    held.wait()
    begin = time.monotonic()
    closing = threading.Thread(target=pair[0].close)
    closing.start()
    asking.join(EVENT_TIMEOUT)
    assert time.monotonic() - begin < SOON
    held.go.set()
    pair[1].close()
    closing.join(EVENT_TIMEOUT)
    assert len(seen) == 1
    with pytest.raises(UsageError, match="closed"):
        pair[0].on(1)


def test_closing_there_raises_for_those_who_wait_here(pair: list[Communicator]) -> None:
    held = Held()
    pair[1].serve("held")(held)
    request = pair[0].start.on(1).held()
    held.wait()
    closing = threading.Thread(target=pair[1].close)
    closing.start()
    begin = time.monotonic()
    with pytest.raises((PeerLost, RpcCancelled)):
        request.wait(EVENT_TIMEOUT)
    assert time.monotonic() - begin < SOON
    held.go.set()
    pair[0].close()
    closing.join(EVENT_TIMEOUT)
