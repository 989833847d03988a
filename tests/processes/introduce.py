"""A rank: passes arrays round the ring, in both directions, and prints what it knows of itself and of the others."""

import json
import os
import sys

import numpy as np

import nexar

COUNTS = (7, 300_000)  # one that travels whole, one that waits for a grant


def introduce(comm: nexar.Communicator) -> None:
    """One line of JSON on standard output."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in COUNTS:
        for there, back in ((right, left), (left, right)):
            comm.send(np.full(count, comm.rank, np.float32), dest=there, tag=count)
            got = comm.recv(source=back, tag=count)
            assert got.shape == (count,)
            assert (got == back).all()
    links = {str(rank): link.schemes for rank, link in comm._group.links().items()}
    if "--barrier" in sys.argv:
        comm.barrier()
    facts = {
        "rank": comm.rank,
        "size": comm.size,
        "RANK": os.environ.get("RANK"),
        "host": comm.host,
        "local_rank": comm.local_rank,
        "local_size": comm.local_size,
        "epoch": comm.epoch,
        "hosts": [member.host for member in comm.membership.members],
        "links": links,
    }
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    with nexar.init() as comm:
        introduce(comm)
