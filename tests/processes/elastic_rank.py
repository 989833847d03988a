"""A rank that goes on through losses and joins until the file `stop` is there. It says where it is by files."""

import os
from pathlib import Path

import numpy as np

import nexar


def main() -> None:
    comm = nexar.init()
    Path(f"pid{os.getpid()}.rank{comm.rank}").touch()
    while not stopped(comm):
        try:
            comm = one_round(comm)
        except nexar.MembershipChanged as change:
            comm = change.communicator
        Path(f"size{comm.size}.epoch{comm.epoch}.rank{comm.rank}").touch()
    comm.close()


def stopped(comm: nexar.Communicator) -> bool:
    """All stop in the same round, unless one is lost in it: then it is asked again."""
    votes = np.array([1.0, float(Path("stop").exists())])
    try:
        comm.all_reduce(votes)
    except nexar.MembershipChanged:
        return False
    assert votes[0] == comm.size
    return votes[1] > 0


def one_round(comm: nexar.Communicator) -> nexar.Communicator:
    change = comm.checkpoint()
    return comm if change is None else change.communicator


main()
