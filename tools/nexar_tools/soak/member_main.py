"""One member of a soak: computes, checks each result, and reports as JSON lines.

Every communicator starts with a call in which its members agree on the step to continue from: a loss hits them at
different points, and joiners may enter. All stop together when the file `stop` exists. A member that is isolated asks
for a new communicator until it reaches the others again: then it continues, or it was expelled and ends.
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
from nexar.errors import Expelled, MembershipChanged, NoQuorum, RecoveryTimeout
from nexar.launch.init import init

COUNTS: Final = (1, 1_000, 300, 100_000)  # elements of the sums, in turn
STATE_COUNT: Final = 50_000
_REPORT_SECONDS: Final = 0.2  # between two progress reports
_CHECKPOINT_STEPS: Final = 5
_ISOLATED_SECONDS: Final = 0.5  # between two attempts without a quorum


class WrongResult(AssertionError):
    """A result was wrong."""


def state_array(step: int) -> np.ndarray[Any, Any]:
    """The state that a joiner receives and checks."""
    return np.arange(step, step + STATE_COUNT, dtype=np.float64)


def weight(node: int) -> float:
    """What a node adds to a sum: small enough for exact results."""
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
        self._is_isolated = False
        self._reported_at = 0.0
        self._receive_state()
        self._report("here", pid=os.getpid(), node=self._node, joined=comm.state is not None)

    def _receive_state(self) -> None:
        state = self._comm.state
        if state is None:
            return
        self._step = state["step"]
        if not np.array_equal(state["array"], state_array(self._step)):
            raise WrongResult(f"the state of step {self._step} is not the one that was sent: {state['array']}")

    def run(self) -> None:
        while True:
            try:
                if self._is_isolated:
                    self._follow(self._comm.shrink(), [])
                if self._round():
                    return
            except MembershipChanged as change:
                before = self._comm.membership
                self._follow(change.communicator, [before.members[rank].node for rank in change.lost])
            except (NoQuorum, RecoveryTimeout) as error:
                # Calls ended at different points on the members, so they need a new communicator to continue together.
                self._is_isolated = True
                self._report("no quorum", error=str(error))
                time.sleep(_ISOLATED_SECONDS)
            except Expelled:
                self._report("expelled")
                return

    def close(self) -> None:
        self._report("end")
        self._comm.close()

    def _round(self) -> bool:
        """Returns whether it was the last round."""
        if not self._settled:
            self._settle()
        self._step += 1
        stop = self._sum()
        self._exchange_with_neighbours()
        self._rounds += 1
        if self._lost or time.monotonic() > self._reported_at + _REPORT_SECONDS:
            self._report("round", recovered_from=self._lost)
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
        """Sends to the next rank and receives from the previous one."""
        comm = self._comm
        if comm.size == 1:
            return
        before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        words = np.array([self._node, self._step], np.uint64)
        sent = comm.start.send(words, dest=after, tag=self._step % 1000)
        received = comm.recv(source=before, tag=self._step % 1000)
        sent.wait()
        expected = [comm.membership.member(before).node, self._step]
        if received.tolist() != expected:
            raise WrongResult(f"step {self._step}: rank {before} sent {received.tolist()}, not {expected}, in {comm}")

    def _checkpoint(self) -> None:
        step = self._step
        change = self._comm.checkpoint(lambda: {"step": step, "array": state_array(step)})
        if change is not None:
            if change.communicator is None:
                raise WrongResult(f"rank {self._comm.rank} was released without a request")
            self._follow(change.communicator, [])

    def _follow(self, successor: Communicator, lost: list[int]) -> None:
        self._comm, self._settled, self._is_isolated = successor, False, False
        self._lost += lost
        self._report("changed", lost=lost)

    def _report(self, what: str, **facts: Any) -> None:
        self._reported_at = time.monotonic()
        membership = self._comm.membership
        nodes = [member.node for member in membership.members]
        progress = {"step": self._step, "rounds": self._rounds, "epoch": membership.epoch, "nodes": nodes}
        line = json.dumps({"what": what, "at": self._reported_at, **progress, **facts})
        os.write(sys.stdout.fileno(), f"{line}\n".encode())  # one write: it may be killed


def main() -> None:
    """Runs one member. SIGUSR2 dumps all stacks to standard error."""
    faulthandler.register(signal.SIGUSR2)
    member = SoakMember(init())
    member.run()
    member.close()


if __name__ == "__main__":
    main()
