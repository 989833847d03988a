"""Measures time, traffic and error of gradient compression.

    python benchmarks/compression.py
    python benchmarks/compression.py --count 25000000 --ranks 8 --repetitions 5

First the seconds of one thread to compress and to add one piece, beside NumPy's `partition` of the same array. Then the
bytes that a rank sends according to `comm.stats()`, and the error of one call without a residual, relative to the norm
of the exact sum, with ranks as threads on smaller arrays.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import nexar
from nexar.arrays.compression.base import Terms

COMPRESSORS: list[nexar.Compressor] = [
    nexar.NoCompression(), nexar.TopK(0.01), nexar.TopK(0.1), nexar.RandomK(0.01), nexar.RandomK(0.1), nexar.FP8(),
    nexar.FP8("e5m2"), nexar.Int8(),
]  # fmt: skip


def main() -> None:
    """Measures and prints."""
    options = parse()
    Console().print(times(options))
    Console().print(traffic(options))


def times(options: argparse.Namespace) -> Table:
    """The work of one rank."""
    count, array = options.count, gradient(options.count, 0)
    table = Table(title=f"float32[{count:,}], seconds of one thread (times np.partition)", pad_edge=False)
    for heading in ("", "compress", "add one piece"):
        table.add_column(heading, justify="left" if not heading else "right")
    reference = median(lambda: np.partition(array, count - max(1, count // 100)), options.repetitions)
    table.add_row("np.partition, 1 %", f"{reference:.3f} (1.0×)", "")
    for compressor in COMPRESSORS:
        seconds = times_of(compressor, array, options.repetitions)
        table.add_row(compressor.name, *(f"{each:.3f} ({each / reference:.1f}×)" for each in seconds))
    return table


def times_of(compressor: nexar.Compressor, array: NDArray[Any], repetitions: int) -> list[float]:
    """To compress it, and to add the result."""
    count, total = len(array), np.zeros_like(array)
    piece = compressor.compress(array, terms(count))
    return [
        median(lambda: compressor.compress(array, terms(count)), repetitions),
        median(lambda: compressor.add(piece, total, terms(count)), repetitions),
    ]


def traffic(options: argparse.Namespace) -> Table:
    """Traffic and error of all ranks."""
    count, ranks = min(options.count, 1_000_000), options.ranks
    table = Table(title=f"float32[{count:,}] on {ranks} ranks", pad_edge=False)
    for heading in ("", "MB that a rank sends", "of all_reduce", "error of one call"):
        table.add_column(heading, justify="left" if not heading else "right")
    arrays = [gradient(count, rank) for rank in range(ranks)]
    exact = np.sum(arrays, axis=0, dtype=float)
    with nexar.local(ranks) as world, ThreadPoolExecutor(ranks) as pool:
        dense, _ = run(world, pool, lambda comm: comm.all_reduce(arrays[comm.rank].copy(), algorithm="ring"))
        table.add_row("all_reduce", f"{dense / 1e6:.3f}", "100.0%", "0")
        for compressor in COMPRESSORS:
            sent, found = run(world, pool, reducing(compressor, arrays))
            error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
            table.add_row(compressor.name, f"{sent / 1e6:.3f}", f"{sent / dense:.1%}", f"{error:.2g}")
    return table


def reducing(compressor: nexar.Compressor, arrays: list[NDArray[Any]]) -> Callable[[nexar.Communicator], NDArray[Any]]:
    """A task of one call."""

    def task(comm: nexar.Communicator) -> NDArray[Any]:
        found: NDArray[Any] = comm.all_reduce_compressed(arrays[comm.rank].copy(), compressor)
        return found

    return task


def run(
    world: list[nexar.Communicator], pool: ThreadPoolExecutor, task: Callable[[nexar.Communicator], NDArray[Any]]
) -> tuple[float, NDArray[Any]]:
    """Bytes sent by the busiest rank, and the result."""
    before = [sent_by(comm) for comm in world]
    results = list(pool.map(task, world))
    return max(sent_by(comm) - sent for comm, sent in zip(world, before, strict=True)), results[0]


def sent_by(comm: nexar.Communicator) -> float:
    """Payload bytes so far."""
    return float(sum(link["bytes_sent"] for link in comm.stats()["links"].values()))


def gradient(count: int, seed: int) -> NDArray[Any]:
    """Like gradients: centered at zero, a few values much larger than most."""
    random = np.random.default_rng(seed)
    drawn = random.standard_normal(count, np.float32)
    return drawn * np.abs(random.standard_normal(count, np.float32))


def terms(count: int) -> Terms:
    """Terms without state between calls."""
    return Terms(count, np.dtype(np.float32), 1, feedback=False)


def median(task: Callable[[], object], repetitions: int) -> float:
    """Of the CPU time of this thread, which other load hardly affects."""
    found = []
    for _ in range(repetitions):
        begin = time.thread_time()
        task()
        found.append(time.thread_time() - begin)
    return statistics.median(found)


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="time, traffic and error of compressed gradients")
    parser.add_argument("--count", type=int, default=25_000_000, help="elements")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
