"""Measures what the receive buffer pool saves, and what each profile keeps.

    python benchmarks/buffer_pool.py
    python benchmarks/buffer_pool.py --rounds 20

Messages that arrive before their receive wait in pooled memory. The first table takes a burst of buffers, fills each
once and releases all. The second sends before the other rank receives, with two ranks as threads, for each
`buffer_profile`. `none` keeps no memory. Medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

import nexar
from nexar.transport.buffer_pool import TIER_BYTES, BufferPool, PoolStats

KIB, MIB = 1 << 10, 1 << 20
PROFILES: Mapping[str, Any] = {
    "training": "training",
    "inference": "inference",
    "none": tuple((size, 0) for size in TIER_BYTES),
}


class Load(NamedTuple):
    """A burst: how many buffers of which size."""

    name: str
    burst: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> list[int]:
        return [size for count, size in self.burst for _ in range(count)]


LOADS = (
    Load("small messages: 200 × 48 KiB", ((200, 48 * KIB),)),
    Load("requests: 24 × 1 MiB", ((24, MIB),)),
    Load("gradients: 8 × 25 MiB", ((8, 25 * MIB),)),
    Load("parameters: 3 × 200 MiB", ((3, 200 * MIB),)),
    Load("mixed: 64 × 48 KiB, 8 × 4 MiB, 2 × 60 MiB", ((64, 48 * KIB), (8, 4 * MIB), (2, 60 * MIB))),
)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    console = Console()
    console.print(bursts(rounds))
    console.print(exchanges(rounds))


def bursts(rounds: int) -> Table:
    """The pool alone."""
    table = Table("burst", "profile", title="taken, filled and released", pad_edge=False)
    for heading in ("ms for a burst", "hit rate", "by size", "kept after it, MiB"):
        table.add_column(heading, justify="right")
    for load in LOADS:
        pools = {name: BufferPool.of_profile(profile) for name, profile in PROFILES.items()}
        found = in_turns({name: partial(burst, pool, load) for name, pool in pools.items()}, rounds)
        for name, seconds in found.items():
            stats = pools[name].stats()
            kept = f"{stats.free_bytes / MIB:,.0f}"
            table.add_row(load.name, name, f"{seconds * 1e3:.2f}", f"{stats.hit_rate:.0%}", by_size(stats), kept)
            pools[name].clear()
        table.add_section()
    return table


def burst(pool: BufferPool, load: Load) -> None:
    """Takes all buffers before it releases one, so none is used twice."""
    leases = [pool.take(size) for size in load.sizes]
    for lease in leases:
        np.frombuffer(lease.view, np.uint8)[:] = 1
    for lease in leases:
        lease.release()


def exchanges(rounds: int) -> Table:
    """Messages sent before they are received."""
    table = Table("messages", "profile", title="sent before they are received, two threads", pad_edge=False)
    for heading in ("GB/s", "hit rate", "by size"):
        table.add_column(heading, justify="right")
    for count, size in ((64, 48 * KIB), (8, 4 * MIB), (8, 25 * MIB)):
        with ExitStack() as undo:
            pool = undo.enter_context(ThreadPoolExecutor(2))
            worlds = {name: undo.enter_context(nexar.local(2, buffer_profile=each)) for name, each in PROFILES.items()}
            candidates = {name: partial(exchange, ranks, pool, count, size) for name, ranks in worlds.items()}
            found = in_turns(candidates, rounds)
            pools = {name: ranks[1]._group.router.pool.stats() for name, ranks in worlds.items()}
        for name, seconds in found.items():
            speed, stats = f"{count * size / seconds / 1e9:.2f}", pools[name]
            table.add_row(f"{count} × {size // KIB:,} KiB", name, speed, f"{stats.hit_rate:.0%}", by_size(stats))
        table.add_section()
    return table


def exchange(ranks: Any, pool: ThreadPoolExecutor, count: int, size: int) -> None:
    """The second rank receives the first message when the last one was sent."""
    data = np.ones(size, np.uint8)
    into = np.empty_like(data)

    def send(comm: Any) -> None:
        sent = [comm.start.send(data, 1, tag=number) for number in range(count)]
        comm.send(data[:1], 1, tag=count)
        nexar.wait_all(sent)

    def receive(comm: Any) -> None:
        comm.recv(source=0, tag=count)
        for number in range(count):
            comm.recv(into, source=0, tag=number)

    for done in [pool.submit(task, comm) for task, comm in zip((send, receive), ranks, strict=True)]:
        done.result()


def in_turns(candidates: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The median of each. The first round is ignored: all pools are empty then."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds + 1):
        for name, candidate in candidates.items():
            begun = time.perf_counter()
            candidate()
            found[name].append(time.perf_counter() - begun)
    return {name: statistics.median(taken[1:]) for name, taken in found.items()}


def by_size(stats: PoolStats) -> str:
    """Hit rates of the tiers used."""
    used = [tier for tier in stats.tiers if tier.hits or tier.misses]
    return ", ".join(f"{show(tier.size_bytes)} {tier.hit_rate:.0%}" for tier in used)


def show(size: int) -> str:
    """As a whole number of one unit."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


if __name__ == "__main__":
    main()
