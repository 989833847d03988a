"""What the others see when a rank dies in the middle of training, and how they go on."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nexar
from tests.torch.processes import Died, on_ranks

VICTIM = 2
LAST_STEP = 5


def test_the_others_get_the_typed_error_out_of_backward(tmp_path):
    note = tmp_path / "died"

    def task(rank, size):
        wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), bucket_cap_mb=0.01)
        try:
            for step in range(1000):
                if rank == VICTIM and step == LAST_STEP:
                    _die(note)
                wrapped(torch.ones(4, 64)).sum().backward()
        except nexar.MembershipChanged as change:
            return time.monotonic() - float(note.read_text()), sorted(change.lost), change.communicator.size
        return None

    answers = on_ranks(tmp_path, 4, task)
    assert isinstance(answers[VICTIM], Died)
    assert answers[VICTIM].code == -signal.SIGKILL
    survivors = [answer for rank, answer in enumerate(answers) if rank != VICTIM]
    assert [answer[1:] for answer in survivors] == [([VICTIM], 3)] * 3
    assert max(answer[0] for answer in survivors) < 3.0, survivors  # about 0.1 on a machine that is not busy


def test_a_call_that_has_failed_before_its_future_is_asked_for_has_its_type_out_of_backward_too(tmp_path):
    def late(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        with pytest.raises(nexar.CollectiveMismatch):
            work.wait()
        return work.get_future().then(lambda future: future.value()[0])

    def task(rank, size):
        wrapped = DistributedDataParallel(nn.Linear(8, 1))
        wrapped.register_comm_hook(None, late)
        loss = wrapped(torch.ones(4, 8)).sum()
        if rank:
            dist.all_reduce(torch.ones(3))  # not what the other one does
            return None
        try:
            loss.backward()
        except Exception as error:  # noqa: BLE001  # to be looked at
            return type(error).__name__
        return "nothing was raised"

    def tolerant(rank, size):
        try:
            return task(rank, size)
        except nexar.CollectiveMismatch:
            return None

    assert on_ranks(tmp_path, 2, tolerant)[0] == "CollectiveMismatch"


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="before torch 2.14 there is no shrink_group for the CPU")
def test_the_others_shrink_the_group_and_go_on(tmp_path):
    """Without anything of nexar's: what torch offers is enough."""

    def task(rank, size):
        tensor = torch.ones(1)
        if rank == VICTIM:
            _die(tmp_path / "died")
        with pytest.raises(nexar.MembershipChanged):
            dist.all_reduce(tensor)
        dist.shrink_group([VICTIM])
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return tensor.item(), dist.get_world_size()

    answers = on_ranks(tmp_path, 4, task)
    assert [answer for rank, answer in enumerate(answers) if rank != VICTIM] == [(3.0, 3)] * 3


def test_a_rank_that_raises_is_named_with_its_traceback(tmp_path):
    def task(rank, size):
        if rank == 1:
            try:
                raise ValueError("a very bad batch")
            except ValueError as error:
                group = dist.group.WORLD
                backend = group if torch.__version__ < (2, 14) else group._get_backend(torch.device("cpu"))
                backend.communicator.__exit__(ValueError, error, error.__traceback__)
                return ""
        try:
            dist.all_reduce(torch.ones(1))
        except nexar.MembershipChanged as change:
            return str(change.lost)
        return ""

    assert "a very bad batch" in on_ranks(tmp_path, 2, task)[0]


def _die(note: Path) -> None:
    note.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
