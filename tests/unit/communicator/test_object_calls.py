from collections.abc import Iterator

import numpy as np
import pytest

from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.communicator.object_calls import _reader, _row_memory
from nexar.config import Config
from nexar.errors import PeerMisbehaved, UsageError
from tests.ranks import on_every

VALUE = {"a": (1, [2.5, None]), "many": list(range(1000)), "bytes": b"x" * 100_000}


@pytest.fixture
def world() -> Iterator[list[Communicator]]:
    with local_communicators(3, Config()) as made:
        yield made


def test_values_of_any_size_reach_whom_they_should(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        assert comm.broadcast_object(VALUE if comm.rank == 2 else "ignored", root=2) == VALUE
        assert comm.broadcast_object(None) is None
        assert comm.all_gather_object("x" * comm.rank) == ["", "x", "xx"]
        assert comm.gather_object((comm.rank, VALUE), 1) == (
            [(each, VALUE) for each in range(3)] if comm.rank == 1 else None
        )
        assert comm.scatter_object([VALUE, 1, None] if comm.rank == 0 else None) == [VALUE, 1, None][comm.rank]

    on_every(world, run)


def test_only_who_asks_for_pickle_gets_it(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        assert comm.all_gather_object(range(comm.rank), pickle=True) == [range(0), range(1), range(2)]
        assert comm.broadcast_object(range(3), pickle=True) == range(3)

    on_every(world, run)
    with pytest.raises(UsageError, match="pickle=True"):
        world[0].broadcast_object(range(3))
    assert on_every(world, lambda comm: comm.all_reduce(1)) == [3] * 3


def test_a_root_needs_a_value_for_each_rank(world: list[Communicator]) -> None:
    for values in (None, [1, 2]):
        with pytest.raises(UsageError, match="each of 3 ranks"):
            world[0].scatter_object(values)


@pytest.mark.parametrize("pickle", [False, True])
def test_bytes_that_are_no_value_are_the_fault_of_who_sent_them(pickle: bool) -> None:
    with pytest.raises(PeerMisbehaved, match="an invalid object") as raised:
        _reader(pickle=pickle)(2, np.frombuffer(b"\xff" * 9, np.uint8))
    assert raised.value.rank == 2


@pytest.mark.parametrize("size", [-1, 1 << 60])
def test_a_length_that_cannot_be_is_the_fault_of_who_announced_it(size: int) -> None:
    with pytest.raises(PeerMisbehaved, match=f"an object of {size} bytes") as raised:
        _row_memory(2, size)
    assert raised.value.rank == 2
