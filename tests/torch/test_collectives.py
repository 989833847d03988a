"""Every call of torch's against what it means, on ranks that are threads: no processes, so any number of cases."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import nexar
from nexar.torch.calls import GroupCalls, SharedNode
from tests.ranks import on_every

if torch.__version__ < (2, 14):
    from nexar.torch.process_group import NexarProcessGroup as TorchGroup
else:
    from nexar.torch.backend import NexarBackend as TorchGroup

SIZE = 3
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


@pytest.fixture
def groups() -> Iterator[list[GroupCalls]]:
    with nexar.local(SIZE) as communicators:
        made = [TorchGroup(each, 30.0, SharedNode(each, lambda: None)) for each in communicators]
        yield made
        for group in made:
            group.shutdown()


@pytest.fixture(params=["at once", "in the background", "by its future"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def options(kind: Any, way: str, **facts: Any) -> Any:
    made = kind()
    made.asyncOp = way != "at once"
    for name, value in facts.items():
        setattr(made, name, value)
    return made


def finish(work: Any, way: str) -> None:
    if way == "by its future":
        work.get_future().wait()
    else:
        assert work.wait()
    assert work.is_completed()


def ranks(groups: list[GroupCalls], task: Callable[[int, Any], Any]) -> list[Any]:
    return on_every(list(enumerate(groups)), lambda pair: task(*pair))


def mine(rank: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 5 + rank + 1).to(dtype)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and bool(torch.equal(found, wanted))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_all_reduce_adds_up_every_type(groups, way, dtype):
    def task(rank, group):
        tensor = mine(rank, dtype)
        finish(group.allreduce([tensor], options(dist.AllreduceOptions, way)), way)
        return tensor

    wanted = sum(mine(rank, torch.float64) for rank in range(SIZE)).to(dtype)
    assert all(same(found, wanted) for found in ranks(groups, task))


OPERATIONS: list[tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = [
    (dist.ReduceOp.SUM, lambda stack: stack.sum(0)),
    (dist.ReduceOp.PRODUCT, lambda stack: stack.prod(0)),
    (dist.ReduceOp.MIN, lambda stack: stack.amin(0)),
    (dist.ReduceOp.MAX, lambda stack: stack.amax(0)),
    (dist.ReduceOp.BAND, lambda stack: stack[0] & stack[1] & stack[2]),
    (dist.ReduceOp.BOR, lambda stack: stack[0] | stack[1] | stack[2]),
    (dist.ReduceOp.BXOR, lambda stack: stack[0] ^ stack[1] ^ stack[2]),
]


@pytest.mark.parametrize(("operation", "meaning"), OPERATIONS, ids=[str(pair[0]) for pair in OPERATIONS])
def test_all_reduce_knows_every_operation(groups, operation, meaning):
    def task(rank, group):
        tensor = mine(rank, torch.int64)
        group.allreduce([tensor], options(dist.AllreduceOptions, "at once", reduceOp=operation))
        return tensor

    wanted = meaning(torch.stack([mine(rank, torch.int64) for rank in range(SIZE)]))
    assert all(same(found, wanted) for found in ranks(groups, task))


def test_all_reduce_averages_and_scales_before_it_adds(groups):
    def task(rank, group):
        average, scaled = mine(rank), mine(rank)
        group.allreduce([average], options(dist.AllreduceOptions, "at once", reduceOp=dist.ReduceOp.AVG))
        twice = dist._make_nccl_premul_sum(2.0)
        group.allreduce([scaled], options(dist.AllreduceOptions, "at once", reduceOp=twice))
        return average, scaled

    total = sum(mine(rank) for rank in range(SIZE))
    for average, scaled in ranks(groups, task):
        assert torch.allclose(average, total / SIZE)
        assert same(scaled, 2 * total)


def test_a_tensor_with_gaps_is_reduced_in_place(groups, way):
    def task(rank, group):
        whole = torch.zeros(6, 4)
        whole[:, 1] = rank + 1.0
        finish(group.allreduce([whole[:, 1]], options(dist.AllreduceOptions, way)), way)
        return whole

    for whole in ranks(groups, task):
        assert whole[:, 1].tolist() == [6.0] * 6
        assert whole[:, 0].abs().sum() == 0


def test_many_tensors_are_reduced_together(groups, way):
    def task(rank, group):
        tensors = [mine(rank), mine(rank, torch.int64, (5,)), torch.zeros(0)]
        finish(group.allreduce_coalesced(tensors, options(dist.AllreduceCoalescedOptions, way)), way)
        return tensors

    for first, second, _ in ranks(groups, task):
        assert same(first, sum(mine(rank) for rank in range(SIZE)))
        assert same(second, sum(mine(rank, torch.int64, (5,)) for rank in range(SIZE)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e4m3fnuz, torch.complex64], ids=str)
def test_broadcast_brings_the_tensor_of_the_root(groups, way, dtype):
    def task(rank, group):
        tensor = mine(rank).to(dtype)
        finish(group.broadcast([tensor], options(dist.BroadcastOptions, way, rootRank=1)), way)
        return tensor

    wanted = mine(1).to(dtype)
    assert all(torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)) for found in ranks(groups, task))


def test_reduce_gives_the_root_the_sum(groups, way):
    def task(rank, group):
        tensor = mine(rank)
        finish(group.reduce([tensor], options(dist.ReduceOptions, way, rootRank=2)), way)
        return tensor

    assert same(ranks(groups, task)[2], sum(mine(rank) for rank in range(SIZE)))


def test_all_gather_fills_a_list(groups, way):
    def task(rank, group):
        room = [torch.zeros(2, 3) for _ in range(SIZE)]
        finish(group.allgather([room], [mine(rank)], options(c10d.AllgatherOptions, way)), way)
        return room

    for room in ranks(groups, task):
        assert all(same(found, mine(rank)) for rank, found in enumerate(room))


def test_all_gather_takes_tensors_of_different_sizes(groups, way):
    def task(rank, group):
        room = [torch.zeros(each + 1) for each in range(SIZE)]
        finish(
            group.allgather([room], [torch.full((rank + 1,), float(rank))], options(c10d.AllgatherOptions, way)), way
        )
        return room

    for room in ranks(groups, task):
        assert [found.tolist() for found in room] == [[0.0], [1.0] * 2, [2.0] * 3]


def test_all_gather_fills_one_tensor(groups, way):
    def task(rank, group):
        room, second = torch.zeros(SIZE * 2, 3), torch.zeros(SIZE, dtype=torch.int64)
        finish(group._allgather_base(room, mine(rank), options(c10d.AllgatherOptions, way)), way)
        number = torch.tensor(rank)
        work = group.allgather_into_tensor_coalesced([second], [number], options(c10d.AllgatherOptions, way))
        finish(work, way)
        return room, second

    for room, second in ranks(groups, task):
        assert same(room, torch.cat([mine(rank) for rank in range(SIZE)]))
        assert second.tolist() == [0, 1, 2]


def test_all_gather_of_lists_gives_each_ranks_list(groups, way):
    def task(rank, group):
        room = [[torch.zeros(2), torch.zeros(1, dtype=torch.int64)] for _ in range(SIZE)]
        given = [torch.full((2,), float(rank)), torch.tensor([rank])]
        finish(group.allgather_coalesced(room, given, options(c10d.AllgatherOptions, way)), way)
        return room

    for room in ranks(groups, task):
        assert [[each.tolist() for each in row] for row in room] == [[[float(r)] * 2, [r]] for r in range(SIZE)]


def test_gather_fills_the_list_of_the_root(groups, way):
    def task(rank, group):
        room = [[torch.zeros(2, 3) for _ in range(SIZE)]] if rank == 1 else []
        finish(group.gather(room, [mine(rank)], options(dist.GatherOptions, way, rootRank=1)), way)
        return room

    (room,) = ranks(groups, task)[1]
    assert all(same(found, mine(rank)) for rank, found in enumerate(room))


def test_scatter_gives_each_rank_its_part(groups, way):
    def task(rank, group):
        given = [[mine(each) for each in range(SIZE)]] if rank == 2 else []
        room = torch.zeros(2, 3)
        finish(group.scatter([room], given, options(dist.ScatterOptions, way, rootRank=2)), way)
        return room

    assert all(same(found, mine(rank)) for rank, found in enumerate(ranks(groups, task)))


@pytest.mark.parametrize("counts", [[2, 2, 2], [1, 0, 4]], ids=["equal", "unequal"])
def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(groups, way, counts):
    def task(rank, group):
        given = [torch.full((count,), float(rank + place)) for place, count in enumerate(counts)]
        room = torch.zeros(counts[rank])
        finish(group.reduce_scatter([room], [given], options(dist.ReduceScatterOptions, way)), way)
        return room

    for rank, found in enumerate(ranks(groups, task)):
        assert found.tolist() == [3.0 + SIZE * rank] * counts[rank]


def test_reduce_scatter_of_one_tensor_leaves_it_as_it_is(groups, way):
    def task(rank, group):
        given, room = mine(rank, shape=(SIZE * 2, 3)), torch.zeros(2, 3)
        finish(group._reduce_scatter_base(room, given, options(dist.ReduceScatterOptions, way)), way)
        assert same(given, mine(rank, shape=(SIZE * 2, 3)))
        return room

    total = sum(mine(rank, shape=(SIZE * 2, 3)) for rank in range(SIZE))
    assert all(same(found, total[2 * rank : 2 * rank + 2]) for rank, found in enumerate(ranks(groups, task)))


def test_all_to_all_exchanges_lists_of_any_sizes(groups, way):
    def task(rank, group):
        given = [torch.full((rank + other,), float(rank)) for other in range(SIZE)]
        room = [torch.zeros(rank + other) for other in range(SIZE)]
        finish(group.alltoall(room, given, options(dist.AllToAllOptions, way)), way)
        return room

    for rank, room in enumerate(ranks(groups, task)):
        assert [found.tolist() for found in room] == [[float(other)] * (rank + other) for other in range(SIZE)]


def test_all_to_all_of_one_tensor_in_equal_and_in_given_parts(groups, way):
    def task(rank, group):
        equal, given = torch.zeros(SIZE, 2), torch.arange(SIZE * 2.0).reshape(SIZE, 2) + 10 * rank
        finish(group.alltoall_base(equal, given, [], [], options(dist.AllToAllOptions, way)), way)
        sizes, others = [rank + other for other in range(SIZE)], [rank + other for other in range(SIZE)]
        parts, source = torch.zeros(sum(sizes)), torch.full((sum(others),), float(rank))
        finish(group.alltoall_base(parts, source, sizes, others, options(dist.AllToAllOptions, way)), way)
        return equal, parts

    for rank, (equal, parts) in enumerate(ranks(groups, task)):
        assert equal.tolist() == [[2.0 * rank + 10 * other, 2.0 * rank + 1 + 10 * other] for other in range(SIZE)]
        assert parts.tolist() == [float(other) for other in range(SIZE) for _ in range(rank + other)]


def test_messages_arrive_by_tag_and_name_their_sender(groups):
    def task(rank, group):
        if rank:
            group.send([mine(rank)], 0, rank).wait()
            return None
        second, first = torch.zeros(2, 3), torch.zeros(2, 3)
        group.recv([second], 2, 2).wait()
        work = group.recv_anysource([first], 1)
        work.wait()
        assert work._source_rank() == 1
        return first, second

    first, second = ranks(groups, task)[0]
    assert same(first, mine(1))
    assert same(second, mine(2))


def test_a_barrier_ends_when_all_have_come(groups, way):
    ranks(groups, lambda _rank, group: finish(group.barrier(options(dist.BarrierOptions, way)), way))


def test_work_that_nobody_holds_goes_on(groups):
    def task(rank, group):
        tensor = mine(rank)
        group.allreduce([tensor], options(dist.AllreduceOptions, "in the background"))
        group.barrier(options(dist.BarrierOptions, "at once"))
        return tensor

    assert all(same(found, sum(mine(rank) for rank in range(SIZE))) for found in ranks(groups, task))


def test_a_sparse_tensor_is_refused_with_the_remedy(groups):
    with pytest.raises(nexar.UsageError, match="to_dense"):
        groups[0].allreduce([torch.eye(2).to_sparse()], options(dist.AllreduceOptions, "at once"))


def test_ranks_that_disagree_raise_a_mismatch_also_through_futures():
    def task(pair):
        rank, group = pair
        work = group.allreduce([torch.zeros(3 + rank)], options(dist.AllreduceOptions, "in the background"))
        with pytest.raises(RuntimeError, match="CollectiveMismatch"):
            work.get_future().wait()
        with pytest.raises(nexar.CollectiveMismatch):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        group.shutdown()

    with nexar.local(2) as communicators:
        made = [TorchGroup(each, 30.0, SharedNode(each, lambda: None)) for each in communicators]
        on_every(list(enumerate(made)), task)
