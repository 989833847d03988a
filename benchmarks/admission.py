"""Measures the seed's CPU time per joiner in `cluster/decisions/admission`, for several cluster sizes.

    python benchmarks/admission.py
    python benchmarks/admission.py --sizes 100,1000,4000 --repetitions 9

A figure is the time of a whole formation divided by its size: the lowest of interleaved repetitions. The ratio is to
the smallest cluster.
"""

from __future__ import annotations

import argparse
import gc
import time

from rich.console import Console
from rich.table import Table

from nexar.cluster.decisions.admission import Admission
from nexar.cluster.decisions.admission_events import (
    AdmissionEvent,
    ConnectionOpened,
    HelloReceived,
    JoinerReady,
    JoinRequested,
    RanksRequested,
)
from nexar.cluster.membership import PinnedNode
from nexar.security.proof import NONCE_BYTES, PROOF_BYTES
from nexar.wire.hello import Hello
from nexar.wire.join import JoinRequest, ReserveRanks

PER_HOST = 8
RANKS_FROM = ("seed", "environment", "launcher")
_PROOF = bytes(PROOF_BYTES)
_SEED = PinnedNode(1_000_000, bytes(32))


def main() -> None:
    """Measures and prints."""
    options = parse()
    table = Table(title="CPU per joiner", pad_edge=False)
    table.add_column("ranks come from the")
    for size in options.sizes:
        table.add_column(f"{size}", justify="right")
    table.add_column(f"{options.sizes[-1]} : {options.sizes[0]}", justify="right")
    for origin in RANKS_FROM:
        costs = measure(origin, options.sizes, options.repetitions)
        cells = [f"{1e6 * cost:.2f} µs" for cost in costs]
        table.add_row(origin, *cells, f"{costs[-1] / costs[0]:.2f}")
    Console().print(table)


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], default=[100, 1000])
    parser.add_argument("--repetitions", type=int, default=7)
    return parser.parse_args()


def measure(origin: str, sizes: list[int], repetitions: int) -> list[float]:
    """CPU seconds per joiner for each size."""
    samples = [[cost(origin, size) for size in sizes] for _ in range(repetitions)]
    return [min(column) for column in zip(*samples, strict=True)]


def cost(origin: str, size: int) -> float:
    """CPU seconds per joiner. Small clusters are formed several times, so that all sizes take equally long."""
    clusters = max(1, 2000 // size)
    formations = [formation_events(origin, size) for _ in range(clusters)]
    machines = [Admission("cluster", size, started=0.0, formation_timeout=60.0, seed=_SEED) for _ in range(clusters)]
    gc.collect()
    begin = time.process_time()
    for machine, events in zip(machines, formations, strict=True):
        for event in events:
            machine.step(event, 1.0)
    spent = time.process_time() - begin
    assert all(machine.membership is not None for machine in machines)
    return spent / (size * clusters)


def formation_events(origin: str, size: int) -> list[AdmissionEvent]:
    """All events of a formation of this size; a launcher's own events count for its children."""
    events: list[AdmissionEvent] = []
    for first in range(0, size if origin == "launcher" else 0, PER_HOST):
        reserve = ReserveRanks(_PROOF, b"request", f"host-{first // PER_HOST}", min(PER_HOST, size - first))
        events += opening_events(size + first, "launcher")
        events.append(RanksRequested(size + first, reserve, True, fingerprint(size + first)))
    for number in range(size):
        events += opening_events(number, "candidate")
        events.append(JoinRequested(number, join_request(origin, size, number), True, fingerprint(number)))
        events.append(JoinerReady(number))
    return events


def opening_events(connection: int, role: str) -> list[AdmissionEvent]:
    """The events before the proof."""
    hello = Hello(1 + connection, "launcher" if role == "launcher" else "candidate", frozenset(), bytes(NONCE_BYTES))
    return [ConnectionOpened(connection, f"10.0.0.1:{connection}"), HelloReceived(connection, hello)]


def join_request(origin: str, size: int, number: int) -> JoinRequest:
    """A join request with three addresses. Ranks of the environment come in an order with many gaps."""
    port = 1 + number
    addresses = {"quic": (f"10.0.0.1:{port}", f"[fd00::1]:{port}"), "tls": (f"10.0.0.1:{port}",)}
    first = number // PER_HOST * PER_HOST
    rank = {"seed": None, "environment": scattered(number, size), "launcher": number}[origin]
    launcher = 1 + size + first if origin == "launcher" else 0
    return JoinRequest(_PROOF, b"request", f"host-{number // PER_HOST}", addresses, rank, launcher)


def scattered(number: int, size: int) -> int:
    """Even ranks first, then odd ones."""
    half = (size + 1) // 2
    return 2 * number if number < half else 2 * (number - half) + 1


def fingerprint(number: int) -> bytes:
    """Any 32 bytes."""
    return number.to_bytes(32, "big")


if __name__ == "__main__":
    main()
