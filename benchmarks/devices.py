"""What does a collective on a CUDA tensor cost, beside one on a host array of the same size?

    python benchmarks/devices.py                # needs torch and a GPU

Two ranks as threads of one process. `copies` is what staging takes: out of the device and back into it, through pinned
memory that is used again; `tensor.cpu()` beside it makes memory anew, as one would by hand. The last lines are 200
tensors, one by one and in buckets. Medians; candidates take turns. Prints, asserts nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import nexar
from nexar.arrays.operand import adapt
from nexar.communicator.communicator import Communicator

SIZES = [1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26, 1 << 28]


def main() -> None:
    """Measure and print."""
    try:
        import torch  # noqa: PLC0415 - who has none is told so
    except ImportError:
        sys.exit("torch is not installed in this environment")
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU")
    console = Console()
    console.print(copies(torch))
    with nexar.local(2) as ranks, ThreadPoolExecutor(len(ranks)) as pool:
        console.print(collectives(torch, ranks, pool))
        console.print(many(torch, ranks, pool))


def copies(torch: Any) -> Table:
    """Of one rank, without a collective."""
    table = Table("bytes", "staged, both ways", "by hand, both ways", title="copies, ms", pad_edge=False)
    for size in SIZES:
        tensor = torch.ones(size // 4, device="cuda")

        def staged(tensor: Any = tensor) -> None:
            operand = adapt(tensor, writable=True)
            operand.commit()
            torch.cuda.current_stream().synchronize()

        def by_hand(tensor: Any = tensor) -> None:
            tensor.copy_(tensor.cpu())
            torch.cuda.current_stream().synchronize()

        table.add_row(f"{size:,}", *(f"{seconds * 1e3:.3f}" for seconds in medians([staged, by_hand])))
    return table


def collectives(torch: Any, ranks: Any, pool: Executor) -> Table:
    """all_reduce of two ranks."""
    table = Table("bytes", "CUDA tensor", "host array", title="all_reduce, two threads, ms", pad_edge=False)
    for size in SIZES[:-1]:
        tensors = [torch.ones(size // 4, device="cuda") for _ in ranks]
        arrays = [np.ones(size // 4, np.float32) for _ in ranks]
        both = medians(
            [run(pool, ranks, each, Communicator.all_reduce, torch) for each in (tensors, arrays)], seconds=1.0
        )
        table.add_row(f"{size:,}", *(f"{seconds * 1e3:.3f}" for seconds in both))
    return table


def many(torch: Any, ranks: Any, pool: Executor) -> Table:
    """200 tensors of 64 KiB."""
    table = Table("200 × 65,536 bytes", "ms", title="many tensors, two threads", pad_edge=False)
    tensors = [[torch.ones(1 << 14, device="cuda") for _ in range(200)] for _ in ranks]

    def one_by_one(comm: Any, mine: Any) -> None:
        for each in mine:
            comm.all_reduce(each)

    ways = {"all_reduce of each": one_by_one, "all_reduce_bucketed": Communicator.all_reduce_bucketed}
    found = medians([run(pool, ranks, tensors, way, torch) for way in ways.values()], seconds=2.0)
    for name, seconds in zip(ways, found, strict=True):
        table.add_row(name, f"{seconds * 1e3:.2f}")
    return table


def run(pool: Executor, ranks: Any, values: Any, task: Callable[[Any, Any], object], torch: Any) -> Callable[[], None]:
    """A task on every rank, until its results are on the device."""

    def once() -> None:
        list(pool.map(task, ranks, values))
        torch.cuda.synchronize()

    return once


def medians(candidates: list[Callable[[], None]], seconds: float = 0.4) -> list[float]:
    """Of each, in turns, for so many seconds together."""
    found: list[list[float]] = [[] for _ in candidates]
    for candidate in candidates:
        candidate()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found[0]) < 5:
        for candidate, taken in zip(candidates, found, strict=True):
            begun = time.perf_counter()
            candidate()
            taken.append(time.perf_counter() - begun)
    return [statistics.median(taken) for taken in found]


if __name__ == "__main__":
    main()
