"""Measures the time from `nexar run -n N` until every rank has passed its first barrier.

    python benchmarks/formation.py [--repeat 5] [--sizes 1,4,32]

The clock is CLOCK_MONOTONIC, shared by all processes of a host. It includes starting Python and imports, but not the
end of the processes.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

RANK = """
import time, nexar
with nexar.init() as comm:
    formed = time.monotonic()
    comm.barrier()
    print(formed, time.monotonic())
"""
TIMEOUT = 120.0


def measure(size: int, script: Path) -> tuple[float, float, float]:
    """Seconds until all ranks had a communicator, until all had passed the barrier, and of CPU in total."""
    before, began = _cpu_seconds(), time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "nexar", "run", "-n", str(size), str(script)],
        capture_output=True, text=True, check=True, timeout=TIMEOUT,
    )  # fmt: skip
    times = [[float(word) for word in line.split()[-2:]] for line in ran.stdout.splitlines()]
    assert len(times) == size, ran.stdout
    return max(t[0] for t in times) - began, max(t[1] for t in times) - began, _cpu_seconds() - before


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--sizes", default="1,4,32")
    wanted = parser.parse_args()
    print(
        f"{'ranks':>5}  {'formed':>8}  {'barrier':>8}  {'slowest':>8}  {'CPU':>8}   seconds, medians of {wanted.repeat}"
    )
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "rank.py"
        script.write_text(RANK)
        for size in map(int, wanted.sizes.split(",")):
            formed, passed, cpu = zip(*(measure(size, script) for _ in range(wanted.repeat)), strict=True)
            columns = median(formed), median(passed), max(passed), median(cpu)
            print(f"{size:>5}  " + "  ".join(f"{each:8.2f}" for each in columns), flush=True)


if __name__ == "__main__":
    main()
