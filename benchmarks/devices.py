"""Measures collectives on CUDA tensors beside host arrays of the same size.

    python benchmarks/devices.py                # needs torch and a GPU

`copies`: staging out of the device and back through reused pinned memory, beside `tensor.cpu()`, which allocates. Then
two processes that share the GPU: `all_reduce` until the result is on the device, and 200 tensors, one by one and
bucketed. Medians of the slower rank, interleaved.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import nexar
from nexar.arrays.operand import adapt

SIZES = [1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26, 1 << 28]
ROUNDS = 30


def main() -> None:
    """Measures and prints."""
    try:
        import torch  # noqa: PLC0415 - reported if missing
    except ImportError:
        sys.exit("torch is not installed in this environment")
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU")
    console = Console()
    console.print(copies(torch))
    table = Table("bytes", "CUDA tensor", "host array", title="all_reduce, two processes, ms", pad_edge=False)
    for size, found in zip(SIZES, slower(nexar.spawn(collectives, 2)), strict=True):
        table.add_row(f"{size:,}", *found)
    console.print(table)
    table = Table("200 × 65,536 bytes", "one by one", "bucketed", title="two processes, ms", pad_edge=False)
    for kind, found in zip(("CUDA tensors", "host arrays"), slower(nexar.spawn(many, 2)), strict=True):
        table.add_row(kind, *found)
    console.print(table)


def slower(ranks: Sequence[Sequence[Sequence[float]]]) -> list[list[str]]:
    """The slower of two ranks, line by line, in milliseconds."""
    return [[f"{max(pair) * 1e3:.3f}" for pair in zip(*lines, strict=True)] for lines in zip(*ranks, strict=True)]


def copies(torch: Any) -> Table:
    """Copies of one rank, without a collective."""
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


def collectives(comm: Any) -> list[list[float]]:
    """For each size: a CUDA tensor and a host array."""
    import torch  # noqa: PLC0415

    found = []
    for size in SIZES:
        tensor, array = torch.ones(size // 4, device="cuda"), np.ones(size // 4, np.float32)
        found.append(medians([partial(reduce, comm, tensor, torch), partial(reduce, comm, array, torch)], ROUNDS))
    return found


def reduce(comm: Any, array: Any, torch: Any) -> None:
    """Waits until the result is on the device."""
    comm.all_reduce(array)
    torch.cuda.current_stream().synchronize()


def many(comm: Any) -> list[list[float]]:
    """CUDA tensors, then host arrays."""
    import torch  # noqa: PLC0415

    tensors = [torch.ones(1 << 14, device="cuda") for _ in range(200)]
    arrays = [np.ones(1 << 14, np.float32) for _ in range(200)]

    def one_by_one(each: Any) -> None:
        for array in each:
            comm.all_reduce(array)
        torch.cuda.current_stream().synchronize()

    def bucketed(each: Any) -> None:
        comm.all_reduce_bucketed(each)
        torch.cuda.current_stream().synchronize()

    return [medians([partial(one_by_one, each), partial(bucketed, each)], ROUNDS) for each in (tensors, arrays)]


def medians(candidates: Sequence[Callable[[], None]], rounds: int = 100) -> list[float]:
    """The median of each, interleaved, after two rounds of warm-up. Equal counts on all ranks."""
    found: list[list[float]] = [[] for _ in candidates]
    for _ in range(rounds + 2):
        for candidate, taken in zip(candidates, found, strict=True):
            begun = time.perf_counter()
            candidate()
            taken.append(time.perf_counter() - begun)
    return [statistics.median(taken[2:]) for taken in found]


if __name__ == "__main__":
    main()
