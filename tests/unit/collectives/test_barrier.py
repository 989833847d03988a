import threading
from math import ceil, log2
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.collectives.barrier import barrier, rounds
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import LinkClosed, NexarError, OperationTimeout, PeerLost, UsageError
from nexar.group import Group, deadline_after
from tests.ranks import PATIENCE, on_every

sizes = st.integers(1, 40)


@given(sizes)
def test_everybody_has_heard_from_everybody_after_log2_rounds(size: int) -> None:
    plans = [list(rounds(rank, size)) for rank in range(size)]
    assert {len(plan) for plan in plans} == {ceil(log2(size))}
    heard = [{rank} for rank in range(size)]
    for step in range(len(plans[0])):
        heard = [heard[rank] | heard[plans[rank][step][1]] for rank in range(size)]
    assert all(each == set(range(size)) for each in heard)


@given(sizes)
def test_whom_one_tells_the_other_hears(size: int) -> None:
    for rank in range(size):
        for step, (above, below) in enumerate(rounds(rank, size)):
            assert list(rounds(above, size))[step][1] == rank
            assert list(rounds(below, size))[step][0] == rank
            assert rank not in (above, below)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_nobody_leaves_before_everybody_has_come(size: int) -> None:
    come: set[int] = set()
    others_came = threading.Event()

    def run(comm: Communicator) -> int:
        if comm.rank == size - 1:
            others_came.wait(PATIENCE)
        come.add(comm.rank)
        if len(come) == size - 1:
            others_came.set()
        comm.barrier()
        return len(come)

    if size == 1:
        others_came.set()
    with local_communicators(size, Config()) as world:
        assert on_every(world, run) == [size] * size


def test_who_comes_in_vain_names_whom_it_did_not_hear_from() -> None:
    with local_communicators(4, Config()) as world:
        absent = 2
        failures: dict[int, OperationTimeout] = {}

        def run(comm: Communicator) -> None:
            if comm.rank != absent:
                with pytest.raises(OperationTimeout) as raised:
                    barrier(comm._group, 0, deadline_after(0.2))
                failures[comm.rank] = raised.value

        on_every(world, run)
        named = {rank: [peer.rank for peer in late.waiting_for] for rank, late in failures.items()}
        assert named == {0: [2], 1: [3], 3: [2]}  # 1 waits for 3, which itself waits for 2


def test_a_rank_that_leaves_ends_the_barrier_of_the_others() -> None:
    with local_communicators(3, Config()) as world:
        ends: dict[int, NexarError] = {}

        def run(comm: Communicator) -> None:
            if comm.rank == 1:
                comm.close()
                return
            with pytest.raises(NexarError) as raised:
                comm.barrier(timeout=PATIENCE)
            ends[comm.rank] = raised.value
            comm.close()

        on_every(world, run)
        lost = [error for error in ends.values() if isinstance(error, PeerLost)]
        assert lost
        assert all(isinstance(error, (PeerLost, LinkClosed, UsageError)) for error in ends.values())


class Unreachable:
    """A group of two in which nothing can be sent."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.cancelled = 0

    def post_receive(self, *_: object, **__: object) -> "Unreachable":
        return self

    def post_send(self, *_: object, **__: object) -> None:
        raise PeerLost(rank=1, cause="no way")

    def cancel(self) -> None:
        self.cancelled += 1


def test_a_send_that_cannot_be_made_leaves_no_receive_behind() -> None:
    group = Unreachable()
    with pytest.raises(PeerLost):
        barrier(cast(Group, group), 0, deadline_after(PATIENCE))
    assert group.cancelled == 1
