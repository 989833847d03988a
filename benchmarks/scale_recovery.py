"""Measures how soon a large world goes on after many ranks were killed at once.

    python benchmarks/scale_recovery.py [--size 64] [--killed 16] [--repetitions 3] [--seed 1]

SIZE ranks form, run BARRIERS barriers in which nobody may be lost, are idle for a while, and then sum in a loop. KILLED
of them, rank 0 among them, get SIGKILL at once. CPU times before that are those of one rank, the median: of forming
with the start of Python, and of a second without a call, which are the heartbeats and their checks. Each time after it
counts from before the first kill until the last survivor: has adopted the membership without the killed ranks, has its
communicator, has the right result of its first all_reduce. CPU is that of all survivors together from the first loss
that they see to that result. All processes share CLOCK_MONOTONIC.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import nexar

BARRIERS = 100
TIMEOUT = 300.0
COLUMNS = (
    "formed", "CPU to form, ms", "barriers", "idle CPU/s, ms", "seen by the first", "agreed", "made", "right",
    "changes", "CPU",
)  # fmt: skip
IDLE = 10.0
"""Seconds in which a rank calls nothing."""


def main() -> None:
    """The parent process."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--size", type=int, default=64)
    options.add_argument("--killed", type=int, default=16)
    options.add_argument("--repetitions", type=int, default=3)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.rank:
        rank(chosen.size - chosen.killed)
        return
    print(f"{chosen.size} ranks, {chosen.killed} killed at once, {os.cpu_count()} cores; seconds")
    print("".join(f"{column:>18}" for column in COLUMNS), flush=True)
    chance = random.Random(chosen.seed)
    samples = []
    for _ in range(chosen.repetitions):
        samples.append(sample(chosen.size, chosen.killed, chance))
        print("".join(f"{samples[-1][column]:18.2f}" for column in COLUMNS), flush=True)
    print("medians")
    print("".join(f"{statistics.median(each[column] for each in samples):18.2f}" for column in COLUMNS))


def sample(size: int, killed: int, chance: random.Random) -> dict[str, float]:
    """One world."""
    victims = {0, *chance.sample(range(1, size), killed - 1)}
    with tempfile.TemporaryDirectory(prefix="nexar-scale-") as name:
        folder, began = Path(name), time.monotonic()
        script = (str(Path(__file__).resolve()), "--rank", "--size", str(size), "--killed", str(killed))
        command = (sys.executable, "-m", "nexar", "run", "-n", str(size), "--on-failure", "continue", *script)
        with subprocess.Popen(command, cwd=folder, stderr=(folder / "errors").open("wb")) as process:
            try:
                ready = await_all(folder, range(size), "sums", process)
                time.sleep(chance.uniform(0.2, 0.3))  # any moment of the loop
                kill_at = time.monotonic()
                for victim in victims:
                    os.kill(ready[victim]["pid"], signal.SIGKILL)
                survivors = await_all(folder, sorted(set(range(size)) - victims), "right", process)
            except BaseException:
                print((folder / "errors").read_text()[-4000:], file=sys.stderr)
                raise
            finally:
                process.terminate()  # the launcher ends its ranks
                process.wait(TIMEOUT)
    return figures(list(ready.values()), list(survivors.values()), began, kill_at)


def figures(
    ready: Sequence[dict[str, Any]], survivors: Sequence[dict[str, Any]], began: float, kill_at: float
) -> dict[str, float]:
    """By column."""
    formed = max(each["formed"] for each in ready)
    return {
        "formed": formed - began,
        "CPU to form, ms": 1e3 * statistics.median(each["cpu_formed"] for each in ready),
        "barriers": max(each["barriers"] for each in ready) - formed,
        "idle CPU/s, ms": 1e3 * statistics.median(each["cpu_idle"] for each in ready) / IDLE,
        "seen by the first": min(each.get("seen", each["agreed"]) for each in survivors) - kill_at,
        "agreed": max(each["agreed"] for each in survivors) - kill_at,
        "made": max(each["made"] for each in survivors) - kill_at,
        "right": max(each["right"] for each in survivors) - kill_at,
        "changes": max(each["changes"] for each in survivors),
        "CPU": sum(each["cpu"] for each in survivors),
    }


def await_all(
    folder: Path, ranks: Sequence[int], fact: str, process: subprocess.Popen[bytes]
) -> dict[int, dict[str, Any]]:
    """What these ranks have written, once all of them have written this fact."""
    deadline = time.monotonic() + TIMEOUT
    known: dict[int, dict[str, Any]] = {}
    while missing := [rank for rank in ranks if fact not in known.get(rank, {})]:
        if time.monotonic() > deadline or process.poll() is not None:
            raise SystemExit(f"no {fact!r} from ranks {missing}")
        time.sleep(0.05)
        known |= {rank: read(folder, rank) for rank in missing}
    return known


def read(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank has written so far; later values replace earlier ones."""
    path = folder / f"facts-{rank}"
    text = path.read_text() if path.exists() else ""
    facts: dict[str, Any] = {}
    for line in text[: text.rfind("\n") + 1].splitlines():
        facts |= json.loads(line)
    return facts


# -- one rank ----------------------------------------------------------------------------------------------------------


def rank(survivors: int) -> None:
    """Sums until `survivors` ranks are left and have summed once."""
    comm = nexar.init()
    facts = os.open(f"facts-{comm.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(**what: float) -> None:
        os.write(facts, f"{json.dumps(what)}\n".encode())

    write(formed=time.monotonic(), pid=os.getpid(), cpu_formed=time.process_time())
    for _ in range(BARRIERS):
        comm.barrier(timeout=TIMEOUT)
    write(barriers=time.monotonic())
    time.sleep(1.0)  # other ranks end their barriers
    before = time.process_time()
    time.sleep(IDLE)
    write(cpu_idle=time.process_time() - before)
    if comm.epoch != 1:
        raise SystemExit(f"a rank was lost: {comm}")
    clock = Recovery(comm, survivors, write)
    with comm.failure_events(clock.noticed):
        write(sums=time.monotonic())
        clock.sum_until_right(comm)
        signal.pause()  # the parent ends all


class Recovery:
    """Moments of one rank."""

    def __init__(self, comm: nexar.Communicator, survivors: int, write: Callable[..., None]) -> None:
        self._survivors = survivors
        self._write = write
        self._cpu_before: float | None = None
        runtime = comm._runtime
        adopt = runtime.membership_adopted

        def adopted(change: Any, after: Any) -> None:
            write(agreed=time.monotonic(), changes=after.epoch - 1)
            adopt(change, after)

        runtime.membership_adopted = adopted  # type: ignore[method-assign]

    def noticed(self, event: nexar.FailureEvent) -> None:
        if event.state == "lost" and self._cpu_before is None:
            self._cpu_before = time.process_time()
            self._write(seen=time.monotonic())

    def sum_until_right(self, comm: nexar.Communicator) -> None:
        """The survivors may need several changes."""
        while True:
            try:
                x = comm.all_reduce(np.ones(8), timeout=TIMEOUT)
            except nexar.MembershipChanged as change:
                comm = change.communicator
                self._write(made=time.monotonic())
                continue
            if not (x == comm.size).all():
                raise SystemExit(f"wrong: {x}")
            if comm.size == self._survivors:
                used = 0.0 if self._cpu_before is None else time.process_time() - self._cpu_before
                self._write(right=time.monotonic(), cpu=used)
                return
            time.sleep(0.02)


if __name__ == "__main__":
    main()
