"""Measures how much of a transfer overlaps with other work.   python benchmarks/overlap.py [--mtu 1500]   (root; needs
`ip`)

Two hosts (network namespaces) run a non-blocking all_reduce of 16 MB, and meanwhile either sleep for the transfer's
duration, like an accelerator, or compute with NumPy for that long. Hidden is the time saved against running both in
sequence, as a share of the shorter one. Both hosts share this machine's cores, so NumPy competes with the transfer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

import nexar
from nexar.cli.bench.systems import opened_hosts

COUNT = 16 << 18  # float32: 16 MB
ROUNDS = 15


def main() -> None:
    """Starts two hosts, a seed, and a rank on each."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--mtu", type=int, default=1500)
    options.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.rank:
        rank()
        return
    with opened_hosts(2, chosen.mtu) as hosts, tempfile.TemporaryDirectory() as folder:
        ticket = ("--ticket-file", str(Path(folder) / "ticket"))
        nexar_command = (sys.executable, "-m", "nexar")
        seed = subprocess.Popen((*hosts[0].prefix, *nexar_command, "seed", "--size", "2", *ticket))
        runs = [
            subprocess.Popen((*host.prefix, *nexar_command, "run", "-n", "1", *ticket, __file__, "--rank"))
            for host in hosts
        ]
        for process in (*runs, seed):
            process.wait(timeout=300)


def rank() -> None:
    """One rank: measures each alone, then both at once, interleaved."""
    with nexar.init() as comm:
        x = np.ones(COUNT, np.float32)
        alone = median(_timed(comm, x, lambda: None) for _ in range(ROUNDS))
        work, passes = np.ones(1 << 20, np.float32), 1
        while _seconds(partial(_compute, work, passes)) < alone and passes < 1 << 16:
            passes *= 2
        passes = int(comm.all_reduce(float(passes), op="avg"))
        for name, task in (("sleep", lambda: time.sleep(alone)), ("NumPy", partial(_compute, work, passes))):
            apart, both, task_alone = [], [], []
            for _ in range(ROUNDS):
                apart.append(_timed(comm, x, lambda: None))
                task_alone.append(_seconds(task))
                both.append(_timed(comm, x, task))
            transfer, other, together = median(apart), median(task_alone), median(both)
            hidden = (transfer + other - together) / min(transfer, other)
            if comm.rank == 0:
                print(
                    f"{name:6} transfer {transfer * 1e3:6.1f} ms, {name} {other * 1e3:6.1f} ms, "
                    f"together {together * 1e3:6.1f} ms: {hidden:4.0%} hidden",
                    flush=True,
                )


def _timed(comm: nexar.Communicator, x: np.ndarray, task) -> float:
    comm.barrier()
    begin = time.perf_counter()
    request = comm.start.all_reduce(x, op="max")
    task()
    request.wait()
    return time.perf_counter() - begin


def _compute(work: np.ndarray, passes: int) -> None:
    for _ in range(passes):
        np.sqrt(work, out=work)


def _seconds(task) -> float:
    begin = time.perf_counter()
    task()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
