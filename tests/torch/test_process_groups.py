"""Process groups in real processes: how they are made, of what they consist, and how they end."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import nexar
from tests.torch.processes import on_ranks

FROM_2_14 = torch.__version__ >= (2, 14)


def total(group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_groups_of_some_ranks_work_beside_one_another(tmp_path):
    def task(rank, size):
        assert dist.get_backend() == "nexar"
        halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        reversed_order = dist.new_group([3, 0])
        mine = halves[rank % 2]
        ends = total(reversed_order) if rank in (0, 3) else 0.0
        return total(), total(mine), ends, dist.get_rank(mine)

    answers = on_ranks(tmp_path, 4, task)
    assert [answer[:3] for answer in answers] == [
        (10.0, 4.0, 5.0),
        (10.0, 6.0, 0.0),
        (10.0, 4.0, 0.0),
        (10.0, 6.0, 5.0),
    ]
    assert [answer[3] for answer in answers] == [0, 0, 1, 1]


@pytest.mark.skipif(not FROM_2_14, reason="before torch 2.14 split_group is for groups that are bound to a GPU")
def test_a_group_is_split_and_shrunk(tmp_path):
    def task(rank, size):
        half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
        found = total(half)
        if rank != 1:
            smaller = dist.shrink_group([1])
            found += 100 * total(smaller)
        return found

    answers = on_ranks(tmp_path, 4, task)
    assert [answers[rank] for rank in (0, 2, 3)] == [3.0 + 600.0, 7.0 + 600.0, 7.0 + 600.0]  # they are 0, 1 and 2 then


def test_messages_are_received_from_anybody(tmp_path):
    def task(rank, size):
        tensor = torch.full((3,), float(rank))
        if rank:
            dist.send(tensor, 0, tag=5)
            return None
        return sorted(dist.recv(tensor, tag=5) for _ in range(size - 1))

    assert on_ranks(tmp_path, 3, task)[0] == [1, 2]


def test_work_reports_when_it_is_completed(tmp_path):
    def task(rank, size):
        if rank == 0:
            dist.recv(torch.zeros(1), 1)  # until then the other one cannot have its sum
        work = dist.all_reduce(torch.ones(1), async_op=True)
        early = work.is_completed()
        if rank == 1:
            dist.send(torch.zeros(1), 0)
        work.wait()
        return early, work.is_completed()

    assert on_ranks(tmp_path, 2, task)[1] == (False, True)


def test_objects_travel(tmp_path):
    def task(rank, size):
        gathered = [None] * size
        dist.all_gather_object(gathered, {"rank": rank})
        box = [["from", 1]] if rank == 1 else [None]
        dist.broadcast_object_list(box, src=1)
        scattered = [None]
        dist.scatter_object_list(scattered, ["a", "b"] if rank == 0 else None, src=0)
        return gathered, box, scattered

    for rank, (gathered, box, scattered) in enumerate(on_ranks(tmp_path, 2, task)):
        assert gathered == [{"rank": 0}, {"rank": 1}]
        assert box == [["from", 1]]
        assert scattered == ["ab"[rank]]


def test_many_messages_are_posted_together(tmp_path):
    def task(rank, size):
        left, right = (rank - 1) % size, (rank + 1) % size
        sent, received = torch.full((100_000,), float(rank)), torch.zeros(100_000)
        posted = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]
        for work in dist.batch_isend_irecv(posted):
            work.wait()
        return received[0].item() == received[-1].item() == left

    assert all(on_ranks(tmp_path, 3, task))


def test_a_process_group_can_be_destroyed_and_made_again(tmp_path):
    def task(rank, size):
        first = total()
        dist.destroy_process_group()
        again = f"file://{tmp_path}/second"
        dist.init_process_group("nexar", init_method=again, rank=size - 1 - rank, world_size=size)
        return first, total(), dist.get_rank()

    assert on_ranks(tmp_path, 2, task) == [(3.0, 3.0, 1), (3.0, 3.0, 0)]


def test_a_group_of_nexar_stands_beside_a_default_group_of_gloo(tmp_path):
    def task(rank, size):
        ours = dist.new_group([0, 1], backend="nexar")
        found = total(ours) if rank < 2 else 0.0
        return total(), found

    assert on_ranks(tmp_path, 3, task, backend="gloo") == [(6.0, 3.0), (6.0, 3.0), (6.0, 0.0)]


@pytest.mark.skipif(not FROM_2_14, reason="before torch 2.14 a backend written in Python serves all devices")
def test_nexar_serves_one_device_of_a_mixed_group(tmp_path):
    def task(rank, size):
        return total(), [dist.group.WORLD._get_backend(torch.device(name)).name() for name in ("cpu", "cuda")]

    assert on_ranks(tmp_path, 2, task, backend="cpu:nexar,cuda:gloo") == [(3.0, ["nexar", "gloo"])] * 2


def test_a_call_that_waits_too_long_says_who_has_not_come(tmp_path):
    def task(rank, size):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
        if rank:
            dist.barrier()
            return None
        with pytest.raises(nexar.CollectiveTimeout) as caught:
            dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()
        return str(caught.value)

    assert "rank 1" in on_ranks(tmp_path, 2, task)[0]


@pytest.mark.skipif(not FROM_2_14, reason="before torch 2.14 torch checks only backends written in C++")
def test_the_detailed_debug_mode_checks_our_calls(tmp_path):
    def task(rank, size):
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
        dist.init_process_group("nexar", init_method=f"file://{tmp_path}/detail", rank=rank, world_size=size)
        found = total()
        with pytest.raises(RuntimeError, match="Detected mismatch"):
            dist.all_reduce(torch.zeros(2 + rank))
        return found

    assert on_ranks(tmp_path, 2, task, initialise=False) == [3.0, 3.0]


def test_what_rank_0_cannot_open_is_reported_to_the_others(tmp_path):
    def task(rank, size):
        if rank == 0:
            os.environ["NEXAR_TRANSPORTS"] = "shm"  # which cannot reach a seed
            os.environ["NEXAR_BIND"] = "203.0.113.1"  # and no address of this machine
        with pytest.raises(nexar.NexarError) as caught:
            dist.init_process_group("nexar", init_method=f"file://{tmp_path}/broken", rank=rank, world_size=size)
        return str(caught.value)

    _, second = on_ranks(tmp_path, 2, task, initialise=False)
    assert "rank 0 could not open the cluster" in second
