"""A rank of benchmarks/recovery.py over Open MPI: `mpirun --with-ft ulfm -n N python ulfm.py PACE COUNT`.

Runs in the environment of `make bench-peers`. Writes the same facts as a rank of nexar, to the same named pipe.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
from mpi4py import MPI


def main() -> None:
    """Computes until a rank fails, and then once more."""
    world, pace, count = MPI.COMM_WORLD, float(sys.argv[1]), int(sys.argv[2])
    pipe = os.open(f"facts-{world.rank}", os.O_WRONLY)

    def write(**what: float) -> None:
        os.write(pipe, f"{json.dumps(what)}\n".encode())

    world.Barrier()
    write(pid=os.getpid())
    sum_until_failed(world, pace, count)
    write(seen=time.monotonic(), cpu=time.process_time())
    world.Revoke()  # not every rank has seen the failure
    survivors = world.Shrink()
    write(raised=time.monotonic())
    x = np.ones(count)
    survivors.Allreduce(MPI.IN_PLACE, x)
    now = time.monotonic()
    if not (x == world.size - 1).all():
        raise SystemExit(f"wrong: {x}")
    write(right=now, cpu_right=time.process_time())
    survivors.Barrier()
    os.close(pipe)


def sum_until_failed(comm: MPI.Comm, pace: float, count: int) -> None:
    """Returns when a call raises because a rank has failed."""
    x = np.ones(count)
    try:
        while True:
            x[:] = 1
            comm.Allreduce(MPI.IN_PLACE, x)
            if pace:
                time.sleep(pace)
    except MPI.Exception as error:
        if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
            raise


if __name__ == "__main__":
    main()
