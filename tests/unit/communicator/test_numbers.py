"""NumPy's scalars are numbers, wherever a number is asked for."""

import numpy as np
import pytest

import nexar
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.communicator.request import wait_all
from nexar.config import Config
from nexar.errors import UsageError
from tests.ranks import on_every

REALS = [np.float16, np.float32, np.float64, np.int8, np.uint64]


@pytest.mark.parametrize("kind", REALS)
def test_a_timeout_may_be_a_scalar_of_numpy(kind: type) -> None:
    def run(comm: Communicator) -> None:
        seconds = kind(60)
        comm.all_reduce(np.ones(3), timeout=seconds)
        comm.barrier(timeout=seconds)
        request = comm.start.all_reduce(np.ones(3), timeout=seconds)
        request.wait(timeout=seconds)
        wait_all([comm.start.barrier(timeout=seconds)], timeout=seconds)
        comm.agree(1, timeout=seconds)
        comm.checkpoint(timeout=seconds)
        part = comm.split(np.uint8(1), np.int16(-comm.rank), timeout=seconds)
        assert part is not None
        assert part.rank == comm.size - 1 - comm.rank
        whole = comm.group(np.arange(comm.size), timeout=seconds)
        assert whole is not None

    with local_communicators(2, Config()) as world:
        on_every(world, run)


def test_ranks_roots_tags_and_counts_may_be_scalars_of_numpy() -> None:
    def run(comm: Communicator) -> None:
        one = np.int32(1)
        comm.broadcast(np.ones(3), root=one)
        comm.reduce_scatter_v(np.ones(3), np.array([1, 2]))
        comm.all_reduce_bucketed([np.ones(3)], bucket_bytes=np.int64(1024))
        if comm.rank == 0:
            comm.send(np.ones(3), dest=one, tag=np.uint16(7), timeout=np.float32(60))
        else:
            comm.recv(source=np.int64(0), tag=np.int8(7), timeout=np.float32(60))

    with local_communicators(np.int64(2), Config()) as world:
        on_every(world, run)


def test_settings_may_be_scalars_of_numpy() -> None:
    config = Config(collective_timeout=np.float32(2.5), ring_max_world=np.int32(4), bucket_bytes=np.uint64(1 << 20))
    assert (config.collective_timeout, config.ring_max_world, config.bucket_bytes) == (2.5, 4, 1 << 20)
    assert [type(each) for each in (config.collective_timeout, config.ring_max_world)] == [float, int]


@pytest.mark.parametrize(
    ("timeout", "why"),
    [
        *((each, "leaves no time") for each in (0, -1, np.float32("nan"))),
        *((each, "is not a number") for each in ("1", [1], 1j)),
    ],
)
def test_what_is_no_timeout_is_refused_by_name(timeout: object, why: str) -> None:
    with local_communicators(1, Config()) as (comm,):
        request = comm.start.barrier()
        for call in (
            lambda: comm.barrier(timeout=timeout),  # type: ignore[arg-type]
            lambda: comm.shrink(timeout=timeout),  # type: ignore[arg-type]
            lambda: request.wait(timeout=timeout),  # type: ignore[arg-type]
            lambda: wait_all([request], timeout=timeout),  # type: ignore[arg-type]
        ):
            with pytest.raises(UsageError, match=f"{why}; give a number of seconds above 0"):
                call()
        request.wait()


def test_a_closed_communicator_says_that_it_is_closed() -> None:
    with local_communicators(1, Config()) as (comm,):
        part = comm.split(0)
        assert part is not None
        part.close()
        for call in (part.shrink, part.revoke, lambda: part.agree(1), part.__enter__):
            with pytest.raises(UsageError, match=r"this communicator is closed; make a new one with split\(\)"):
                call()
        comm.barrier()
    for call in (comm.shrink, comm.__enter__):
        with pytest.raises(UsageError, match="closed; make all calls before the end of its `with` block"):
            call()


def test_a_usage_error_is_a_value_error() -> None:
    with local_communicators(1, Config()) as (comm,), pytest.raises(ValueError, match="not a reduction"):
        comm.all_reduce(np.ones(3), "mean")
    assert issubclass(nexar.BufferMismatch, ValueError)
