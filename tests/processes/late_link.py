"""A rank of a large world: says that the world has formed, waits for a signal, then talks to one it has no link to."""

import sys
import time
from pathlib import Path

import numpy as np

import nexar

APART = 3  # ranks that the barrier of nine does not connect

if __name__ == "__main__":
    with nexar.init() as comm:
        comm.barrier()
        there, back = (comm.rank + APART) % comm.size, (comm.rank - APART) % comm.size
        # Before the signal: after it, the other rank may have opened the link.
        assert not {there, back} & set(comm._group.links()), "they have a link already"
        Path(f"formed{comm.rank}").touch()
        deadline = time.monotonic() + 30
        while not Path("go").exists():
            assert time.monotonic() < deadline, "nobody told this rank to go on"
            time.sleep(0.01)
        comm.send(np.full(300_000, comm.rank), dest=there)
        assert (comm.recv(source=back) == back).all()
        comm.barrier()
        sys.stdout.write(f"rank {comm.rank} has talked to rank {back}\n")
