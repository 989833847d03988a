"""Four processes train one model with DDP. The only word of nexar in it is the name of the backend.

    nexar run -n 4 examples/torch_ddp.py        or        torchrun --nproc-per-node 4 examples/torch_ddp.py

Put another name there ("gloo") and the same numbers come out.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 60


def main() -> None:
    """What each process does."""
    torch.set_num_threads(1)
    dist.init_process_group(os.environ.get("BACKEND", "nexar"))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(dist.get_rank())  # each process has its own
    for step in range(STEPS):
        inputs = torch.randn(32, 16, generator=data)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # here gradients are averaged, while the next ones are computed
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
