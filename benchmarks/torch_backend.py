"""Measures the torch backend beside Gloo.     .venv-torch/bin/python benchmarks/torch_backend.py

Ranks of this host reduce tensors of 8 bytes to 64 MB in three ways, interleaved in the same processes: with nexar
alone, through torch with nexar, and through torch with Gloo. Then DDP trains a small transformer with each backend.
Times are medians on rank 0. `--ranks 4` sets the number of ranks; `--hosts 2` puts half of them on another host
(network namespaces; root). NEXAR_* variables are passed on.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nexar.cli.bench.systems import BenchHost, opened_hosts
from nexar.torch import communicator_of

SIZES = [8, 1 << 10, 16 << 10, 128 << 10, 1 << 20, 8 << 20, 64 << 20]
Call = Callable[[], object]


def main() -> None:
    """Starts the ranks, or runs one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=9, help="turns that each way gets")
    parser.add_argument("--steps", type=int, default=10, help="of DDP, in each turn")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        _rank(arguments)
        return
    with opened_hosts(arguments.hosts, arguments.mtu) as hosts:
        ranks = [_start(rank, hosts, arguments.ranks) for rank in range(arguments.ranks)]
        for each in ranks:
            each.wait()


def _start(rank: int, hosts: Sequence[BenchHost], size: int) -> "subprocess.Popen[bytes]":
    here = size // len(hosts)
    host = hosts[rank // here]
    told = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % here, "LOCAL_WORLD_SIZE": here,
        "MASTER_ADDR": hosts[0].address, "MASTER_PORT": 29_400, "GLOO_SOCKET_IFNAME": host.interface,
        "NEXAR_HOST_ID": f"host-{rank // here}",
    }  # fmt: skip
    environment = {**os.environ, **{name: str(value) for name, value in told.items()}}
    return subprocess.Popen([*host.prefix, sys.executable, __file__, *sys.argv[1:], "--rank"], env=environment)


def _rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("nexar", timeout=timedelta(seconds=300))
    gloo = dist.new_group(backend="gloo")
    _say(
        f"{'size':>10}  {'native':>10}  {'through torch':>14}  {'of that torch':>13}  {'gloo':>10}  {'gloo / ours':>11}"
    )
    for size in SIZES:
        _reduce(size, gloo, arguments)
    _train(gloo, arguments)
    dist.destroy_process_group()


def _reduce(size: int, gloo: dist.ProcessGroup, arguments: argparse.Namespace) -> None:
    tensor = torch.zeros(max(1, size // 4))
    array, native = tensor.numpy(), communicator_of()
    repeats = max(2, min(300, (8 << 20) // size))
    found = _in_turns(
        [
            lambda: native.all_reduce(array),
            lambda: dist.all_reduce(tensor),
            lambda: dist.all_reduce(tensor, group=gloo),
        ],
        repeats,
        arguments.rounds,
    )
    ours, torchs, gloos = (1e6 * each for each in found)
    row = f"{size:>10}  {ours:>7.1f} µs  {torchs:>11.1f} µs  {torchs - ours:>10.1f} µs"
    _say(f"{row}  {gloos:>7.1f} µs  {gloos / torchs:>11.2f}")


def _train(gloo: dist.ProcessGroup, arguments: argparse.Namespace) -> None:
    losses = {}
    steps = {}
    for name, group in (("nexar", None), ("gloo", gloo)):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        model = DistributedDataParallel(nn.TransformerEncoder(layer, 4), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses[name] = []
        steps[name] = _step(model, optimizer, losses[name])
    times = _in_turns([steps["nexar"], steps["gloo"]], arguments.steps, arguments.rounds)
    drift = max(abs(a - b) / abs(b) for a, b in zip(losses["nexar"], losses["gloo"], strict=True))
    _say(f"\nDDP, {sum(p.numel() for p in model.parameters()) * 4 / 1e6:.1f} MB of gradients, per step:")
    _say(f"  nexar {1e3 * times[0]:.1f} ms, gloo {1e3 * times[1]:.1f} ms; losses differ by {drift:.1e} at most")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> Call:
    data = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        loss = model(torch.randn(4, 32, 128, generator=data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    return step


def _in_turns(ways: list[Call], repeats: int, rounds: int) -> list[float]:
    """The median seconds per call for each way. The first round is ignored."""
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for way, found in zip(ways, times, strict=True):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                way()
            if turn:
                found.append((time.perf_counter() - began) / repeats)
    return [statistics.median(found) for found in times]


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
