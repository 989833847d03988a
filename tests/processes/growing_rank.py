"""Ranks of clusters that grow and shrink: `growing_rank.py ROLE …`. What happens to each it prints, as lines of JSON.

Where they are they say by files, too: `size3.rank0.PID` when a communicator of three has come to rank 0, and `now.PID`
with the size and the epoch of the one that they have.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import nexar
from nexar.communicator import state_transfer

INTERVAL = 0.01
"""Seconds between two checkpoints: others want the cores, too."""


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201


def mark(comm: nexar.Communicator) -> None:
    Path(f"size{comm.size}.rank{comm.rank}.{os.getpid()}").touch()
    draft = Path(f"draft.{os.getpid()}")
    draft.write_text(json.dumps([comm.size, comm.epoch]))
    draft.rename(f"now.{os.getpid()}")


def pattern(step: int, count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).integers(0, 1 << 62, count).view(np.float64)  # every bit may be set


def make_state(step: int, count: int) -> dict[str, Any]:
    mixed = [np.arange(5, dtype=np.int16), {"half": np.ones((2, 3), np.float16)}, "über", 2**40, None, b"\0raw"]
    return {"step": step, "count": count, "array": pattern(step, count), "mixed": mixed}


def check_state(state: dict[str, Any]) -> None:
    """Bit by bit what was handed over: NaNs, too."""
    expected = make_state(state["step"], state["count"])
    assert state["array"].tobytes() == expected["array"].tobytes()
    assert state["array"].dtype == np.float64
    numbers, halves, *rest = state["mixed"]
    assert (numbers.dtype, numbers.tolist()) == (np.int16, [0, 1, 2, 3, 4])
    assert (halves["half"].dtype, halves["half"].shape) == (np.float16, (2, 3))
    assert rest == expected["mixed"][2:]
    state["array"][0] = 1.0  # it is the joiner's own, to write to


class Life:
    """Checkpoint after checkpoint, whatever happens."""

    def __init__(self, count: int = 100, goal: int = 0) -> None:
        """`goal`: with so many ranks it may stop."""
        self.goal = goal
        began = time.monotonic()
        self.comm = nexar.init()
        self.step, self.count = 0, count
        if self.comm.state is not None:
            check_state(self.comm.state)
            self.step = self.comm.state["step"]
            say(joined=self.comm.rank, size=self.comm.size, step=self.step, seconds=time.monotonic() - began)
        self.stopped = False
        self._settled = False
        mark(self.comm)

    def turn(self, most: float | None = None) -> bool:
        """One round; False: this rank has left. With a file `stop` it may be the last: `stopped` says so, to all."""
        try:
            if not self._settled:  # the first call on every communicator: all take the same step
                self.step, self._settled = int(self.comm.all_reduce(self.step, op="max")), True
            votes = self.comm.all_reduce(np.array([1, Path("stop").exists()]))
            assert votes[0] == self.comm.size
            self.step += 1
            self.stopped = bool(votes[1]) and self.comm.size == self.goal
            if self.stopped:
                return True
            began = time.monotonic()
            change = self.comm.checkpoint(lambda: make_state(self.step, self.count), timeout=most)
        except nexar.MembershipChanged as lost:
            say(lost=sorted(lost.lost), size=lost.communicator.size)
            self._wait_for_driver(lost.communicator)
        else:
            if change is not None:
                seconds = time.monotonic() - began
                say(
                    joined=list(change.joined), left={str(rank): why for rank, why in change.left.items()}, took=seconds
                )
                if change.communicator is None:
                    return False
                self._wait_for_driver(change.communicator)
        time.sleep(INTERVAL)
        return True

    def _wait_for_driver(self, successor: nexar.Communicator) -> None:
        self.comm, self._settled = successor, False
        mark(successor)

    def until(self, size: int) -> None:
        while self.comm.size != size or not self._settled:
            assert self.turn()

    def end(self, **facts: object) -> None:
        """All stop at the same step."""
        say(end=self.comm.rank, size=self.comm.size, step=self.step, **facts)
        self.comm.barrier()
        self.comm.close()


# -- roles -----------------------------------------------------------------------------------------------------


def member(goal: str, count: str = "100") -> None:
    """Until there are so many, and there is a file `stop`."""
    life = Life(int(count), int(goal))
    while not life.stopped:
        assert life.turn()
    life.end()


def tide(count: str) -> None:
    """2 → 5 → 3 → 6: ranks 0 and 3 of the five leave."""
    life = Life(int(count))
    if life.comm.state is None or life.step < 1_000_000:
        life.until(5)
        leaver = life.comm.rank in (0, 3)
        life.step = 1_000_000 + life.step % 1_000_000  # from now on joiners are of the second tide
        if leaver:
            life.comm.leave()
        while life.comm.size == 5:
            if not life.turn():
                return
        Path(f"ebb.{os.getpid()}").touch()
    life.until(6)
    life.end()


def doomed(moment: str) -> None:
    """A joiner that dies while the state comes: when it is offered, or when all of it has come."""
    if moment == "offered":
        state_transfer.StateReceiver._receive = die  # type: ignore[method-assign,assignment]
    else:
        state_transfer.checksum = die  # type: ignore[assignment]
    nexar.init()


def giver(moment: str) -> None:
    """A member that dies, as rank 0, while it hands over: when it is asked for the state, or when it has sent it."""
    if moment == "asked":
        globals()["make_state"] = die
    else:
        state_transfer.wait_or_undo = die  # type: ignore[assignment]
    life = Life(200_000)
    while True:
        life.turn()


def die(*_: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def removing() -> None:
    life = Life()
    if life.comm.rank == 0:
        life.comm.remove(1, "it is too warm there")
    while life.comm.size == 3:
        if not life.turn():
            return
    life.end()


def put_off() -> None:
    """The last rank of two wants to go, at once; the minimum is two."""
    life = Life()
    if life.comm.state is not None:
        life.end()
        return
    assert life.comm.checkpoint() is None  # nothing is pending
    if life.comm.rank == 1:
        life.comm.leave()
    assert life.comm.checkpoint() is None  # it has to stay
    say(stayed=life.comm.rank)
    first = life.comm
    while life.comm is first:
        if not life.turn():
            return
    life.end()


def raising() -> None:
    """The state cannot be had at first."""
    life = Life()
    if life.comm.state is None:
        received = ""
        while not received:
            try:
                life.comm.checkpoint(lambda: {}["the model"])
            except (KeyError, nexar.Cancelled) as error:
                received = f"{type(error).__name__}: {error}"
        say(received=received)
    life.until(3)
    life.end()


def waiting() -> None:
    """For joiners that do not come."""
    life = Life()
    try:
        life.comm.grow(2, timeout=0.5)
    except nexar.OperationTimeout as late:
        say(late=str(late))
    assert life.comm.all_reduce(1) == 2
    life.end()


def random_death() -> None:
    """Whoever finds a file `doom` while somebody waits to come in dies somewhere in that checkpoint."""
    life = Life(20_000, goal=3)
    chance, requests = random.Random(os.getpid()), life.comm._runtime.checkpoint_requests
    mine = requests.mine

    def brought() -> Any:
        """What it brings to a checkpoint."""
        found = mine()
        if found.waiting:
            claim(chance)
        return found

    requests.mine = brought  # type: ignore[method-assign]
    while not life.stopped:
        assert life.turn(most=60)
    life.end()


def claim(chance: random.Random) -> None:
    try:
        Path("doom").rename(f"doomed.{os.getpid()}")
    except FileNotFoundError:
        return
    threading.Timer(chance.uniform(0, 0.03), die).start()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
