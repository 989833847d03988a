"""Four ranks form a cluster and compute π with point-to-point messages.

    nexar run -n 4 examples/first_cluster.py

Each rank sums its share of the rectangles under 4 / (1 + x²). Each rank adds its part to the sum and sends it to the
next rank; the last rank sends the result to all. Then an array of a million numbers goes around the ring, and every
rank changes it.
"""

import os
import socket
import time

import numpy as np

import nexar

RECTANGLES = 4_000_000
NUMBERS = 1_000_000


def introduce(comm: nexar.Communicator) -> None:
    """Print one line per rank, in rank order: each rank waits for a message from the previous one."""
    if comm.rank > 0:
        comm.recv(source=comm.rank - 1)
    me = comm.membership.member(comm.rank)
    others = [member for member in comm.membership.members if member is not me]
    transports = sorted(me.capabilities.intersection(*(other.capabilities for other in others)))
    place = f"process {os.getpid()} on {socket.gethostname()}"
    print(f"I am rank {comm.rank} of {comm.size}, {place}; common transports: {', '.join(transports)}")
    if comm.rank + 1 < comm.size:
        comm.send(np.zeros(1), dest=comm.rank + 1)
    comm.barrier()


def my_share(rank: int, size: int) -> float:
    """The area of every size-th rectangle, starting with number rank."""
    x = (np.arange(rank, RECTANGLES, size) + 0.5) / RECTANGLES
    return float((4 / (1 + x * x)).sum() / RECTANGLES)


def add_up(comm: nexar.Communicator, part: float) -> float:
    """The sum of all parts: it goes from rank to rank, and the last rank sends it to all."""
    total = np.array([part])
    if comm.rank > 0:
        total += comm.recv(source=comm.rank - 1)
    if comm.rank + 1 < comm.size:
        comm.send(total, dest=comm.rank + 1)
        return float(comm.recv(source=comm.size - 1)[0])
    for rank in range(comm.size - 1):
        comm.send(total, dest=rank)
    return float(total[0])


def pass_around(comm: nexar.Communicator) -> bool:
    """Send a large array around the ring; each rank adds its number. True if the result is correct."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    numbers = np.zeros(NUMBERS)
    if comm.rank == 0:
        comm.send(numbers, dest=right)
        comm.recv(numbers, source=left)
        return bool((numbers == sum(range(comm.size))).all())
    comm.recv(numbers, source=left)
    comm.send(numbers + comm.rank, dest=right)
    return True


def main() -> None:
    """Run one rank."""
    with nexar.init() as comm:
        introduce(comm)
        begin = time.perf_counter()
        pi = add_up(comm, my_share(comm.rank, comm.size))
        correct = comm.size == 1 or pass_around(comm)
        comm.barrier()
        assert abs(pi - np.pi) < 1e-9
        assert correct
        if comm.rank == 0:
            print(f"π = {pi:.10f}; {8 * NUMBERS / 1e6:.0f} MB passed around the ring; "
                  f"{time.perf_counter() - begin:.2f} s")  # fmt: skip


if __name__ == "__main__":
    main()
