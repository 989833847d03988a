"""What we change in torch where its default does not fit."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.torch.processes import on_ranks

RECORDS = hasattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS")


@pytest.mark.skipif(not RECORDS, reason="before torch 2.15 torch records nothing of backends it does not know")
def test_torch_leaves_the_record_of_calls_to_us_unless_it_is_asked(tmp_path):
    def task(rank, size):
        hooks = distributed_c10d._world.pg_flight_recorder_hooks
        unasked = len(hooks)
        recorder = distributed_c10d.FlightRecorderHook.attach(dist.group.WORLD, list(range(size)))
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        recorder.remove()
        return unasked, tensor.tolist()

    assert on_ranks(tmp_path, 2, task) == [(0, [2.0] * 3)] * 2


def test_a_call_that_was_waited_for_says_that_it_is_completed(tmp_path):
    def task(rank, size):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
        return work.is_completed(), work.get_future().value()[0].tolist()

    assert on_ranks(tmp_path, 2, task) == [(True, [2.0] * 3)] * 2
