"""Every collective against NumPy, on threads: each verb, dtype, operation, algorithm, in worlds of 1 to 9 ranks."""

from functools import partial

import pytest

from nexar.communicator.local import local_communicators
from nexar.config import Config
from tests.conformance.collectives.cases import (
    Case,
    every_algorithm,
    every_dtype_and_operation,
    every_verb,
    run_cases,
    wrong_results,
)
from tests.conformance.worlds import TOPOLOGY
from tests.ranks import on_every

WORLDS = range(1, 10)
SETTINGS = Config(collective_timeout=20.0, barrier_timeout=20.0, topology=TOPOLOGY)
SEGMENTED = Config(pipeline_segment_bytes=512, large_msg_bytes=1024, collective_timeout=20.0, topology=TOPOLOGY)


def assert_right(size: int, cases: list[Case], config: Config = SETTINGS) -> None:
    with local_communicators(size, config) as world:
        assert wrong_results(cases, on_every(world, partial(run_cases, cases=cases))) == []


@pytest.mark.parametrize("size", WORLDS)
def test_every_verb_is_right_at_every_size(size: int) -> None:
    counts = sorted({0, 1, size - 1, size + 1, 1000}) if size < 6 else [0, size + 1, 1000]
    assert_right(size, every_verb(size, counts, ("float64", "int16", "bfloat16", "complex64")))


@pytest.mark.parametrize("size", WORLDS)
def test_every_operation_is_right_in_every_dtype(size: int) -> None:
    assert_right(size, every_dtype_and_operation(size, every={3: 1, 4: 5}.get(size, 11)))


@pytest.mark.parametrize("size", WORLDS)
def test_every_algorithm_is_right(size: int) -> None:
    assert_right(size, every_algorithm(size, [1, size + 1, 997] if size < 6 else [997]), SEGMENTED)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_arrays_that_travel_in_many_pieces_are_right(size: int) -> None:
    assert_right(size, every_verb(size, [70_001], ("float32",)))
