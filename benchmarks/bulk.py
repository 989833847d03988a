"""Measures bulk channels between two processes on this host: both directions at once, over loopback.

    python benchmarks/bulk.py [--sizes 1,16,64] [--connections 1,2] [--threads 2] [--modes encrypted,plain] [--reduce]
                              [--rounds 9] [--one-way]

GB/s is that of one direction: the size of a transfer, divided by the median time until both sides have sent and
received it. CPU is that of both processes, per gigabyte that arrived at either; it contains the kernel's share.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import multiprocessing
import resource
import select
import socket
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from nexar_native import bulk

TIMEOUT = 120.0
SUM, FLOAT32 = 1, 11
MB = 1 << 20


def make_identities() -> dict[str, bytes]:
    """An authority's certificate, and a chain and a key for each of two nodes."""
    now = dt.datetime.now(dt.UTC)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "benchmark")])

    def certificate(name: str, key: ec.EllipticCurvePrivateKey, *, ca: bool) -> bytes:
        builder = x509.CertificateBuilder(
            issuer_name=issuer,
            subject_name=issuer if ca else x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - dt.timedelta(days=1),
            not_valid_after=now + dt.timedelta(days=1),
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        if not ca:
            names = x509.SubjectAlternativeName([x509.DNSName(name)])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    made = {"authority": certificate("", authority_key, ca=True)}
    for name in ("a", "b"):
        key = ec.generate_private_key(ec.SECP256R1())
        made[name] = certificate(name, key, ca=False)
        made[f"{name} key"] = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    return made


class Side:
    """One process: its endpoint, its channel, its transfers."""

    def __init__(self, name: str, identities: dict[str, bytes], threads: int) -> None:
        credentials = bulk.Credentials(identities[name], identities[f"{name} key"])
        trust = bulk.Trust(identities["authority"])
        self.endpoint = bulk.Endpoint(credentials, trust, threads=threads, allow_plain=True)
        self.channel: bulk.Channel
        self.dials = name == "a"
        self._events: list[tuple[int, int, int, Any]] = []

    def wait(self, *codes: int) -> Any:
        while True:
            for at, event in enumerate(self._events):
                if event[0] in codes:
                    return self._events.pop(at)
                if event[0] in (bulk.LOST, bulk.REFUSED):
                    raise ConnectionError(event[3])
            if not select.select([self.endpoint], [], [], TIMEOUT)[0]:
                raise TimeoutError(f"no event within {TIMEOUT} s")
            self._events += self.endpoint.poll()

    def listen(self, pipe: Connection, connections: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            pipe.send(listener.getsockname())
            for _ in range(connections):
                accepted, _ = listener.accept()
                self.endpoint.adopt(accepted.detach())
        self.channel = self.wait(bulk.ACCEPTED)[3]

    def dial(self, pipe: Connection, connections: int, plain: bool) -> None:
        address = tuple(pipe.recv())
        self.channel = self.endpoint.connect(
            [address], "b", None, b"", connections=connections, plain=plain, timeout=TIMEOUT
        )


def cpu_seconds() -> float:
    """Return what this process has used so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(name: str, pipe: Connection, identities: dict[str, bytes], settings: dict[str, Any]) -> None:
    """One side of all cases. Both sides do the same; "a" dials and keeps the time."""
    for plain, connections, size in settings["cases"]:
        side = Side(name, identities, settings["threads"])
        with side.endpoint:
            if side.dials:
                side.dial(pipe, connections, plain)
            else:
                side.listen(pipe, connections)
            pipe.send(measure(side, pipe, size, settings))
            pipe.recv()


def measure(side: Side, pipe: Connection, size: int, settings: dict[str, Any]) -> tuple[list[float], float]:
    """Return the time of each round and the CPU time of all."""
    channel, dials = side.channel, side.dials
    data = np.ones(size // 4, np.float32)
    into = np.zeros(size // 4, np.float32)
    sends, receives = dials or not settings["one_way"], not dials or not settings["one_way"]
    options = {"op": SUM, "dtype": FLOAT32} if settings["reduce"] else {}
    times: list[float] = []
    started = 0.0
    for number in range(settings["rounds"] + 2):  # the first two warm the memory up
        if number == 2:
            started = cpu_seconds()
        if receives:
            channel.expect(number, into, **options)
        pipe.send(b"ready")
        pipe.recv()
        begun = time.perf_counter()
        if sends:
            channel.send(number, data)
        if receives:
            side.wait(bulk.LANDED)
        if sends:
            side.wait(bulk.SENT)
        if number >= 2:
            times.append(time.perf_counter() - begun)
    used = cpu_seconds() - started
    expected = settings["rounds"] + 2 if settings["reduce"] else 1
    if receives and not (into == expected).all():
        raise AssertionError("wrong data")
    return times, used


def parsed() -> dict[str, Any]:
    """Return the options, and the cases that they ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="1,16,64", help="megabytes")
    parser.add_argument("--connections", default="1,2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--modes", default="encrypted,plain")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--reduce", action="store_true", help="add to the destination instead of overwriting it")
    parser.add_argument("--one-way", action="store_true", help="only one side sends")
    parser.add_argument("--json", action="store_true")
    options = vars(parser.parse_args())
    options["cases"] = [
        (mode == "plain", int(connections), int(float(size) * MB))
        for mode in options["modes"].split(",")
        for connections in options["connections"].split(",")
        for size in options["sizes"].split(",")
    ]
    return options


def relay(pipes: list[Connection], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Drives both processes through the cases, and collects what they measured."""
    a, b = pipes
    rows = []
    for plain, connections, size in settings["cases"]:
        a.send(b.recv())
        for _ in range(settings["rounds"] + 2):
            for pipe in pipes:
                pipe.recv()
            for pipe in pipes:
                pipe.send(b"go")
        (times, cpu_a), (other_times, cpu_b) = a.recv(), b.recv()
        for pipe in pipes:
            pipe.send(b"next")
        each = [max(pair) for pair in zip(times, other_times, strict=True)]
        moved = size * settings["rounds"] * (1 if settings["one_way"] else 2)
        rows.append(
            {
                "mode": "plain" if plain else "encrypted",
                "connections": connections,
                "megabytes": size / MB,
                "milliseconds": statistics.median(each) * 1e3,
                "gigabytes_per_second": size / statistics.median(each) / 1e9,
                "best": size / min(each) / 1e9,
                "cpu_seconds_per_gigabyte": (cpu_a + cpu_b) / moved * 1e9,
            }
        )
    return rows


def main() -> None:
    """Prints a table, or with --json a list."""
    settings = parsed()
    identities = make_identities()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for name in ("a", "b"):
        here, there = context.Pipe()
        process = context.Process(target=run, args=(name, there, identities, settings), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    rows = relay(pipes, settings)
    for process in processes:
        process.join()
    if settings["json"]:
        print(json.dumps(rows, indent=1))
        return
    ways = "one way" if settings["one_way"] else "both ways at once"
    print(f"{ways}, {settings['threads']} threads a side{', reduced' if settings['reduce'] else ''}\n")
    print(f"{'mode':<10}{'connections':>12}{'MB':>7}{'ms':>9}{'GB/s':>7}{'best':>7}{'CPU s/GB':>10}")
    for row in rows:
        mode, connections, megabytes, milliseconds, rate, best, cpu = row.values()
        print(f"{mode:<10}{connections:>12}{megabytes:>7g}{milliseconds:>9.2f}{rate:>7.2f}{best:>7.2f}{cpu:>10.2f}")


if __name__ == "__main__":
    main()
