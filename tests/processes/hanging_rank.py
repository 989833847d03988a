"""A rank of a program that hangs: the last rank computes for as long as the file `wait` is there.

`hanging_rank.py SECONDS` is how long the others wait for it. Each says in a file that it has come that far, and whether
it got its sum.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

import nexar


def main() -> None:
    """One sum that all have, and one that the last rank comes late to."""
    with nexar.init() as comm:
        comm.all_reduce(np.ones(8))
        Path(f"draft.{comm.rank}").write_text(str(os.getpid()))
        Path(f"draft.{comm.rank}").rename(f"ready.{comm.rank}")  # whole, when it is there
        if comm.rank == comm.size - 1:
            compute()
        try:
            outcome = str(comm.all_reduce(np.ones(8), timeout=float(sys.argv[1]))[0])
        except nexar.CollectiveTimeout as error:
            outcome = f"{error} {getattr(error, '__notes__', [])}"
        Path(f"outcome.{comm.rank}").write_text(outcome)
        comm.barrier()  # so that nobody ends while others still ask


def compute() -> None:
    """What takes so long."""
    while Path("wait").exists():
        time.sleep(0.01)


if __name__ == "__main__":
    main()
