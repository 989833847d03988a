"""Four ranks sum numbers; one is killed, and the others continue.

    nexar run -n 4 --on-failure continue examples/survive_a_crash.py

In each round every rank contributes a power of two, so the sum shows which ranks took part. Rank 2 kills itself after
round 5. The other ranks detect this at once, agree that it is lost, and get a communicator without it.
"""

import os
import signal
import time

import nexar

ROUNDS = 10
LAST_OF_THE_VICTIM = 5
VICTIM = 2


def add_up(comm: nexar.Communicator, first: int, done: int) -> int:
    """Run one round, and return the number of completed rounds."""
    if first == VICTIM and done == LAST_OF_THE_VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    total = int(comm.all_reduce(2.0**first))
    if comm.rank == 0:
        members = [number for number in range(total.bit_length()) if total >> number & 1]
        print(f"round {done + 1}: the sum is {total:2}, from initial ranks {members}")
    return done + 1


def main() -> None:
    """Run one rank."""
    with nexar.init() as world:
        comm, first, done, settled = world, world.rank, 0, True
        while done < ROUNDS:
            began = time.perf_counter()
            try:
                if not settled:  # some ranks may have finished the round that the others have to repeat
                    done, settled = int(comm.all_reduce(done, op="min")), True
                done = add_up(comm, first, done)
            except nexar.MembershipChanged as change:
                comm, settled = change.communicator, False
                if comm.rank == 0:
                    lost = ", ".join(f"rank {rank}: {cause}" for rank, cause in change.lost.items())
                    waited = time.perf_counter() - began
                    print(f"continuing with {comm.size} ranks after {1e3 * waited:.0f} ms; lost {lost}")


if __name__ == "__main__":
    main()
