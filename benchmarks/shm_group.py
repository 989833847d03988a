"""Measure `nexar_native.shm` directly: all_reduce of float32, sum, in place, among processes of this host.

    python benchmarks/shm_group.py [--ranks 2,4] [--sizes 8,64K,1M,16M,64M] [--chunk BYTES]

The time of a call is the median of rank 0, of the best of several batches. `wrong` counts wrong results.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from multiprocessing import Pipe

import numpy as np

from nexar.native import shm

SECONDS = 0.5  # of each batch
BATCHES = 3
LIMIT = 60.0
UNITS = {"K": 1 << 10, "M": 1 << 20}


def _size_of(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def _reduce(group, array: np.ndarray) -> None:
    done = group.all_reduce(array, "sum")
    if isinstance(done, shm.Pending):
        done = done.wait(LIMIT) == shm.DONE
    assert done


def _batch(group, array: np.ndarray, calls: int) -> float:
    """The median seconds of a call."""
    times = []
    clock = time.perf_counter
    for _ in range(calls):
        before = clock()
        _reduce(group, array)
        times.append(clock() - before)
    return statistics.median(times)


def _calls_of(group, array: np.ndarray) -> int:
    """As many calls as fill a batch, equal on all ranks: rank 0's estimate reaches the others through the region."""
    for _ in range(3):
        _reduce(group, array)
    before = time.perf_counter()
    for _ in range(3):
        _reduce(group, array)
    estimate = np.array([SECONDS * 3 / (time.perf_counter() - before)])
    reduce_max = group.all_reduce(estimate, "max")
    if isinstance(reduce_max, shm.Pending):
        assert reduce_max.wait(LIMIT) == shm.DONE
    return int(min(max(estimate[0], 5), 20_000))


def _measure(group, rank: int, ranks: int, size: int) -> tuple[float, int]:
    array = np.zeros(size // 4, np.float32)
    calls = _calls_of(group, array)
    best = min(_batch(group, array, calls) for _ in range(BATCHES))
    array[:] = np.arange(len(array)) % 1000 + rank
    _reduce(group, array)
    wanted = ranks * (np.arange(len(array)) % 1000) + ranks * (ranks - 1) // 2
    return best, int((array != wanted).sum())


def _run(offer: str, rank: int, ranks: int, sizes: list[int], line) -> None:
    fast = (np.ndarray, 1, 0, (2, 0, 0, 0, 0, 0))
    group = shm.Group(shm.Region.open(offer, ranks), rank, fast=fast)
    for size in sizes:
        line.send(_measure(group, rank, ranks, size))
    line.recv()
    group.close()


def _start(region, rank: int, sizes: list[int]):
    line, theirs = Pipe()
    if os.fork() == 0:
        _run(region.offer, rank, region.ranks, sizes, theirs)
        os._exit(0)
    return line


def _row(ranks: int, size: int, results: list[tuple[float, int]]) -> str:
    seconds, wrong = results[0][0], sum(each[1] for each in results)
    rate = 2 * (ranks - 1) / ranks * size / seconds / 1e9
    return f"{ranks:5} {size:10} {seconds * 1e6:12.2f} {rate:8.2f} {wrong:6}"


def main() -> int:
    """Print a row for each number of ranks and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--sizes", default="8,64K,1M,16M,64M")
    parser.add_argument("--chunk", type=_size_of, default=0, help="bytes of a slot; default: by the number of ranks")
    given = parser.parse_args()
    sizes = [_size_of(text) for text in given.sizes.split(",")]
    print(f"{'ranks':>5} {'bytes':>10} {'µs':>12} {'GB/s':>8} {'wrong':>6}")
    for ranks in map(int, given.ranks.split(",")):
        region = shm.Region.create(ranks, given.chunk)
        lines = [_start(region, rank, sizes) for rank in range(ranks)]
        for size in sizes:
            print(_row(ranks, size, [line.recv() for line in lines]), flush=True)
        for line in lines:
            line.send(None)
        for _ in lines:
            os.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
