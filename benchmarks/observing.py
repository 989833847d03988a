"""Measures what observation costs a call.

    python benchmarks/observing.py
    python benchmarks/observing.py --ranks 4 --transports quic --rounds 200

An 8-byte all_reduce on clusters that differ only in what is observed: nothing (no status reports either), status
reports to the seed (the default), metrics under constant scraping, a trace. The clusters exist at the same time and
take turns, block by block, so that other load affects all alike; idle ones wait on a pipe. The cost is the median
difference to the first cluster's block of the same round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import nexar
from nexar.cluster import seed_session
from nexar.observe import metrics

NEVER = 1e9
KINDS = ("nothing", "status reports", "metrics", "trace")


def rank_main(pipe: Connection, ticket: str, kind: str, settings: dict[str, Any]) -> None:
    """One rank: makes as many calls as requested and returns their mean time."""
    if kind == "nothing":
        seed_session.STATUS_INTERVAL = NEVER  # type: ignore[misc]
    scraped: list[str] = []
    if kind == "metrics":
        scraped = _remember_addresses()
    with nexar.connect(ticket, **settings) as comm, _scraping(scraped):
        number = np.ones(1)
        pipe.send(comm.rank)
        while count := pipe.recv():
            comm.barrier()
            began = time.perf_counter()
            for _ in range(count):
                comm.all_reduce(number, op="max")
            pipe.send((time.perf_counter() - began) / count)


def _remember_addresses() -> list[str]:
    """Collects the URLs at which this process serves metrics."""
    found: list[str] = []
    opened = metrics.open_metrics

    def open_and_tell(*arguments: Any) -> metrics.Metrics:
        made = opened(*arguments)
        found.append(made.url)
        return made

    metrics.open_metrics = open_and_tell
    return found


@contextmanager
def _scraping(urls: list[str]) -> Iterator[None]:
    """Five times as often as Prometheus would."""
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(1.0):
            for url in urls:
                with urllib.request.urlopen(url, timeout=10) as answer:
                    answer.read()

    thread = threading.Thread(target=scrape, daemon=True)
    if urls:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if urls:
            thread.join()


class Cluster:
    """The ranks of one kind."""

    def __init__(self, stack: ExitStack, kind: str, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        seed = stack.enter_context(nexar.Seed("127.0.0.1:0", options.ranks))
        settings: dict[str, Any] = {"transports": tuple(options.transports.split(","))}
        if kind == "metrics":
            settings["metrics_port"] = 0
        if kind == "trace":
            settings["trace_dir"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="nexar-observing-"))
        self._pipes: list[Connection] = []
        for _ in range(options.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(theirs, seed.ticket, kind, settings))
            process.start()
            stack.callback(process.join)
            self._pipes.append(ours)
        for pipe in self._pipes:
            pipe.recv()
        stack.callback(self._end)

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.send(0)

    def block(self, calls: int) -> float:
        """Seconds per call on the slowest rank."""
        for pipe in self._pipes:
            pipe.send(calls)
        slowest: float = max(pipe.recv() for pipe in self._pipes)
        return slowest


def main() -> None:
    """Measures and prints."""
    options = parse()
    with ExitStack() as stack:
        clusters = {kind: Cluster(stack, kind, options) for kind in KINDS}
        for cluster in clusters.values():
            cluster.block(options.calls)
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(options.rounds):
            turn = number % len(KINDS)
            for kind in (*KINDS[turn:], *KINDS[:turn]):
                found[kind].append(clusters[kind].block(options.calls))
    show(found, options)


def show(found: dict[str, list[float]], options: argparse.Namespace) -> None:
    """One row per kind."""
    title = f"8-byte all_reduce, {options.ranks} ranks, {options.transports}: {options.rounds} x {options.calls} calls"
    table = Table(title=title, pad_edge=False)
    for heading in ("watched", "median", "best", "cost, median", "cost, best"):
        table.add_column(heading, justify="left" if heading == "watched" else "right")
    base = found[KINDS[0]]
    for kind, times in found.items():
        cost = median(one - other for one, other in zip(times, base, strict=True))
        cells = [median(times), min(times), cost, min(times) - min(base)]
        table.add_row(kind, *(f"{1e6 * each:.2f} µs" for each in cells))
    Console().print(table)


def parse() -> argparse.Namespace:
    """Parses the command pipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--transports", default="shm,tls")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=2000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
