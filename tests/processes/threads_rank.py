"""A rank that counts its threads: idle, and while it recovers from the death of rank 3.

Prints one JSON object. `threads` are those of Python, by name; `native` is the number of further tasks of the process.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

import nexar

SETTLED = 3.0  # seconds after which the threads of the dial pool have ended
SAMPLER = "sampler"


def names() -> list[str]:
    return sorted(each.name for each in threading.enumerate() if each.name != SAMPLER)


def native() -> tuple[int, list[str]]:
    """Tasks that are no threads of Python, and how the system names all."""
    known = {each.native_id for each in threading.enumerate()}
    others = [int(task) for task in os.listdir("/proc/self/task") if int(task) not in known]
    return len(others), sorted(comm_of(task) for task in others)


def comm_of(task: int) -> str:
    try:
        with open(f"/proc/self/task/{task}/comm") as comm:
            return comm.read().strip()
    except OSError:
        return "ended"


class Sampler:
    """Keeps the largest set of threads that it has seen."""

    def __init__(self) -> None:
        self.most: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=SAMPLER, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self.most = max(self.most, names(), key=len)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


def settled() -> list[str]:
    """The threads, once dials have ended; an idle rank needs no more time on a busy machine."""
    deadline = time.monotonic() + 60.0
    time.sleep(SETTLED)
    while any(name.startswith(("nexar-dial", "nexar-connect")) for name in names()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return names()


def recover(comm: Any) -> Any:
    while True:
        try:
            comm.all_reduce(np.ones(1000))
        except nexar.MembershipChanged as change:
            return change.communicator


def main() -> None:
    comm = nexar.init()
    comm.barrier()
    facts: dict[str, Any] = {"rank": comm.rank, "idle": settled()}
    facts["native"], facts["native_names"] = native()
    comm.barrier()
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    sampler = Sampler()
    comm = recover(comm)
    comm.barrier()
    sampler.end()
    facts["recovering"] = sampler.most
    facts["after"] = settled()
    sys.stdout.write(json.dumps(facts) + "\n")
    comm.close()


main()
