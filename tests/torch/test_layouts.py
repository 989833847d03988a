"""Every collective with tensors that have no dimensions, no elements, or gaps, on ranks that are threads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from tests.torch.test_collectives import SIZE, finish, groups, options, ranks, way  # noqa: F401  # two are fixtures

Maker = Callable[[float], torch.Tensor]


def _transposed(value: float) -> torch.Tensor:
    return (torch.arange(6.0) + 10 * value).reshape(2, 3).t()


LAYOUTS: dict[str, Maker] = {
    "no dimensions": torch.tensor,
    "no elements": lambda value: torch.full((2, 0), value),
    "gaps": lambda value: torch.full((4, 6), value)[:, ::2],
    "transposed": _transposed,
    "gaps between doubles": lambda value: torch.full((3, 4), value, dtype=torch.float64)[1:, ::3],
    "gaps between bfloat16": lambda value: torch.full((4, 6), value, dtype=torch.bfloat16)[:, ::2],
    "a type that no array has": lambda value: torch.full((4, 6), value).to(torch.float8_e4m3fnuz)[:, ::2],
}
REDUCED = [name for name in LAYOUTS if name != "a type that no array has"]
WORLD = range(SIZE)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
reduced_layouts = pytest.mark.parametrize("layout", REDUCED)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """To the bit, in any layout."""
    return found.shape == wanted.shape and found.dtype == wanted.dtype and found.tolist() == wanted.tolist()


def room(make: Maker) -> torch.Tensor:
    """To be filled, laid out like what comes."""
    tensor = make(0.0)
    tensor.zero_()
    return tensor


def total(make: Maker) -> Any:
    return sum(make(float(rank)) for rank in WORLD)


@reduced_layouts
def test_reductions_in_place(groups, way, layout):  # noqa: F811
    make = LAYOUTS[layout]

    def task(rank, group):
        everywhere, at_root, together = make(float(rank)), make(float(rank)), [make(float(rank)), make(float(rank))]
        finish(group.allreduce([everywhere], options(dist.AllreduceOptions, way)), way)
        finish(group.reduce([at_root], options(dist.ReduceOptions, way, rootRank=1)), way)
        finish(group.allreduce_coalesced(together, options(dist.AllreduceCoalescedOptions, way)), way)
        return [everywhere, *together, *([at_root] if rank == 1 else [])]

    for found in ranks(groups, task):
        assert all(same(each, total(make)) for each in found)


@layouts
def test_broadcast(groups, way, layout):  # noqa: F811
    make = LAYOUTS[layout]

    def task(rank, group):
        tensor = make(float(rank))
        finish(group.broadcast([tensor], options(dist.BroadcastOptions, way, rootRank=1)), way)
        return tensor

    assert all(same(found, make(1.0)) for found in ranks(groups, task))


@layouts
def test_all_gather_and_gather(groups, way, layout):  # noqa: F811
    make = LAYOUTS[layout]

    def task(rank, group):
        mine, lists = make(float(rank)), [room(make) for _ in WORLD]
        finish(group.allgather([lists], [mine], options(c10d.AllgatherOptions, way)), way)
        coalesced = [[room(make)] for _ in WORLD]
        finish(group.allgather_coalesced(coalesced, [mine], options(c10d.AllgatherOptions, way)), way)
        one = torch.stack([room(make) for _ in WORLD], -1).movedim(-1, 0)
        finish(group._allgather_base(one, mine, options(c10d.AllgatherOptions, way)), way)
        at_root = [[room(make) for _ in WORLD]] if rank == 2 else []
        finish(group.gather(at_root, [mine], options(dist.GatherOptions, way, rootRank=2)), way)
        return [lists, [each for (each,) in coalesced], list(one.unbind(0)), *at_root]

    for found in ranks(groups, task):
        for gathered in found:
            assert all(same(each, make(float(rank))) for rank, each in enumerate(gathered))


@layouts
def test_scatter_and_all_to_all(groups, way, layout):  # noqa: F811
    make = LAYOUTS[layout]

    def task(rank, group):
        given, mine = [make(float(rank + 2 * each)) for each in WORLD], room(make)
        finish(group.scatter([mine], [given] if rank == 1 else [], options(dist.ScatterOptions, way, rootRank=1)), way)
        exchanged = [room(make) for _ in WORLD]
        finish(group.alltoall(exchanged, given, options(dist.AllToAllOptions, way)), way)
        return mine, exchanged

    for rank, (scattered, exchanged) in enumerate(ranks(groups, task)):
        assert same(scattered, make(float(1 + 2 * rank)))
        assert all(same(each, make(float(other + 2 * rank))) for other, each in enumerate(exchanged))


@reduced_layouts
def test_reduce_scatter(groups, way, layout):  # noqa: F811
    make = LAYOUTS[layout]

    def task(rank, group):
        given, of_list, of_one = [make(float(rank)) for _ in WORLD], room(make), room(make)
        finish(group.reduce_scatter([of_list], [given], options(dist.ReduceScatterOptions, way)), way)
        stacked = torch.stack(given, -1).movedim(-1, 0)
        finish(group._reduce_scatter_base(of_one, stacked, options(dist.ReduceScatterOptions, way)), way)
        return of_list, of_one

    for found in ranks(groups, task):
        assert all(same(each, total(make)) for each in found)


@layouts
def test_messages(groups, layout):  # noqa: F811
    make = LAYOUTS[layout]

    def task(rank, group):
        received = room(make)
        if rank == 0:
            group.send([make(4.0)], 1).wait()
        if rank == 1:
            group.recv([received], 0).wait()
        return received

    assert same(ranks(groups, task)[1], make(4.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fnuz], ids=str)
def test_a_tensor_can_be_resized_after_a_collective(groups, way, dtype):  # noqa: F811
    def task(rank, group):
        tensor, lists = torch.ones(4).to(dtype), [torch.zeros(4).to(dtype) for _ in WORLD]
        finish(group.broadcast([tensor], options(dist.BroadcastOptions, way, rootRank=0)), way)
        finish(group.allgather([lists], [tensor], options(c10d.AllgatherOptions, way)), way)
        for each in (tensor, *lists):
            each.untyped_storage().resize_(0)
            each.untyped_storage().resize_(16)
        return True

    assert all(ranks(groups, task))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint64], ids=str)
def test_the_average_of_integers_is_rounded_toward_zero(groups, way, dtype):  # noqa: F811
    signed = dtype.is_signed
    given = [(torch.tensor([[7, 1], [-7 if signed else 9, -2 if signed else 0]]) + rank).to(dtype) for rank in WORLD]
    wanted = torch.stack([each.to(torch.int64) for each in given]).sum(0).div(SIZE, rounding_mode="trunc").to(dtype)
    average = dist.ReduceOp.AVG

    def task(rank, group):
        whole = torch.zeros(2, 4, dtype=torch.int64).to(dtype)
        cut, at_root, scattered = whole[:, ::2], given[rank].clone(), torch.zeros_like(given[rank])
        cut.copy_(given[rank])
        finish(group.allreduce([cut], options(dist.AllreduceOptions, way, reduceOp=average)), way)
        finish(group.reduce([at_root], options(dist.ReduceOptions, way, reduceOp=average, rootRank=0)), way)
        parts, facts = [[given[rank]] * SIZE], options(dist.ReduceScatterOptions, way, reduceOp=average)
        finish(group.reduce_scatter([scattered], parts, facts), way)
        mixed = [given[rank].clone(), given[rank].to(torch.float64)]
        finish(group.allreduce_coalesced(mixed, options(dist.AllreduceCoalescedOptions, way, reduceOp=average)), way)
        return cut, scattered, mixed[0], at_root if rank == 0 else wanted, mixed[1]

    exact = torch.stack([each.to(torch.float64) for each in given]).sum(0) / SIZE
    for *found, fraction in ranks(groups, task):
        assert all(same(each, wanted) for each in found)
        assert torch.allclose(fraction, exact)
