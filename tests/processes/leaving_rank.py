"""One rank of a story in which some leave by closing: `leaving_rank.py PACE`. See story_rank.

The ranks 0 and 1 talk to each other, and to nobody else, until there is a file `together`; the others wait for it. A
rank for which there is a file `close-RANK` closes and ends well. Then all that are left sum, round after round.
"""

import sys
import time
from pathlib import Path

import numpy as np

import nexar
from tests.processes.story_rank import SELDOM, Life


class Pair:
    """What the ranks 0 and 1 do alone: messages on the world's communicator, sums on their own."""

    def __init__(self, life: Life, part: nexar.Communicator) -> None:
        self._life = life
        self._part = part
        self._rounds = 0

    def talk(self) -> None:
        """Once, and write it down; whatever it raises is an interruption."""
        world, part = self._life.comm, self._part
        other, mine = 1 - part.rank, np.array([self._rounds, part.rank])
        got = world.sendrecv(mine, other, source=other)
        total = part.all_reduce(part.rank + 1)
        assert (got.tolist(), total) == ([self._rounds, other], 3)
        self._rounds += 1
        self._life.diary.write("talked", rounds=self._rounds, world=world.epoch, part=part.epoch)

    def is_over(self) -> bool:
        """Both see the file in the same round: else one would wait for the other."""
        return bool(self._part.all_reduce(int(Path("together").exists()), "max"))


def part_ways(life: Life) -> bool:
    """Until all that are left come together again. False: this rank has been asked to close."""
    pair = life.comm.split(0 if life.me < 2 else None)
    life.diary.write("right", parted=True)
    talking = None if pair is None else Pair(life, pair)
    while not Path(f"close-{life.me}").exists():
        if talking is not None and talking.is_over():
            return True
        if talking is None and Path("together").exists():
            return True
        if talking is not None:
            talking.talk()
        time.sleep(SELDOM)
    return False


def main(interval: float) -> None:
    with nexar.init() as comm:
        life = Life(comm, interval)
        with life.noticing:
            if part_ways(life):
                life.live()
        life.diary.write("leaves")


if __name__ == "__main__":
    main(float(sys.argv[1]))
