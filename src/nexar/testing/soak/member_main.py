"""One member of a soak: computes, checks each result, and reports as JSON lines.

Every communicator starts with a call in which its members agree on the step to continue from: a loss hits them at
different points, and joiners may enter. All stop together when the file `stop` exists.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from nexar.communicator.communicator import Communicator
from nexar.errors import MembershipChanged
from nexar.launch.init import init

COUNTS: Final = (1, 1_000, 300, 100_000)
"""Elements of the sums, in turn."""
STATE_COUNT: Final = 50_000
_SELDOM: Final = 0.2  # seconds between two progress reports
_CHECKPOINT_STEPS: Final = 5


class WrongResult(AssertionError):
    """A result was wrong."""


def state_array(step: int) -> np.ndarray[Any, Any]:
    """A joiner checks that it is complete."""
    return np.arange(step, step + STATE_COUNT, dtype=np.float64)


def weight(node: int) -> float:
    """Small enough for exact sums."""
    return float(node % (1 << 30))


class SoakMember:
    """The member of this process."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._node = comm.membership.member(comm.rank).node
        self._step = 0
        self._rounds = 0
        self._lost: list[int] = []  # since the last correct sum
        self._settled = False
        self._said_at = 0.0
        self._receive_state()
        self._say("here", pid=os.getpid(), node=self._node, joined=comm.state is not None)

    def _receive_state(self) -> None:
        state = self._comm.state
        if state is None:
            return
        self._step = state["step"]
        if not np.array_equal(state["array"], state_array(self._step)):
            raise WrongResult(f"the state of step {self._step} is not what was handed over: {state['array']}")

    def live(self) -> None:
        while True:
            try:
                if self._round():
                    return
            except MembershipChanged as change:
                before = self._comm.membership
                self._follow(change.communicator, [before.members[rank].node for rank in change.lost])

    def close(self) -> None:
        self._say("end")
        self._comm.close()

    def _round(self) -> bool:
        """Whether it was the last one."""
        if not self._settled:
            self._settle()
        self._step += 1
        stop = self._sum()
        self._exchange_with_neighbours()
        self._rounds += 1
        if self._lost or time.monotonic() > self._said_at + _SELDOM:
            self._say("round", recovered_from=self._lost)
            self._lost = []
        if self._step % _CHECKPOINT_STEPS == 0 and not stop:
            self._checkpoint()
        return stop

    def _settle(self) -> None:
        steps = self._comm.all_reduce(np.array([self._step, -self._step]), op="max")
        self._step, self._settled = int(steps[0]), True

    def _sum(self) -> bool:
        comm, count = self._comm, COUNTS[self._step % len(COUNTS)]
        mine = np.full(count + 1, weight(self._node))
        mine[-1] = Path("stop").exists()
        given = comm.all_reduce(mine)
        expected = sum(weight(member.node) for member in comm.membership.members)
        if not (given[:-1] == expected).all():
            raise WrongResult(f"step {self._step}: the sum is {given}, not {expected}, in {comm}")
        return bool(given[-1])

    def _exchange_with_neighbours(self) -> None:
        """To the next rank, and from the previous one."""
        comm = self._comm
        if comm.size == 1:
            return
        before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        words = np.array([self._node, self._step], np.uint64)
        told = comm.start.send(words, dest=after, tag=self._step % 1000)
        heard = comm.recv(source=before, tag=self._step % 1000)
        told.wait()
        expected = [comm.membership.member(before).node, self._step]
        if heard.tolist() != expected:
            raise WrongResult(f"step {self._step}: rank {before} sent {heard.tolist()}, not {expected}, in {comm}")

    def _checkpoint(self) -> None:
        step = self._step
        change = self._comm.checkpoint(lambda: {"step": step, "array": state_array(step)})
        if change is not None:
            if change.communicator is None:
                raise WrongResult(f"rank {self._comm.rank} was told that it has left; it did not want to")
            self._follow(change.communicator, [])

    def _follow(self, successor: Communicator, lost: list[int]) -> None:
        self._comm, self._settled = successor, False
        self._lost += lost
        self._say("changed", lost=lost)

    def _say(self, what: str, **facts: Any) -> None:
        self._said_at = time.monotonic()
        membership = self._comm.membership
        nodes = [member.node for member in membership.members]
        progress = {"step": self._step, "rounds": self._rounds, "epoch": membership.epoch, "nodes": nodes}
        line = json.dumps({"what": what, "at": self._said_at, **progress, **facts})
        os.write(sys.stdout.fileno(), f"{line}\n".encode())  # one write: it may be killed


def main() -> None:
    """SIGUSR2 dumps all stacks to standard error."""
    faulthandler.register(signal.SIGUSR2)
    member = SoakMember(init())
    member.live()
    member.close()


if __name__ == "__main__":
    main()
