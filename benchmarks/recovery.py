"""Measures how soon survivors compute again after a rank was killed.   python benchmarks/recovery.py [--hosts 1]

Four ranks run all_reduce in a loop, on this host and on two hosts (network namespaces; root only). One of them, a
different one each time, gets SIGKILL. Each time counts from before the kill until the last survivor: has seen the loss,
has agreed on the next membership, has its communicator, has the right result of its first all_reduce. All processes
share CLOCK_MONOTONIC.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import nexar
from nexar.cli.bench.systems import BenchHost, opened_hosts

SIZE = 4
COUNT = 128
TIMEOUT = 60.0
MILESTONES = ("seen by the first", "seen by all", "agreed", "made", "right")


def main() -> None:
    """The parent process."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repetitions", type=int, default=20)
    options.add_argument("--hosts", type=int, choices=(1, 2), action="append", help="1 or 2; default: both")
    options.add_argument("--pace", type=float, default=0.0, help="seconds between two rounds of a rank")
    options.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.rank:
        rank(chosen.pace)
        return
    for count in chosen.hosts or (1, 2):
        with opened_hosts(count, 1500) as hosts:
            samples = [sample(hosts, number % SIZE, chosen.pace) for number in range(chosen.repetitions)]
        show(count, samples)


def show(hosts: int, samples: Sequence[dict[str, float]]) -> None:
    """Prints one table."""
    print(f"\n{SIZE} ranks, {hosts} host{'s' * (hosts > 1)}, {len(samples)} kills; milliseconds since the kill")
    print(f"{'':20}{'min':>9}{'median':>9}{'max':>9}")
    for milestone in MILESTONES:
        figures = [each[milestone] * 1e3 for each in samples]
        print(f"{milestone:20}{min(figures):9.1f}{statistics.median(figures):9.1f}{max(figures):9.1f}", flush=True)


# -- one kill ----------------------------------------------------------------------------------------------------------


def sample(hosts: Sequence[BenchHost], victim: int, interval: float) -> dict[str, float]:
    """One kill, in a new cluster."""
    with tempfile.TemporaryDirectory(prefix="nexar-recovery-") as name, ExitStack() as stack:
        folder = Path(name)
        launched = launch(stack, hosts, folder, interval)
        pids = await_ready(folder)
        time.sleep(random.uniform(0.2, 0.3))  # any moment of the loop
        killed = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        for process in launched:
            if process.wait(TIMEOUT):
                raise SystemExit(f"{process.args} has failed: {process.returncode}")
        survivors = [read(folder, rank) for rank in range(SIZE) if rank != victim]
    return milestones(survivors, killed)


def milestones(survivors: Sequence[dict[str, float]], killed: float) -> dict[str, float]:
    """Seconds since the kill."""
    # A rank may learn of the change before it sees the loss.
    seen = [each.get("seen", each["agreed"]) for each in survivors]
    moments = [min(seen), max(seen), *(max(each[milestone] for each in survivors) for milestone in MILESTONES[2:])]
    return {milestone: moment - killed for milestone, moment in zip(MILESTONES, moments, strict=True)}


def launch(
    stack: ExitStack, hosts: Sequence[BenchHost], folder: Path, interval: float
) -> list[subprocess.Popen[bytes]]:
    """The launchers of the ranks. They and the seed end with the stack."""
    nexar_command = (sys.executable, "-m", "nexar")
    run = ("run", "--on-failure", "continue", "-n")
    script = (str(Path(__file__).resolve()), "--rank", "--pace", str(interval))
    if len(hosts) == 1:
        return [stack.enter_context(running((*nexar_command, *run, str(SIZE), *script), folder))]
    ticket = ("--ticket-file", "ticket")
    stack.enter_context(running((*hosts[0].prefix, *nexar_command, "seed", "--size", str(SIZE), *ticket), folder))
    block = (*run, str(SIZE // len(hosts)), *ticket)
    return [stack.enter_context(running((*host.prefix, *nexar_command, *block, *script), folder)) for host in hosts]


@contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block."""
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def await_ready(folder: Path) -> dict[int, int]:
    """Process ids by rank, once all ranks compute."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        ready = {rank: facts["pid"] for rank in range(SIZE) if "pid" in (facts := read(folder, rank))}
        if len(ready) == SIZE:
            return ready
        time.sleep(0.01)
    raise SystemExit("the ranks did not start in time")


def read(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank has written so far."""
    path = folder / f"facts-{rank}"
    text = path.read_text() if path.exists() else ""
    facts: dict[str, Any] = {}
    for line in text[: text.rfind("\n") + 1].splitlines():
        facts = {**json.loads(line), **facts}  # the first value counts
    return facts


# -- one rank ----------------------------------------------------------------------------------------------------------


def rank(interval: float) -> None:
    """Computes until a rank is lost, and then once more."""
    with nexar.init() as comm:
        facts = os.open(f"facts-{comm.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

        def write(**what: float) -> None:
            os.write(facts, f"{json.dumps(what)}\n".encode())

        runtime = comm._runtime
        adopt = runtime.membership_adopted

        def adopted(*change: Any) -> None:
            write(agreed=time.monotonic())
            adopt(*change)

        runtime.membership_adopted = adopted  # type: ignore[method-assign]
        with comm.failure_events(lambda event: write(seen=time.monotonic()) if event.state == "lost" else None):
            write(pid=os.getpid())
            survivors = sum_until_changed(comm, interval)
            write(made=time.monotonic())
            x = survivors.all_reduce(np.ones(COUNT))
            now = time.monotonic()
            if not (x == SIZE - 1).all():
                raise SystemExit(f"wrong: {x}")
            write(right=now)
            survivors.barrier()


def sum_until_changed(comm: nexar.Communicator, interval: float) -> nexar.Communicator:
    """The survivors' communicator."""
    x = np.ones(COUNT)
    try:
        while True:
            x[:] = 1
            comm.all_reduce(x)
            if interval:
                time.sleep(interval)
    except nexar.MembershipChanged as change:
        survivors: nexar.Communicator = change.communicator
        return survivors


if __name__ == "__main__":
    main()
