"""Four ranks add up numbers; one of them is killed in the middle, and the others go on.

    nexar run -n 4 --on-failure continue examples/survive_a_crash.py

Every round, each rank brings a power of two: so the sum says who took part. Rank 2 kills itself in round 5, without a
word to anybody. The others are told at once, agree that it is gone, and have a communicator without it.
"""

import os
import signal
import time

import nexar

ROUNDS = 10
LAST_OF_THE_VICTIM = 5
VICTIM = 2


def add_up(comm: nexar.Communicator, first: int, done: int) -> int:
    """One round; how many there were then."""
    if first == VICTIM and done == LAST_OF_THE_VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    total = int(comm.all_reduce(2.0**first))
    if comm.rank == 0:
        members = [number for number in range(total.bit_length()) if total >> number & 1]
        print(f"round {done + 1}: the sum is {total:2}, from those that were ranks {members} in the beginning")
    return done + 1


def main() -> None:
    """What each rank does."""
    with nexar.init() as world:
        comm, first, done, settled = world, world.rank, 0, True
        while done < ROUNDS:
            began = time.perf_counter()
            try:
                if not settled:  # some may have had their sum when the others were interrupted: all take the same step
                    done, settled = int(comm.all_reduce(done, op="min")), True
                done = add_up(comm, first, done)
            except nexar.MembershipChanged as change:
                comm, settled = change.communicator, False
                if comm.rank == 0:
                    lost = ", ".join(f"rank {rank}: {cause}" for rank, cause in change.lost.items())
                    waited = time.perf_counter() - began
                    print(f"after {1e3 * waited:.0f} ms we go on, {comm.size} of us. Lost is {lost}")


if __name__ == "__main__":
    main()
