import inspect
from collections.abc import Iterator
from contextlib import suppress

import pytest

from nexar.communicator.collective_methods import CollectiveMethods
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.communicator.message_methods import MessageMethods
from nexar.communicator.request import Request, wait_all
from nexar.communicator.rpc_methods import RpcCallMethods
from nexar.communicator.starter import Starter
from nexar.config import Config
from nexar.errors import Cancelled, UsageError
from tests.ranks import EVENT_TIMEOUT, on_every


@pytest.fixture
def pair() -> Iterator[list[Communicator]]:
    with local_communicators(2, Config()) as made:
        yield made


def verbs(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_every_verb_of_a_communicator_can_be_started() -> None:
    started = verbs(Starter) - {"finishing"}
    assert verbs(MessageMethods) | verbs(CollectiveMethods) | verbs(RpcCallMethods) == started
    assert started <= verbs(Communicator)


def test_what_is_to_be_done_with_a_result_is_done_before_the_request_is(pair: list[Communicator]) -> None:
    found: list[object] = []

    def finish(result: object) -> str:
        found.append(result)
        return "finished"

    requests = [comm.start.finishing(finish).all_reduce(2) for comm in pair]
    assert [each.wait(EVENT_TIMEOUT) for each in requests] == ["finished", "finished"]
    assert found == [4, 4]
    assert wait_all([comm.start.all_reduce(2) for comm in pair], EVENT_TIMEOUT) == [4, 4], (
        "it was for those calls alone"
    )


def test_a_request_fails_with_what_its_finish_raises(pair: list[Communicator]) -> None:
    def finish(result: object) -> None:
        raise UsageError("no room for it")

    request = pair[0].start.finishing(finish).all_reduce(2)
    other = pair[1].start.all_reduce(2)
    with pytest.raises(UsageError, match="no room"):
        request.wait(EVENT_TIMEOUT)
    with suppress(Cancelled):  # where it had not ended by then
        other.wait(EVENT_TIMEOUT)


def test_a_verb_that_is_started_takes_its_number_now_and_returns_at_once(pair: list[Communicator]) -> None:
    requests = [pair[0].start.all_reduce(number) for number in range(3)]
    assert all(isinstance(each, Request) for each in requests)
    assert pair[0]._context.call_log._next == 3
    assert on_every([pair[1]], lambda comm: [comm.all_reduce(number) for number in range(3)]) == [[0, 2, 4]]
    assert [each.wait(EVENT_TIMEOUT) for each in requests] == [0, 2, 4]


def test_messages_are_started_too(pair: list[Communicator]) -> None:
    received = pair[1].start.recv(source=0, tag=3)
    sent = pair[0].start.send([1, 2], 1, tag=3)
    assert sent.wait(EVENT_TIMEOUT) is None
    assert received.wait(EVENT_TIMEOUT).tolist() == [1, 2]


def test_what_is_refused_is_refused_at_the_call(pair: list[Communicator]) -> None:
    with pytest.raises(UsageError, match="above 0"):
        pair[0].start.barrier(timeout=0)
    with pytest.raises(UsageError, match="ranks 0 to 1"):
        pair[0].start.broadcast(1, root=7)
    pair[0].close()
    with pytest.raises(UsageError, match="closed"):
        pair[0].start.barrier()
