from collections.abc import Iterator

import pytest

from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.communicator.maker import Maker
from nexar.config import Config
from nexar.errors import NexarError
from nexar.group import deadline_after
from tests.ranks import PATIENCE, on_every


@pytest.fixture
def pair() -> Iterator[list[Communicator]]:
    with local_communicators(2, Config()) as made:
        yield made


def opened(maker: Maker) -> int:
    return len(maker._open)


def test_what_it_makes_is_independent_and_closed_alone(pair: list[Communicator]) -> None:
    maker = pair[0]._maker
    made = on_every(pair, lambda comm: comm._maker.make(comm.membership, 77, deadline_after(PATIENCE)))
    assert opened(maker) == 2
    assembly, close = made[0]
    assert (assembly.group.communicator, assembly.group.size) == (77, 2)
    assert assembly.journal is not pair[0]._assembly.journal
    close()
    close()
    assert opened(maker) == 1
    made[1][1]()
    assert on_every(pair, lambda comm: comm.all_reduce(1)) == [2, 2]


def test_closing_it_closes_all_that_it_made(pair: list[Communicator]) -> None:
    on_every(pair, lambda comm: [comm.split(0), comm.split(0)])
    maker = pair[0]._maker
    assert opened(maker) == 3
    maker.close()
    maker.close()
    assert opened(maker) == 0
    with pytest.raises(NexarError):
        pair[0].all_reduce(1, timeout=0.2)
