"""Two ranks exchange NumPy arrays over every transport that is available here.

    python examples/transports.py

For each transport:

1. Two processes form a cluster that uses only this transport. They verify each other's certificate. (The memory
   transport connects two threads of this process instead.)
2. Arrays of several types are sent and come back negated.
3. Round trips of 8 bytes and transfers of 16 MB are timed.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Column, Table

import nexar

TYPES = ("int8", "int32", "float32", "float64", "complex64")
LARGE_BYTES = 16 << 20
LARGE_ROUNDS = 8
PINGS = 2000

INTRODUCTION = """\
Transports: two ranks verify each other's certificates, exchange NumPy arrays
and check every element. Plain tcp carries large arrays only, and must be
enabled explicitly:
"""


class Transport(NamedTuple):
    """One row of the table. Ranks that share memory still meet over TLS."""

    scheme: str
    between: str
    encrypted: str
    settings: dict[str, Any]


TRANSPORTS = (
    Transport("quic", "any hosts", "yes", {"transports": ("quic",)}),
    Transport("tls", "any hosts", "yes", {"transports": ("tls",)}),
    Transport("tcp", "trusted hosts", "NO", {"transports": ("tls",), "enable_tcp_bulk_sidecar": True,
                                             "encrypt_bulk_transport": False}),
    Transport("shm", "one host", "–", {"transports": ("shm", "tls")}),
    Transport("memory", "one process", "–", {}),
)  # fmt: skip


class Figures(NamedTuple):
    """What rank 0 measured."""

    round_trip: float
    """Seconds."""
    throughput: float
    """Bytes per second."""
    schemes: frozenset[str]
    """Transports in use."""


# -- what both ranks do ----------------------------------------------------------------------------------------------


def exchange(comm: nexar.Communicator) -> Figures | None:
    """Run one of the two ranks."""
    if comm.rank == 0:
        check_arrays(comm)
        round_trip, throughput = measure_round_trip(comm), measure_throughput(comm)
        names = comm.stats()["links"][1]
        comm.barrier()
        return Figures(round_trip, throughput, frozenset(name.partition(".")[0] for name in names if "." in name))
    mirror(comm)
    comm.barrier()  # rank 1 keeps its link until rank 0 has read about it
    return None


def check_arrays(comm: nexar.Communicator) -> None:
    """Check that arrays of every dtype come back negated, with the same dtype and shape."""
    generator = np.random.default_rng(7)
    for name in TYPES:
        sent = generator.integers(-100, 100, (300, 400)).astype(name)
        comm.send(sent, dest=1)
        back = comm.recv(source=1)
        if back.dtype != sent.dtype or not np.array_equal(back, -sent):
            raise AssertionError(f"an array of {name} came back wrong")


def measure_round_trip(comm: nexar.Communicator) -> float:
    """Median seconds of an 8-byte round trip."""
    ball = np.zeros(1)
    times = []
    for _ in range(PINGS):
        begin = time.perf_counter()
        comm.send(ball, dest=1)
        comm.recv(ball, source=1)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure_throughput(comm: nexar.Communicator) -> float:
    """Bytes per second, one way, of 16 MB arrays. All are sent at once; the peer answers when it has them."""
    array, answer = np.ones(LARGE_BYTES, np.uint8), np.zeros(1)
    comm.barrier()  # the peer has posted its receives
    begin = time.perf_counter()
    for request in [comm.start.send(array, dest=1) for _ in range(LARGE_ROUNDS)]:
        request.wait()
    comm.recv(answer, source=1)
    return LARGE_BYTES * LARGE_ROUNDS / (time.perf_counter() - begin)


def mirror(comm: nexar.Communicator) -> None:
    """Send every array back negated, answer the pings, receive the large arrays."""
    for _ in TYPES:
        comm.send(-comm.recv(source=0), dest=0)
    ball = np.zeros(1)
    for _ in range(PINGS):
        comm.recv(ball, source=0)
        comm.send(ball, dest=0)
    buffers = [np.ones(LARGE_BYTES, np.uint8) for _ in range(2)]
    posted = [comm.start.recv(buffer, source=0) for buffer in buffers]
    comm.barrier()
    for done in range(LARGE_ROUNDS):
        posted[done % 2].wait()
        if done + 2 < LARGE_ROUNDS:  # two receives are always posted, so the next transfer overlaps with this one
            posted[done % 2] = comm.start.recv(buffers[done % 2], source=0)
    comm.send(ball, dest=0)


# -- the table -------------------------------------------------------------------------------------------------------


def run(transport: Transport) -> Figures:
    """Start both ranks. Raises LookupError if the transport is not available."""
    if transport.scheme == "memory":
        with nexar.local(2) as ranks, ThreadPoolExecutor(2) as pool:
            results = list(pool.map(exchange, ranks))
    else:
        try:
            results = nexar.spawn(exchange, 2, **transport.settings)
        except (nexar.ConfigError, nexar.UsageError) as error:
            raise LookupError(str(error)) from None
    figures = results[0]
    assert figures is not None
    if transport.scheme not in figures.schemes:
        raise LookupError(f"the ranks use {', '.join(sorted(figures.schemes))}")
    return figures


def main() -> None:
    """Measure one transport after the other."""
    console = Console()
    console.print(INTRODUCTION)
    table = Table("transport", "for", "encrypted", *_numbers("8 bytes\nround trip", "16 MB\none way"), "checked")
    absent = {}
    for transport in TRANSPORTS:
        with console.status(f"{transport.scheme} …"):
            try:
                figures = run(transport)
                cells = (f"{figures.round_trip * 1e6:.0f} µs", f"{figures.throughput / 1e9:.2f} GB/s")
                checked = f"[green]✔[/] {len(TYPES)} dtypes"
            except LookupError as error:
                absent[transport.scheme] = error
                cells, checked = ("–", "–"), "unavailable"
        table.add_row(transport.scheme, transport.between, transport.encrypted, *cells, checked)
    console.print(table)
    for scheme, reason in absent.items():
        console.print(f"{scheme} is unavailable: {reason}")


def _numbers(*headings: str) -> list[Column]:
    return [Column(heading, justify="right") for heading in headings]


if __name__ == "__main__":
    main()
