import asyncio
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nexar.collectives import requests
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.communicator.point_to_point import recv
from nexar.communicator.request import Request, wait_all
from nexar.config import Config
from nexar.errors import Cancelled, OperationTimeout, PeerLost, Revoked, UsageError
from nexar.group import deadline_after
from nexar.links import matching
from tests.ranks import EVENT_TIMEOUT, on_every


@pytest.fixture
def pair() -> Iterator[list[Communicator]]:
    with local_communicators(2, Config()) as made:
        yield made


def test_it_says_what_it_is_and_how_it_stands(pair: list[Communicator]) -> None:
    requests = [comm.start.barrier() for comm in pair[:1]]
    assert not requests[0].done()
    assert repr(requests[0]) == "<nexar.Request barrier #0, in flight>"
    requests.append(pair[1].start.barrier())
    wait_all(requests, EVENT_TIMEOUT)
    assert repr(requests[0]) == "<nexar.Request barrier #0, done>"


def test_it_reports_once_that_it_has_ended_also_if_that_was_before(pair: list[Communicator]) -> None:
    reported: list[str] = []
    request = pair[0].start.recv(source=1)
    request.when_done(lambda: reported.append("later"))
    assert reported == []
    pair[1].send(3, 0)
    request.wait(EVENT_TIMEOUT)
    request.when_done(lambda: reported.append("at once"))
    assert reported == ["later", "at once"]


def test_a_wait_that_is_over_leaves_it_going_on(pair: list[Communicator]) -> None:
    request = pair[0].start.recv(source=1)
    with pytest.raises(OperationTimeout):
        request.wait(0.01)
    for nonsense in (0, -1.0):
        with pytest.raises(UsageError, match="above 0"):
            request.wait(nonsense)
    pair[1].send(3, 0)
    assert int(request.wait(EVENT_TIMEOUT)) == int(request.wait()) == 3


def test_a_message_that_does_not_come_ends_it_at_its_own_timeout(pair: list[Communicator]) -> None:
    request = pair[0].start.recv(source=1, timeout=0.05)
    with pytest.raises(OperationTimeout):
        request.wait()
    assert request.done()
    assert "failed" in repr(request)
    pair[1].send(1, 0)
    assert int(pair[0].recv(source=1)) == 1, "what was given up must not take it"


def test_cancelling_what_is_done_changes_nothing(pair: list[Communicator]) -> None:
    pair[1].send(1, 0)
    request = pair[0].start.recv(source=1)
    assert int(request.wait(EVENT_TIMEOUT)) == 1
    request.cancel()
    assert int(request.wait()) == 1


def test_a_receive_that_is_dropped_takes_nothing(pair: list[Communicator]) -> None:
    request: Any = pair[0].start.recv(source=1)
    running = request._running
    del request
    gc.collect()
    with pytest.raises(Cancelled):
        pair[0]._group.wait((running,), 1e12)
    pair[1].send(4, 0)
    assert int(pair[0].recv(source=1)) == 4


def test_wait_all_keeps_the_order_and_attaches_the_other_errors(pair: list[Communicator]) -> None:
    def talk(comm: Communicator) -> list[Any]:
        return wait_all([comm.start.all_reduce(number) for number in range(5)], EVENT_TIMEOUT)

    assert on_every(pair, talk) == [[0, 2, 4, 6, 8]] * 2
    requests = [pair[0].start.recv(source=1, tag=tag) for tag in range(3)]
    requests[0].cancel()
    requests[2].cancel()
    pair[1].send(1, 0, tag=1)
    with pytest.raises(Cancelled) as raised:
        wait_all(requests)
    assert requests[1].done()
    assert [type(each) for each in raised.value.others] == [Cancelled]  # type: ignore[attr-defined]


def test_a_function_that_raises_is_one_of_the_errors_and_the_rest_is_waited_for(pair: list[Communicator]) -> None:
    def fail(_: Any, __: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    def talk(comm: Communicator) -> int:
        requests = [comm.start.all_reduce(1, fail), comm.start.all_reduce(1)]
        with pytest.raises((ZeroDivisionError, Cancelled)):
            wait_all(requests, EVENT_TIMEOUT)
        return int(requests[1].wait())

    assert on_every(pair, talk) == [2, 2]


# ---------------------------------------------------------------- a message is received or stays


def _came(comm: Communicator, request: Request) -> None:
    """Wait until its message is in the request, without asking the request, which would deliver it."""
    comm._group.wait((request._running,), deadline_after(EVENT_TIMEOUT))


def test_a_request_that_is_cancelled_after_its_message_came_gives_it_back(pair: list[Communicator]) -> None:
    into = np.zeros(1, int)
    request = pair[0].start.recv(into, source=1)
    pair[1].send(np.array([5]), 0)
    pair[1].send(np.array([6]), 0)
    _came(pair[0], request)
    assert request.cancel()
    into[:] = 9
    with pytest.raises(Cancelled):
        request.wait()
    assert [int(pair[0].recv(source=1)[0]) for _ in range(2)] == [5, 6]


@pytest.mark.parametrize("collect", [False, True])
def test_a_request_that_is_dropped_after_its_message_came_gives_it_back(
    pair: list[Communicator], collect: bool
) -> None:
    request: Any = pair[0].start.recv_object(source=1)
    pair[1].send_object([1, np.ones(100_000)], 0)
    pair[1].send_object(2, 0)
    _came(pair[0], request)
    if collect:
        ring = [request]
        ring.append(ring)
        del ring
    del request
    gc.collect()
    assert pair[0].recv_object(source=1)[0] == 1
    assert pair[0].recv_object(source=1) == 2


def test_a_request_whose_result_somebody_has_gives_nothing_back(pair: list[Communicator]) -> None:
    for look in (lambda request: request.wait(EVENT_TIMEOUT), lambda request: request.done()):
        request: Any = pair[0].start.recv(np.zeros((), int), source=1)
        pair[1].send(1, 0)
        _came(pair[0], request)
        look(request)
        assert not request.cancel()
        del request
        gc.collect()
    assert pair[0].probe(source=1, timeout=0) is None


def test_a_request_that_reports_its_end_can_be_cancelled_until_then(pair: list[Communicator]) -> None:
    reported: list[bool] = []
    request = pair[0].start.recv(source=1)
    request.when_done(lambda: reported.append(True))
    assert request.cancel()
    assert reported == [True]
    with pytest.raises(Cancelled):
        request.wait(EVENT_TIMEOUT)
    pair[1].send(3, 0)
    assert int(pair[0].recv(source=1)) == 3


def test_a_request_that_has_reported_its_end_gives_nothing_back(pair: list[Communicator]) -> None:
    request = pair[0].start.recv(source=1)
    request.when_done(lambda: None)
    pair[1].send(3, 0)
    _came(pair[0], request)
    assert not request.cancel()
    assert int(request.wait(EVENT_TIMEOUT)) == 3


def test_cancelling_a_receive_that_a_later_one_has_overtaken_completes_it(pair: list[Communicator]) -> None:
    first, second = (pair[0].start.recv(source=1) for _ in range(2))
    pair[1].send(1, 0)
    pair[1].send(2, 0)
    _came(pair[0], second)
    assert not first.cancel()
    assert [int(first.wait()), int(second.wait())] == [1, 2]


def test_an_awaited_request_that_is_cancelled_after_its_message_came_gives_it_back(pair: list[Communicator]) -> None:
    async def listen() -> None:
        request = pair[0].start.recv(source=1)
        awaiting = asyncio.ensure_future(_awaited(request))
        await asyncio.sleep(0)
        pair[1].send(7, 0)
        _came(pair[0], request)  # the loop has not run since: the task does not know yet
        awaiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaiting

    asyncio.run(listen())
    assert int(pair[0].recv(source=1)) == 7


async def _awaited(request: Request) -> Any:
    return await request


# ---------------------------------------------------------------- errors of members, resolved as `wait` does it


def _fails(comm: Communicator, error: PeerLost) -> Request:
    request = comm.start.recv(source=1)
    request._running.fail(error)
    return request


def _awaited_error(request: Request) -> BaseException:
    async def attempt() -> BaseException:
        with pytest.raises(PeerLost) as raised:
            await asyncio.wait_for(_awaited(request), EVENT_TIMEOUT)
        return raised.value

    return asyncio.run(attempt())


def test_an_awaited_request_waits_for_the_outcome_no_longer_than_wait_does() -> None:
    """The member answers its probe, so no change follows."""
    with local_communicators(2, Config(recovery_timeout=0.05)) as pair:
        error = PeerLost(rank=1, cause="connection reset")
        assert str(_awaited_error(_fails(pair[0], error))) == str(error)
        assert not pair[0]._generation.outcome.done


def test_an_awaited_request_advises_to_shrink_under_the_manual_policy_as_wait_does() -> None:
    with local_communicators(2, Config(recovery_policy="manual")) as pair:
        error = PeerLost(rank=1, cause="connection reset")
        with pytest.raises(PeerLost, match=r"comm\.shrink") as waited:
            _fails(pair[0], error).wait()
        assert str(_awaited_error(_fails(pair[0], error))) == str(waited.value)


def test_an_awaited_request_raises_the_outcome_of_its_generation(pair: list[Communicator]) -> None:
    pair[1].revoke("enough")

    async def attempt() -> None:
        with pytest.raises(Revoked, match="enough"):
            await asyncio.wait_for(_awaited(_fails(pair[0], PeerLost(rank=1, cause="connection reset"))), EVENT_TIMEOUT)

    asyncio.run(attempt())


def test_results_that_wait_all_did_not_return_go_back(pair: list[Communicator]) -> None:
    requests = [pair[0].start.recv(source=1, tag=tag) for tag in (1, 2)]
    pair[1].send(4, 0, 1)
    with pytest.raises(OperationTimeout):
        wait_all(requests, 0.05)
    del requests
    gc.collect()
    assert int(pair[0].recv(source=1, tag=1)) == 4


def test_an_interrupt_after_the_message_came_gives_it_back(pair: list[Communicator]) -> None:
    run = recv(pair[0]._group, None, 1, None, return_source=False)
    waits = next(run)
    pair[1].send(3, 0)
    pair[0]._group.wait(waits, deadline_after(EVENT_TIMEOUT))
    with pytest.raises(KeyboardInterrupt):
        run.throw(KeyboardInterrupt())
    assert int(pair[0].recv(source=1)) == 3


# ---------------------------------------------------------------- a message that cannot be kept for want of memory


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and messages in memory of the caller's cannot be moved elsewhere any more."""

    def refuse(_: memoryview) -> memoryview:
        raise MemoryError("the system refused it")

    return lambda: monkeypatch.setattr(matching, "_copied", refuse)


@pytest.mark.parametrize("inside", [False, True], ids=["by the user", "while nexar runs"])
def test_dropping_a_request_without_memory_for_its_message_costs_nothing_but_that_message(
    pair: list[Communicator],
    no_memory: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    inside: bool,
) -> None:
    request: Any = pair[0].start.recv(np.zeros(1, int), source=1)
    pair[1].send(np.array([5]), 0)
    _came(pair[0], request)
    no_memory()
    monkeypatch.setattr(requests, "is_inside", lambda _: inside)  # as if the collector had run in one of our frames
    del request
    gc.collect()
    pair[1].send(6, 0)
    assert int(pair[0].recv(source=1, timeout=EVENT_TIMEOUT)) == 6
    assert "its message is lost" in caplog.text


def test_a_started_call_that_cannot_give_its_message_back_raises_memory_error_alone(
    no_memory: Callable[[], None],
) -> None:
    with local_communicators(2, Config(early_bytes=1)) as pair:
        request = pair[0].start.sendrecv(np.zeros(1_000_000), 1, np.zeros(1, int), 1, sendtag=1, recvtag=2)
        pair[1].send(np.array([5]), 0, 2)
        receive, send = request._running._awaited
        pair[0]._group.wait((receive,), deadline_after(EVENT_TIMEOUT))
        no_memory()
        with send.lock:
            send.finish(Cancelled(operation="the send"))
        with pytest.raises(MemoryError):
            request.wait(EVENT_TIMEOUT)
        pair[1].send(6, 0)
        assert int(pair[0].recv(source=1, timeout=EVENT_TIMEOUT)) == 6
