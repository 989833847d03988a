"""One rank of a story: `story_rank.py PACE`. It sums with the others, round after round, whatever becomes of them.

What it lives through it writes to `diary-RANK`, a line of JSON each, at once: a rank that is killed has written all
that it knew. RANK is always its first one. It stops, with all others, when there is a file `stop`; what is in a file
`order-RANK` it does before the next round.
"""

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import nexar
from nexar.cluster.decisions.membership_events import Loss, LossKind
from nexar.cluster.membership import Change, Membership, encode_membership

SELDOM = 0.02
"""Seconds between two lines that say the same."""


class Diary:
    """What one rank lives through. Any thread."""

    def __init__(self, rank: int) -> None:
        self._file = os.open(f"diary-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what: str, **facts: Any) -> None:
        """One line, whole or not at all: one write, at the end of the file."""
        line = json.dumps({"what": what, "at": time.monotonic(), **facts})
        os.write(self._file, f"{line}\n".encode())


class Life:
    """Of one rank, with whichever communicator it has."""

    def __init__(self, comm: nexar.Communicator, interval: float) -> None:
        self.comm = comm
        self.me = comm.rank
        self.interval = interval
        self.diary = Diary(self.me)
        self._first = {member.node: rank for rank, member in enumerate(comm.membership.members)}
        self._rounds = 0
        self._said: tuple[float, object] = (0.0, None)
        self._observe(comm)
        self.diary.write("here", pid=os.getpid())

    def _observe(self, comm: nexar.Communicator) -> None:
        """Write down each membership when it is adopted, also one that comes to no communicator."""
        runtime = comm._runtime
        adopt = runtime.membership_adopted

        def adopted(change: Change, after: Membership) -> None:
            digest = hashlib.sha256(encode_membership(after)).hexdigest()
            self.diary.write("adopted", epoch=after.epoch, membership=digest, ranks=self._ranks(after))
            adopt(change, after)

        runtime.membership_adopted = adopted  # type: ignore[method-assign]
        self.noticing = comm.failure_events(
            lambda event: self.diary.write("noticed", state=event.state, rank=event.rank, cause=event.cause)
        )

    def _ranks(self, membership: Membership) -> list[int]:
        """Its members, by their first ranks."""
        return [self._first[member.node] for member in membership.members]

    # -- living ----------------------------------------------------------------------------------------------

    def live(self) -> None:
        """Until all stop, or this one is out."""
        while True:
            try:
                if self._sum():
                    return
            except nexar.MembershipChanged as change:
                self._wait_for_driver(change.communicator, change)
            except nexar.PeerLost as lost:
                self._say_error(lost)
                if os.environ.get("NEXAR_RECOVERY_POLICY") != "manual":
                    raise
                self._wait_for_driver(self.comm.shrink())
            except (nexar.NoQuorum, nexar.RecoveryTimeout) as error:  # more may follow, when the network heals
                self._say_error(error)
                if Path("stop").exists():
                    return
                time.sleep(SELDOM)
            except nexar.Expelled as expelled:
                self._say_error(expelled)
                return

    def _sum(self) -> bool:
        """Whether that was the last round. Everybody adds a power of two, so the sum says who took part."""
        self._obey()
        stop = Path("stop").exists()
        x = np.array([2.0**self.me, stop])
        self.comm.all_reduce(x)
        ranks = self._ranks(self.comm.membership)
        self._rounds += 1
        if x[0] != sum(2.0**rank for rank in ranks):
            self.diary.write("wrong", sum=x[0], ranks=ranks, epoch=self.comm.epoch)
        self._say_seldom("right", epoch=self.comm.epoch, rank=self.comm.rank, size=self.comm.size, ranks=ranks)
        if self.interval:
            time.sleep(self.interval)
        return bool(x[1])

    def _wait_for_driver(self, successor: nexar.Communicator, change: nexar.MembershipChanged | None = None) -> None:
        lost = {} if change is None else {str(rank): cause for rank, cause in change.lost.items()}
        self.comm = successor
        ranks = self._ranks(successor.membership)
        self.diary.write("changed", epoch=successor.epoch, rank=successor.rank, ranks=ranks, lost=lost)

    # -- telling ---------------------------------------------------------------------------------------------

    def _say_error(self, error: nexar.NexarError) -> None:
        facts = {
            name: value for name in ("epoch", "reason", "alive", "needed") if (value := getattr(error, name, None))
        }
        self._say_seldom("raised", error=type(error).__name__, text=str(error), **facts)

    def _say_seldom(self, what: str, **facts: Any) -> None:
        now = time.monotonic()
        if facts != self._said[1] or now - self._said[0] > SELDOM:
            self._said = now, facts
            self.diary.write(what, rounds=self._rounds, **facts)

    # -- orders ----------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        order = Path(f"order-{self.me}")
        if order.exists():
            verb, *arguments = json.loads(order.read_text())
            order.unlink()
            self.diary.write("obeys", verb=verb)
            getattr(self, f"do_{verb}")(*arguments)

    def do_cut(self, rank: int) -> None:
        """End the link to this rank, which knows nothing of it."""
        node = next(node for node, first in self._first.items() if first == rank)
        self.comm._runtime.mesh.links()[node].lose("cut by the test")

    def do_starve(self, rank: int, pid: int) -> None:
        """This rank gets no CPU from now on, and this node is informed that its connection to the seed broke."""
        node = next(node for node, first in self._first.items() if first == rank)
        os.kill(pid, signal.SIGSTOP)
        report = Loss(LossKind.SEED_CONNECTION_BROKEN, "its connection to the seed broke")
        self.comm._runtime.seed_reported_death(node, self.comm.epoch, report)

    def do_hold(self, seconds: int) -> None:
        """Do nothing, and let no other thread of Python do anything."""
        ctypes.PyDLL(None).sleep(seconds)

    def do_fail(self) -> None:
        """Leave the cluster by an exception."""
        raise ZeroDivisionError("ordered by the test")


def main(interval: float) -> None:
    with nexar.init() as comm:
        life = Life(comm, interval)
        with life.noticing:
            life.live()
        life.diary.write("leaves")


if __name__ == "__main__":
    main(float(sys.argv[1]))
