import threading

import pytest

from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import CollectiveTimeout, LinkClosed, MembershipChanged, NexarError, PeerLost, UsageError
from tests.ranks import PATIENCE, on_every


@pytest.mark.parametrize("algorithm", ["dissemination", "two_phase"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_nobody_leaves_before_everybody_has_come(size: int, algorithm: str) -> None:
    come: set[int] = set()
    others_came = threading.Event()

    def run(comm: Communicator) -> int:
        if comm.rank == size - 1:
            others_came.wait(PATIENCE)
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
def test_everybody_who_comes_in_vain_is_told_who_has_not_come(algorithm: str) -> None:
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
                comm.barrier(timeout=PATIENCE)
            assert list(raised.value.lost) == [1]
            raised.value.communicator.barrier(timeout=PATIENCE)

        on_every(world, run)


def test_a_rank_that_leaves_ends_the_barrier_of_the_others_for_good_under_the_manual_policy() -> None:
    with local_communicators(3, Config(recovery_policy="manual")) as world:
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
