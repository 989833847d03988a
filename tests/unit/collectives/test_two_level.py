from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from nexar.arrays.operations import ReduceCode, reduction_of
from nexar.arrays.partition import Span
from nexar.collectives.arena import Arena
from nexar.collectives.assembly import Assembly
from nexar.collectives.two_level import shares, turns


def assembly(hosts: tuple[tuple[int, ...], ...], rank: int) -> Assembly:
    mine = next(ranks for ranks in hosts if rank in ranks)
    group = SimpleNamespace(rank=rank, local_ranks=mine)
    return cast(Assembly, SimpleNamespace(hosts=hosts, group=group, index=mine.index(rank)))


@pytest.mark.parametrize(
    ("hosts", "carriers"),
    [(((0, 1), (2, 3)), 2), (((0, 1), (2,)), 1), (((0, 1, 2), (3,)), 1), (((0, 2, 4), (1, 3), (5, 6)), 2)],
)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_shares_tile_the_array_and_are_the_same_for_all_carriers_of_an_index(
    hosts: tuple[tuple[int, ...], ...], carriers: int, count: int
) -> None:
    for ranks in hosts:
        spans = shares(assembly(hosts, ranks[0]), count)
        assert len(spans) == len(ranks)
        assert [each for span in spans for each in range(*span)] == list(range(count))
        assert all(not span.count for span in spans[carriers:])
        assert spans[:carriers] == shares(assembly(hosts, hosts[0][0]), count)[:carriers]


def test_a_host_adds_up_for_its_carriers_and_hands_out_what_they_bring_back() -> None:
    """An average is divided once, by who calls: on the way it is a sum."""
    calls: list[tuple[str, Any]] = []
    arena = SimpleNamespace(
        reduce_scatter=lambda *facts, **_: calls.append(("reduce_scatter", facts)),
        all_gather=lambda *facts, **_: calls.append(("all_gather", facts)),
    )
    array = np.arange(5.0)
    first, second = turns(assembly(((0, 1), (2, 3)), 1), cast(Arena, arena), array, reduction_of("avg"))
    about = cast(Any, (0, None))
    first(8, about, False)
    second(9, about, False)
    (_, (slip, whole, share, spans, reduction)), (_, gathered) = calls
    assert (slip, gathered[0]) == (8, 9)
    assert whole is array
    assert share.tolist() == [3.0, 4.0]
    assert np.shares_memory(share, array)
    assert spans == (Span(0, 3), Span(3, 5))
    assert reduction.code is ReduceCode.SUM
