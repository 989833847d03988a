"""DDP of a small transformer, step by step: python -m tests.torch.curve, in each rank, with what env:// asks for.

Trains it with nexar and then with Gloo, and prints one line of JSON: what this rank has seen of both.
"""

import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 32
LENGTH = 12
STEPS = 12


def curve(rank: int, size: int) -> tuple[list[float], str]:
    """The loss of each step on this rank, and what its weights are at the end, in a word."""
    torch.manual_seed(7)
    layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
    whole = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 1))
    wrapped = DistributedDataParallel(whole, bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.003)
    losses = []
    for step in range(STEPS):
        noise = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(8, LENGTH, WIDTH, generator=noise)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(inputs).squeeze(-1), inputs.mean(-1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    flat = torch.cat([each.detach().flatten() for each in wrapped.parameters()])
    return losses, hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, object] = {"rank": int(os.environ["RANK"])}
    for place, backend in enumerate(("nexar", "gloo")):
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + place)  # a store of its own for each
        dist.init_process_group(backend)
        found[backend] = curve(dist.get_rank(), dist.get_world_size())
        dist.barrier()  # gloo knows no other way to let all of them end well
        dist.destroy_process_group()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
