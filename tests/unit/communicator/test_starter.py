import inspect
from collections.abc import Iterator

import pytest

from nexar.communicator.calling import Calling
from nexar.communicator.collecting import Collecting
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.communicator.messaging import Messaging
from nexar.communicator.request import Request
from nexar.communicator.starter import Starter
from nexar.config import Config
from nexar.errors import UsageError
from tests.ranks import PATIENCE, on_every


@pytest.fixture
def pair() -> Iterator[list[Communicator]]:
    with local_communicators(2, Config()) as made:
        yield made


def verbs(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_every_verb_of_a_communicator_can_be_started() -> None:
    assert verbs(Messaging) | verbs(Collecting) | verbs(Calling) == verbs(Starter)
    assert verbs(Starter) <= verbs(Communicator)


def test_a_verb_that_is_started_takes_its_number_now_and_returns_at_once(pair: list[Communicator]) -> None:
    requests = [pair[0].start.all_reduce(number) for number in range(3)]
    assert all(isinstance(each, Request) for each in requests)
    assert pair[0]._assembly.journal._next == 3
    assert on_every([pair[1]], lambda comm: [comm.all_reduce(number) for number in range(3)]) == [[0, 2, 4]]
    assert [each.wait(PATIENCE) for each in requests] == [0, 2, 4]


def test_messages_are_started_too(pair: list[Communicator]) -> None:
    received = pair[1].start.recv(source=0, tag=3)
    sent = pair[0].start.send([1, 2], 1, tag=3)
    assert sent.wait(PATIENCE) is None
    assert received.wait(PATIENCE).tolist() == [1, 2]


def test_what_is_refused_is_refused_at_the_call(pair: list[Communicator]) -> None:
    with pytest.raises(UsageError, match="above 0"):
        pair[0].start.barrier(timeout=0)
    with pytest.raises(UsageError, match="ranks 0 to 1"):
        pair[0].start.broadcast(1, root=7)
    pair[0].close()
    with pytest.raises(UsageError, match="closed"):
        pair[0].start.barrier()
