from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from nexar.arrays.operators import ReduceCode, reduction_of
from nexar.arrays.views import Span
from nexar.collectives.context import CollectiveContext
from nexar.collectives.reductions import TwoLevel, host_shares
from nexar.config import Config


def assembly(hosts: tuple[tuple[int, ...], ...], rank: int, shared_region: Any = None) -> CollectiveContext:
    mine = next(ranks for ranks in hosts if rank in ranks)
    group = SimpleNamespace(rank=rank, local_ranks=mine, size=sum(map(len, hosts)))
    facts = SimpleNamespace(hosts=hosts, group=group, index=mine.index(rank), region=shared_region, config=Config())
    return cast(CollectiveContext, facts)


@pytest.mark.parametrize(
    ("hosts", "carriers"),
    [(((0, 1), (2, 3)), 2), (((0, 1), (2,)), 1), (((0, 1, 2), (3,)), 1), (((0, 2, 4), (1, 3), (5, 6)), 2)],
)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_shares_tile_the_array_and_are_the_same_for_all_carriers_of_an_index(
    hosts: tuple[tuple[int, ...], ...], carriers: int, count: int
) -> None:
    for ranks in hosts:
        spans = host_shares(assembly(hosts, ranks[0]), count)
        assert len(spans) == len(ranks)
        assert [each for span in spans for each in range(*span)] == list(range(count))
        assert all(not span.count for span in spans[carriers:])
        assert spans[:carriers] == host_shares(assembly(hosts, hosts[0][0]), count)[:carriers]


class RecordingRegion:
    """A shared region that only notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def reduce_scatter(self, *facts: Any, fold: Any, **_: Any) -> None:
        self.calls.append((*facts, fold))

    def all_gather(self, *facts: Any, **_: Any) -> None:
        self.calls.append(facts)


def asked(array: NDArray[Any]) -> list[Any]:
    """What an average of two hosts with two ranks each asks of the memory of one of them."""
    shared_region = RecordingRegion()
    first, second = TwoLevel(assembly(((0, 1), (2, 3)), 1, shared_region), array, reduction_of("avg")).region_steps
    about = cast(Any, (0, None))
    first(8, about, False)
    second(9, about, False)
    return shared_region.calls


def test_a_host_adds_up_for_its_carriers_and_hands_out_what_they_bring_back() -> None:
    """An average is divided once, after the network: on the way it is a sum."""
    array = np.arange(5.0)
    (order_number, whole, share, spans, reduction, fold), gathered = asked(array)
    assert (order_number, gathered[0]) == (8, 9)
    assert whole is array
    assert share.tolist() == [3.0, 4.0]
    assert np.shares_memory(share, array)
    assert spans == (Span(0, 3), Span(3, 5))
    assert reduction.code is ReduceCode.SUM
    assert fold is None


def test_narrow_floats_leave_their_host_as_float32() -> None:
    array = np.full(5, 40_000, np.float16)
    (_, _, partial, _, _, fold), (_, share, *_) = asked(array)
    assert (partial.dtype, len(partial)) == (np.float32, 2)
    assert np.shares_memory(share, array)
    fold(partial, [array[3:], array[3:]])
    assert partial.tolist() == [80_000, 80_000]


def test_large_arrays_of_narrow_floats_leave_it_divided_and_rounded() -> None:
    array = np.full(Config().large_msg_bytes // 2, 40_000, np.float16)
    (_, _, partial, _, _, fold), _ = asked(array)
    assert np.shares_memory(partial, array)
    piece = array[:7]
    out = np.empty_like(piece)
    fold(out, [piece, piece])
    assert out.tolist() == [20_000] * 7
