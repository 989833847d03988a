"""What people train with: DDP and its hooks, join, ZeRO, FSDP, tensors in parts, checkpoints."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import nexar
from nexar.torch import CompressedGradients, communicator_of, compress
from tests.torch.curve import curve
from tests.torch.processes import on_ranks
from tests.torch.test_lifetimes import made_directly

STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(16, 8, generator=noise)
    return inputs, inputs.sum(1, keepdim=True)


def train(
    wrapped: nn.Module, rank: int, optimizer: torch.optim.Optimizer | None = None, steps: int = STEPS
) -> list[float]:
    optimizer = optimizer or torch.optim.SGD(wrapped.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        inputs, targets = batch(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(wrapped: nn.Module) -> bytes:
    return torch.cat([each.detach().flatten() for each in wrapped.parameters()]).numpy().tobytes()


@pytest.mark.parametrize("size", [2, 4])
def test_a_transformer_learns_what_it_learns_with_gloo_and_alike_on_all_ranks(tmp_path, size):
    (tmp_path / "gloo").mkdir()
    ours, theirs = on_ranks(tmp_path, size, curve), on_ranks(tmp_path / "gloo", size, curve, backend="gloo")
    assert len({found[1] for found in ours}) == 1, "not the same weights, bit for bit"
    for (losses, _), (expected, _) in zip(ours, theirs, strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("hook", ["fp16", "powersgd"])
def test_ddp_has_its_communication_hooks(tmp_path, hook):
    def task(rank, size):
        wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.001)
        if hook == "fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return train(wrapped, rank), weights(wrapped)

    answers = on_ranks(tmp_path, 2, task)
    assert answers[0][1] == answers[1][1]
    assert answers[0][0][-1] < answers[0][0][0]


@pytest.mark.parametrize("kind", list(dist.BuiltinCommHookType.__members__.values()), ids=str)
def test_ddp_has_the_hooks_that_torch_has_in_cpp(tmp_path, kind):
    def task(rank, size):
        wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.001)
        wrapped._register_builtin_comm_hook(kind)
        return train(wrapped, rank), weights(wrapped)

    answers = on_ranks(tmp_path, 2, task)
    assert answers[0][1] == answers[1][1]
    assert answers[0][0][-1] < answers[0][0][0]


@pytest.mark.parametrize("backend", ["nexar", "gloo"])
@pytest.mark.parametrize("kind", list(dist.BuiltinCommHookType.__members__.values()), ids=str)
def test_ddp_has_these_hooks_also_on_groups_that_torch_does_not_know_of(tmp_path, backend, kind):
    def task(rank, size):
        theirs = dist.ProcessGroupGloo(dist.FileStore(f"{tmp_path}/gloo", size), rank, size)
        group = made_directly(tmp_path, rank, size)  # also for Gloo: this is what replaces the hooks
        if backend == "gloo":
            group = dist.ProcessGroup(dist.FileStore(f"{tmp_path}/group", size), rank, size)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, theirs)
        wrapped = DistributedDataParallel(model(), process_group=group)
        wrapped._register_builtin_comm_hook(kind)
        return train(wrapped, rank), weights(wrapped)

    answers = on_ranks(tmp_path, 2, task, backend="gloo")
    assert answers[0][1] == answers[1][1]


def test_ranks_with_less_data_join_early(tmp_path):
    def task(rank, size):
        wrapped = DistributedDataParallel(nn.Linear(8, 1))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        with Join([wrapped]):
            train(wrapped, rank, optimizer, steps=STEPS + 2 * rank)
        return weights(wrapped)

    answers = on_ranks(tmp_path, 2, task)
    assert answers[0] == answers[1]


def test_zero_shards_the_optimizer(tmp_path):
    def task(rank, size):
        wrapped = DistributedDataParallel(model())
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01)
        losses = train(wrapped, rank, optimizer)
        return losses, weights(wrapped)

    answers = on_ranks(tmp_path, 2, task)
    assert answers[0][1] == answers[1][1]


def test_fsdp_shards_the_model_and_learns_what_ddp_learns(tmp_path):
    def plain(rank: int, size: int) -> list[float]:
        torch.manual_seed(7)
        wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
        return train(wrapped, rank)

    def sharded(rank: int, size: int) -> list[float]:
        torch.manual_seed(7)
        whole = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        mesh = init_device_mesh("cpu", (size,))
        for layer in (whole[0], whole[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(whole, mesh=mesh)
        return train(whole, rank)

    (tmp_path / "ddp").mkdir()
    expected, found = on_ranks(tmp_path / "ddp", 2, plain), on_ranks(tmp_path, 2, sharded)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_the_older_fsdp_resizes_what_it_has_gathered(tmp_path):
    def task(rank, size):
        torch.manual_seed(7)
        whole = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)), device_id=torch.device("cpu")
        )
        return train(whole, rank)

    losses = on_ranks(tmp_path, 2, task)
    assert all(each[-1] < each[0] for each in losses)


def test_tensors_are_cut_and_put_together(tmp_path):
    def task(rank, size):
        mesh = init_device_mesh("cpu", (size,))
        whole = torch.arange(24.0).reshape(6, 4)
        cut = distribute_tensor(whole, mesh, [Shard(0)])
        other = cut.redistribute(placements=[Shard(1)])
        product = cut.T @ cut  # a sum over the shards
        back = other.redistribute(placements=[Replicate()]).to_local()
        return torch.equal(back, whole), torch.allclose(product.full_tensor(), whole.T @ whole), cut.to_local().shape[0]

    assert on_ranks(tmp_path, 2, task) == [(True, True, 3), (True, True, 3)]


def test_a_checkpoint_is_written_and_read_by_all(tmp_path):
    folder: Path = tmp_path / "checkpoint"

    def task(rank, size):
        mesh = init_device_mesh("cpu", (size,))
        whole = torch.arange(8.0)
        checkpoint.save({"tensor": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=folder)
        read = {"tensor": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
        checkpoint.load(read, checkpoint_id=folder)
        return read["tensor"].full_tensor().tolist()

    assert on_ranks(tmp_path, 2, task) == [list(range(8))] * 2


@pytest.mark.parametrize("compressor", [nexar.TopK(0.2), nexar.FP8()], ids=["top_k", "fp8"])
def test_gradients_are_compressed_on_their_way_and_the_model_learns(tmp_path, compressor):
    def task(rank, size):
        wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.001)
        wrapped.register_comm_hook(CompressedGradients(compressor), compress)
        losses = train(wrapped, rank, steps=40)
        calls = communicator_of().stats()["operations"]
        return losses, weights(wrapped), sorted(calls)

    answers = on_ranks(tmp_path, 2, task)
    assert answers[0][1] == answers[1][1]
    assert answers[0][0][-1] < answers[0][0][0] / 3
    assert "all_reduce_compressed" in str(answers[0][2])
