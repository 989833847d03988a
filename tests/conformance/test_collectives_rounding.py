"""Narrow floats are rounded once: sums and averages of all ranks, compared with the exact result bit by bit.

The numbers of a test are so close to one another that float32 adds them up exactly, in every order. So there is one
right result, which a way that rounds more often misses somewhere among a thousand elements.
"""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from nexar.arrays.reduce import NARROW_FLOATS
from nexar.collectives.operations import OperationCode, algorithms_of
from nexar.collectives.selection import SHARED_MEMORY
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from tests.conformance.worlds import ranks_over
from tests.ranks import on_every

TYPES = sorted(map(str, NARROW_FLOATS))
PATIENT = {"collective_timeout": 60.0}
VERBS = ("all_reduce", "reduce", "reduce_scatter", "scan")


def contribution(dtype: str, rank: int, count: int) -> np.ndarray:
    """Numbers from 1 to 32 of either sign, with all the digits that the dtype has."""
    random = np.random.default_rng(rank)
    numbers = random.uniform(1, 2, count) * random.choice([-1.0, 1.0], count) * 2.0 ** random.integers(0, 5, count)
    return numbers.astype(dtype)


def exact(arrays: list[np.ndarray], op: str) -> np.ndarray:
    """In float64, where the sum is exact; the quotient is float32's."""
    total = np.sum([array.astype(np.float64) for array in arrays], axis=0)
    wide = total.astype(np.float32)
    assert (wide == total).all(), "choose numbers that float32 adds up exactly"
    return (wide / np.float32(len(arrays) if op == "avg" else 1)).astype(arrays[0].dtype)


def wanted(verb: str, arrays: list[np.ndarray], rank: int, op: str) -> np.ndarray | None:
    if verb == "scan":
        return exact(arrays[: rank + 1], op)
    if verb == "reduce" and rank != 1:
        return None
    whole = exact(arrays, op)
    return np.array_split(whole, len(arrays))[rank] if verb == "reduce_scatter" else whole


def assert_exact(comm: Communicator, verb: str, dtype: str, op: str, count: int, **more: object) -> None:
    arrays = [contribution(dtype, rank, count) for rank in range(comm.size)]
    rooted = {"root": 1} if verb == "reduce" else {}
    got = getattr(comm, verb)(arrays[comm.rank].copy(), op, **rooted, **more)
    expected = wanted(verb, arrays, comm.rank, op)
    if expected is None:
        assert got is None
    else:
        assert got.tobytes() == expected.tobytes(), f"{verb} {op} of {dtype}[{count}] {more} at rank {comm.rank}"


def every_default(comm: Communicator, counts: tuple[int, ...]) -> None:
    for verb in VERBS:
        for dtype in TYPES:
            for op in ("sum", "avg"):
                for count in counts:
                    assert_exact(comm, verb, dtype, op, count)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("ring_max_world", [8, 2])
def test_the_default_of_every_verb_rounds_once(size: int, ring_max_world: int) -> None:
    with local_communicators(size, Config(ring_max_world=ring_max_world, **PATIENT)) as world:  # type: ignore[arg-type]
        on_every(world, partial(every_default, counts=(1, 997, 40_001)))


@pytest.mark.parametrize("size", [3, 4])
def test_the_default_for_large_arrays_rounds_once_where_all_ranks_are_neighbours(size: int) -> None:
    with local_communicators(size, Config(large_msg_bytes=16_384, pipeline_segment_bytes=4096, **PATIENT)) as world:  # type: ignore[arg-type]
        on_every(world, partial(every_default, counts=(40_001,)))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shared_memory_rounds_once(size: int) -> None:
    def run(comm: Communicator) -> None:
        assert comm._context.choose(OperationCode.ALL_REDUCE, 997, np.dtype(np.float16)) == SHARED_MEMORY
        every_default(comm, (1, 997, 40_001))

    with ranks_over("shm", size, **PATIENT) as world:
        on_every(world, run)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_algorithm_rounds_once_below_large_msg_bytes(size: int) -> None:
    def run(comm: Communicator) -> None:
        for verb in VERBS:
            for name in algorithms_of(OperationCode[verb.upper()]):
                for dtype in TYPES:
                    for op in ("sum", "avg"):
                        assert_exact(comm, verb, dtype, op, 997, algorithm=name)

    with local_communicators(size, Config(**PATIENT)) as world:  # type: ignore[arg-type]
        on_every(world, run)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_an_average_does_not_overflow_where_the_sum_would(large: bool) -> None:
    """From large_msg_bytes on a ring rounds with every hop, but it scales before the first."""

    def run(comm: Communicator) -> None:
        for verb in VERBS:
            for name in (None, *algorithms_of(OperationCode[verb.upper()])):
                for dtype, value in (("float16", 40_000.0), ("float8_e5m2", 40_960.0), ("float8_e4m3fn", 416.0)):
                    array = np.full(1000, value, dtype)
                    rooted = {"root": 1} if verb == "reduce" else {}
                    got = getattr(comm, verb)(array, "avg", algorithm=name, **rooted)
                    if got is not None:
                        step = float(ml_dtypes.finfo(dtype).eps) * value
                        assert (np.abs(got.astype(np.float64) - value) <= step).all(), (verb, name, dtype, got[0])

    with local_communicators(3, Config(large_msg_bytes=256 if large else 1 << 20, **PATIENT)) as world:  # type: ignore[arg-type]
        on_every(world, run)


def test_a_deterministic_result_is_the_same_on_every_way() -> None:
    def run(comm: Communicator) -> list[bytes]:
        array = np.random.default_rng(comm.rank).normal(size=5000).astype(np.float16)
        names = [name for name, each in algorithms_of(OperationCode.ALL_REDUCE).items() if each.left_fold]
        found = [comm.all_reduce(array.copy(), "avg", algorithm=name, deterministic=True) for name in names]
        return [each.tobytes() for each in [*found, comm.all_reduce(array.copy(), "avg", deterministic=True)]]

    results = set()
    for scheme in ("memory", "shm"):
        with ranks_over(scheme, 3, **PATIENT) as world:
            results |= {each for found in on_every(world, run) for each in found}
    assert len(results) == 1
