import threading

import numpy as np
import pytest

from nexar.collectives.data_movement import DIRECT_SCATTER_BELOW, _read_scatter_header, _scatter_header
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import (
    CollectiveTimeout,
    LinkClosed,
    MembershipChanged,
    NexarError,
    PeerLost,
    PeerMisbehaved,
    UsageError,
)
from tests.ranks import EVENT_TIMEOUT, on_every


@pytest.mark.parametrize("algorithm", ["dissemination", "two_phase"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_nobody_leaves_before_everybody_has_come(size: int, algorithm: str) -> None:
    come: set[int] = set()
    others_came = threading.Event()

    def run(comm: Communicator) -> int:
        if comm.rank == size - 1:
            others_came.wait(EVENT_TIMEOUT)
        come.add(comm.rank)
        if len(come) == size - 1:
            others_came.set()
        comm.barrier(algorithm=algorithm)
        return len(come)

    if size == 1:
        others_came.set()
    with local_communicators(size, Config()) as world:
        assert on_every(world, run) == [size] * size


@pytest.mark.parametrize("algorithm", ["dissemination", "two_phase"])
def test_everybody_who_comes_in_vain_is_notified_who_has_not_come(algorithm: str) -> None:
    with local_communicators(4, Config()) as world:
        absent = 2
        named: dict[int, list[int | None]] = {}

        def run(comm: Communicator) -> None:
            if comm.rank != absent:
                with pytest.raises(CollectiveTimeout) as raised:
                    comm.barrier(algorithm=algorithm, timeout=0.2)
                named[comm.rank] = [peer.rank for peer in raised.value.waiting_for]

        on_every(world, run)
        assert named == {0: [absent], 1: [absent], 3: [absent]}


def test_a_rank_that_leaves_ends_the_barrier_of_the_others_who_go_on() -> None:
    with local_communicators(3, Config()) as world:

        def run(comm: Communicator) -> None:
            if comm.rank == 1:
                comm.close()
                return
            with pytest.raises(MembershipChanged) as raised:
                comm.barrier(timeout=EVENT_TIMEOUT)
            assert list(raised.value.lost) == [1]
            raised.value.communicator.barrier(timeout=EVENT_TIMEOUT)

        on_every(world, run)


def test_a_rank_that_leaves_ends_the_barrier_of_the_others_for_good_under_the_manual_policy() -> None:
    with local_communicators(3, Config(recovery_policy="manual")) as world:
        ends: dict[int, NexarError] = {}

        def run(comm: Communicator) -> None:
            if comm.rank == 1:
                comm.close()
                return
            with pytest.raises(NexarError) as raised:
                comm.barrier(timeout=EVENT_TIMEOUT)
            ends[comm.rank] = raised.value
            comm.close()

        on_every(world, run)
        lost = [error for error in ends.values() if isinstance(error, PeerLost)]
        assert lost
        assert all(isinstance(error, (PeerLost, LinkClosed, UsageError)) for error in ends.values())


@pytest.mark.parametrize("algorithm", [None, "flat", "tree"])
@pytest.mark.parametrize("size", [1, 3, DIRECT_SCATTER_BELOW + 1])
def test_rank_i_gets_block_i_whatever_the_way(size: int, algorithm: str | None) -> None:
    table = np.arange(size * 6, dtype=np.float32).reshape(size * 2, 3)
    rows = np.arange(size * 4).reshape(size, 4)

    def run(comm: Communicator) -> None:
        for root in {0, size - 1}:
            here = comm.rank == root
            block = comm.scatter(table if here else None, root, algorithm=algorithm)
            assert block.tobytes() == table[2 * comm.rank : 2 * comm.rank + 2].tobytes()
            assert block.shape == (2, 3)
            assert comm.scatter(rows if here else None, root, algorithm=algorithm).tolist() == rows[comm.rank].tolist()
            assert comm.scatter(table[:0] if here else None, root, algorithm=algorithm).shape == (0, 3)

    with local_communicators(size, Config()) as world:
        on_every(world, run)


def test_an_algorithm_that_there_is_not_is_refused_before_the_call_counts() -> None:
    with local_communicators(1, Config()) as (comm,):
        with pytest.raises(UsageError, match="flat, tree"):
            comm.scatter(np.ones(3), algorithm="ring")
        assert comm.stats()["calls"] == 0


def test_sizes_that_cannot_be_are_the_roots_fault() -> None:
    assert _read_scatter_header(_scatter_header(np.ones((2, 5), np.int16)), 0) == (np.dtype(np.int16), (2, 5))
    for bad in ([99, 1, 3], [11, 99, 3], [11, 1, -3]):
        header = _scatter_header(None)
        header[:3] = bad
        with pytest.raises(PeerMisbehaved, match="it scatters blocks"):
            _read_scatter_header(header, 3)
