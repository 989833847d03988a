"""Four processes train one model with DDP. Only the name of the backend refers to nexar.

    nexar run -n 4 examples/torch_ddp.py        or        torchrun --nproc-per-node 4 examples/torch_ddp.py

Set BACKEND=gloo to compare: the numbers are the same.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 60


def main() -> None:
    """Run one process."""
    torch.set_num_threads(1)
    dist.init_process_group(os.environ.get("BACKEND", "nexar"))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(dist.get_rank())  # different data on each rank
    for step in range(STEPS):
        inputs = torch.randn(32, 16, generator=data)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # DDP averages gradients while backward computes the next ones
        optimizer.step()
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1}: {dist.get_world_size()} ranks, loss {loss.item():.3f}")
    mine = torch.cat([each.detach().flatten() for each in model.parameters()])
    most, least = mine.clone(), mine.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    if dist.get_rank() == 0:
        print(f"the same model on all ranks: {torch.equal(most, least)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
