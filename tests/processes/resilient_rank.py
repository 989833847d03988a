"""One rank of a team that is thinned out: `nexar run -n N resilient_rank.py ROUNDS SEED LOSSES`.

LOSSES of the ranks, by chance and the same on all, kill themselves: each in a round of its own, a moment after that
round began, so anywhere in that round or the next ones. Every rank writes what each round gave to `rounds-RANK`, as
soon as it has it.
"""

import os
import random
import signal
import sys
import threading
import time

import numpy as np

import nexar

COUNT = 512
"""Elements of a round's array."""


def doom(size: int, rounds: int, seed: int, losses: int) -> dict[int, int]:
    """Rank to the round in which it kills itself."""
    chance = random.Random(seed)
    victims = chance.sample(range(size), losses)
    return {victim: chance.randrange(rounds // 10, rounds * 7 // 10) for victim in victims}


def die_soon(longest: float) -> None:
    delay = random.random() * longest

    def die() -> None:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def main(rounds: int, seed: int, losses: int) -> None:
    with nexar.init() as comm:
        first, last = comm.rank, doom(comm.size, rounds, seed, losses).get(comm.rank)
        team = comm.resilient()
        log = os.open(f"rounds-{first}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for number in range(rounds):
            if number == last:
                die_soon(0.003)
            x = np.full(COUNT, 2.0**first)
            team.all_reduce(x)
            members = "+".join(str(comm.membership.rank_of(member.node)) for member in team.contributors.members)
            os.write(log, f"{number} {x.min():.0f} {x.max():.0f} {members}\n".encode())
        os.close(log)


if __name__ == "__main__":
    main(*(int(each) for each in sys.argv[1:]))
