"""Collectives of random shapes, roots, counts, dtypes, with calls given up by chance: over every transport."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nexar.collectives.operations import COLLECTIVES
from nexar.communicator.communicator import Communicator
from nexar.errors import Cancelled
from tests.conformance.collectives.cases import Case, run_cases, wrong_results
from tests.conformance.worlds import SCHEMES, ranks_over
from tests.processes.scale import sized
from tests.ranks import EVENT_TIMEOUT, on_every

SIZE = 4
FEW = settings(
    max_examples=sized(8, 300),
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

dimensions = st.lists(st.integers(0, 30), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from(["bool", "int8", "uint16", "int64", "uint64"])  # exact, whatever the order
ops = st.sampled_from(["sum", "prod", "min", "max", "band", "bxor", "land", "lxor"])
roots = st.integers(0, SIZE - 1)
REDUCTIONS = [row.name for row in COLLECTIVES.values() if row.operands is not None]
REDUCTIONS.remove("all_reduce_compressed")  # inexact
anything = st.builds(
    Case,
    verb=st.sampled_from(REDUCTIONS),
    dtype=dtypes,
    op=ops,
    shape=dimensions,
    root=roots,
    more=st.sampled_from([(), (("deterministic", True),)]),
) | st.builds(
    Case,
    verb=st.sampled_from(
        ["broadcast", "gather", "all_gather", "scatter_v", "all_to_all_v", "all_gather_v", "gather_v"]
    ),
    dtype=dtypes,
    op=st.just("sum"),
    shape=dimensions,
    root=roots,
    more=st.just(()),
)


@pytest.fixture(params=SCHEMES)
def world(request: pytest.FixtureRequest) -> Iterator[list[Communicator]]:
    config = {"pipeline_segment_bytes": 4096, "large_msg_bytes": 16384, "eager_limit_bytes": 1024}
    with ranks_over(request.param, SIZE, collective_timeout=EVENT_TIMEOUT, **config) as made:
        yield made


@FEW
@given(cases=st.lists(anything, min_size=1, max_size=6))
def test_any_shape_root_and_count_is_right(world: list[Communicator], cases: list[Case]) -> None:
    assert wrong_results(cases, on_every(world, partial(run_cases, cases=cases))) == []


@pytest.mark.full
@FEW
@given(
    counts=st.lists(st.sampled_from([0, 1, 100, 5000, 50_000]), min_size=1, max_size=8),
    given_up=st.dictionaries(st.integers(0, 7), roots, max_size=3),
)
def test_calls_given_up_by_chance_end_everywhere_and_touch_no_others(
    world: list[Communicator], counts: list[int], given_up: dict[int, int]
) -> None:
    """Call i is cancelled by rank `given_up[i]`: there it ends, elsewhere it is right or names that rank."""

    def run(comm: Communicator) -> list[str]:
        arrays = [np.full(count, comm.rank + index) for index, count in enumerate(counts)]
        requests = [comm.start.all_reduce(array) for array in arrays]
        for index, rank in given_up.items():
            if rank == comm.rank and index < len(requests):
                requests[index].cancel()
        return [end(index, request) for index, request in enumerate(requests)]

    def end(index: int, request: Any) -> str:
        try:
            got = request.wait(EVENT_TIMEOUT)
        except Cancelled as error:
            return "ours" if error.rank is None else f"rank {error.rank}"
        return "right" if (got == sum(range(SIZE)) + SIZE * index).all() else "wrong"

    for rank, ends in enumerate(on_every(world, run)):
        for index, said in enumerate(ends):
            culprit = given_up.get(index)
            allowed = {"right"} | ({"ours" if culprit == rank else f"rank {culprit}"} if culprit is not None else set())
            assert said in allowed, f"call {index} at rank {rank}"
    assert on_every(world, lambda comm: comm.all_reduce(1)) == [SIZE] * SIZE
