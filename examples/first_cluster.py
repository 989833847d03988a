"""Four ranks become a cluster, introduce themselves, and compute π together.

    nexar run -n 4 examples/first_cluster.py

Each rank adds up its share of the rectangles under 4 / (1 + x²). The partial sums travel round the ranks, from each to
the next; the last one tells rank 0. Then an array of a million numbers makes the same round, and every rank changes it.
"""

import os
import socket
import time

import numpy as np

import nexar

RECTANGLES = 4_000_000
ROUND = 1_000_000


def introduce(comm: nexar.Communicator) -> None:
    """In the order of ranks: each waits for a word from the one before it."""
    if comm.rank > 0:
        comm.recv(source=comm.rank - 1)
    me = comm.membership.member(comm.rank)
    others = [member for member in comm.membership.members if member is not me]
    ways = sorted(me.capabilities.intersection(*(other.capabilities for other in others)))
    place = f"process {os.getpid()} on {socket.gethostname()}"
    print(f"I am rank {comm.rank} of {comm.size}, {place}; we all have {', '.join(ways)}")
    if comm.rank + 1 < comm.size:
        comm.send(np.zeros(1), dest=comm.rank + 1)
    comm.barrier()


def my_share(rank: int, size: int) -> float:
    """The area of every size-th rectangle, from the rank-th on."""
    x = (np.arange(rank, RECTANGLES, size) + 0.5) / RECTANGLES
    return float((4 / (1 + x * x)).sum() / RECTANGLES)


def add_up(comm: nexar.Communicator, part: float) -> float:
    """Everybody's parts: the sum so far goes from rank to rank, and the last one tells all."""
    total = np.array([part])
    if comm.rank > 0:
        total += comm.recv(source=comm.rank - 1)
    if comm.rank + 1 < comm.size:
        comm.send(total, dest=comm.rank + 1)
        return float(comm.recv(source=comm.size - 1)[0])
    for rank in range(comm.size - 1):
        comm.send(total, dest=rank)
    return float(total[0])


def pass_round(comm: nexar.Communicator) -> bool:
    """A large array goes once round; each rank adds its number. Whether it came back as it should."""
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    numbers = np.zeros(ROUND)
    if comm.rank == 0:
        comm.send(numbers, dest=following)
        comm.recv(numbers, source=before)
        return bool((numbers == sum(range(comm.size))).all())
    comm.recv(numbers, source=before)
    comm.send(numbers + comm.rank, dest=following)
    return True


def main() -> None:
    """What each rank does."""
    with nexar.init() as comm:
        introduce(comm)
        begin = time.perf_counter()
        pi = add_up(comm, my_share(comm.rank, comm.size))
        came_back = comm.size == 1 or pass_round(comm)
        comm.barrier()
        assert abs(pi - np.pi) < 1e-9
        assert came_back
        if comm.rank == 0:
            print(f"together we found π = {pi:.10f}, and passed {8 * ROUND / 1e6:.0f} MB round: "
                  f"{time.perf_counter() - begin:.2f} s")  # fmt: skip


if __name__ == "__main__":
    main()
