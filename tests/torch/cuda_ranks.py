"""Ranks with CUDA tensors, two of which may share a GPU:  python -m tests.torch.cuda_ranks

Every collective against what it means, DDP against one process that has all the data, and how fast 64 MB are reduced
beside how fast they are copied. Prints one line of JSON.
"""

import json
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZE = 2


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (f"{folder}",), SIZE)
        with open(f"{folder}/found") as file:
            sys.stdout.write(file.read() + "\n")


def rank_main(rank: int, folder: str) -> None:
    if "nexar" not in dist.Backend.backend_list:  # where nexar is not installed, but lies on the path
        import nexar_torch_hook

        nexar_torch_hook.register()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nexar", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    found = {"torch": torch.__version__, "right": collectives(rank), "ddp": ddp(rank), **speed()}
    dist.barrier()
    if rank == 0:
        with open(f"{folder}/found", "w") as file:
            file.write(json.dumps(found))
    dist.destroy_process_group()


def collectives(rank: int) -> dict[str, bool]:
    """Each is right on this rank."""
    return {name: bool(check(rank)) for name, check in CHECKS.items()}


def values(rank: int) -> torch.Tensor:
    return torch.arange(6.0, device="cuda").reshape(3, 2) + 10 * rank


def all_reduce(rank: int) -> bool:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = values(rank)
        for _ in range(20):
            tensor = tensor * 1.0  # work that the copy has to wait for
        dist.all_reduce(tensor)
        doubled = tensor * 2
    side.synchronize()
    return torch.equal(doubled, 2 * (values(0) + values(1)))


def all_reduce_async(rank: int) -> bool:
    tensors = [values(rank) * factor for factor in range(1, 9)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    total = values(0) + values(1)
    return all(torch.equal(tensor, total * factor) for factor, tensor in enumerate(tensors, 1))


def all_reduce_in_pieces(rank: int) -> bool:
    tensor = (torch.arange(7 << 20, device="cuda") % 1000 + rank).to(torch.float32)
    twice = 2 * tensor + (1 if rank == 0 else -1)
    dist.all_reduce(tensor)
    later = tensor.clone()
    torch.cuda.current_stream().synchronize()
    return torch.equal(later, twice)


def broadcast(rank: int) -> bool:
    tensor = values(rank).to(torch.bfloat16)
    dist.broadcast(tensor, 1)
    return torch.equal(tensor, values(1).to(torch.bfloat16))


def all_gather(rank: int) -> bool:
    room, single = [torch.zeros(3, 2, device="cuda") for _ in range(SIZE)], torch.zeros(6, 2, device="cuda")
    dist.all_gather(room, values(rank))
    dist.all_gather_into_tensor(single, values(rank))
    whole = torch.cat([values(0), values(1)])
    return torch.equal(torch.cat(room), whole) and torch.equal(single, whole)


def gather_and_scatter(rank: int) -> bool:
    room = [torch.zeros(3, 2, device="cuda") for _ in range(SIZE)] if rank == 0 else None
    dist.gather(values(rank), room, 0)
    back = torch.zeros(3, 2, device="cuda")
    dist.scatter(back, room, 0)
    return torch.equal(back, values(rank))


def reduce_scatter(rank: int) -> bool:
    given, room, single = [values(0) + rank, values(1) + rank], torch.zeros(3, 2, device="cuda"), values(0)
    dist.reduce_scatter(room, given)
    dist.reduce_scatter_tensor(single, torch.cat(given))
    wanted = 2 * values(rank) + 1
    return torch.equal(room, wanted) and torch.equal(single, wanted)


def all_to_all(rank: int) -> bool:
    given = [torch.full((rank + other + 1,), float(rank), device="cuda") for other in range(SIZE)]
    room = [torch.zeros(rank + other + 1, device="cuda") for other in range(SIZE)]
    dist.all_to_all(room, given)
    single = torch.zeros(4, device="cuda")
    dist.all_to_all_single(single, torch.arange(4.0, device="cuda") + 10 * rank)
    expected = torch.tensor([2.0 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank], device="cuda")
    return torch.equal(torch.cat(room).unique(), torch.tensor([0.0, 1.0], device="cuda")) and torch.equal(
        single, expected
    )


def messages(rank: int) -> bool:
    tensor = values(rank)
    if rank == 0:
        dist.send(tensor, 1)
        return True
    source = dist.recv(tensor)
    return source == 0 and torch.equal(tensor, values(0))


CHECKS = {
    each.__name__: each
    for each in (
        all_reduce, all_reduce_async, all_reduce_in_pieces, broadcast, all_gather, gather_and_scatter, reduce_scatter,
        all_to_all, messages,
    )
}  # fmt: skip


def ddp(rank: int) -> float:
    """How far the weights are from those of one process that has all the data, at most."""
    torch.manual_seed(0)
    data = torch.randn(5, 2 * 16, 8, device="cuda")
    wrapped = DistributedDataParallel(_net(), bucket_cap_mb=1)
    _train(wrapped, [batch[16 * rank : 16 * (rank + 1)] for batch in data])
    alone = _net()
    _train(alone, list(data))
    pairs = zip(wrapped.parameters(), alone.parameters(), strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 1)).cuda()


def _train(model: nn.Module, batches: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()
        optimizer.step()


def speed() -> dict[str, float]:
    """Milliseconds, for 64 MB: both copies through pinned memory, and an all_reduce on the CPU and on the GPU."""
    tensor = torch.zeros(16 << 20, device="cuda")
    pinned, host = torch.empty(16 << 20, pin_memory=True), torch.zeros(16 << 20)

    def copies() -> None:
        pinned.copy_(tensor, non_blocking=True)
        tensor.copy_(pinned, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    def reduced() -> None:
        dist.all_reduce(tensor)
        torch.cuda.current_stream().synchronize()

    return {
        "copies_ms": _best(copies),
        "all_reduce_cpu_ms": _best(lambda: dist.all_reduce(host)),
        "all_reduce_cuda_ms": _best(reduced),
    }


def _best(task: object) -> float:
    times = []
    for _ in range(12):
        dist.barrier()
        began = time.perf_counter()
        task()  # type: ignore[operator]
        times.append(time.perf_counter() - began)
    return round(1e3 * sorted(times)[len(times) // 2], 3)


if __name__ == "__main__":
    main()
