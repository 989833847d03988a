"""`nexar bench` as a program that a launcher has started: ours alone, on whatever hosts the ranks are.

    nexar run -n 4 -m nexar bench all_reduce
    nexar run -n 2 --ticket-file T -m nexar bench all_reduce      on each of several hosts

Rank 0 has the table; it tells the others what to measure by messages.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from nexar.cli.bench import page
from nexar.cli.bench.measuring import measure
from nexar.cli.bench.order import Order, Reply, parse_order, parse_reply
from nexar.cli.bench.our_rank import Ours
from nexar.cli.bench.report import About, Report, Request
from nexar.communicator.communicator import Communicator
from nexar.errors import ConfigError
from nexar.launch.init import init

_ORDERS: Final = 1
_REPLIES: Final = 2


class Together:
    """All ranks of this launch, told what to do by this one, which is rank 0."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._ours = Ours(comm)
        self.version = self._ours.version

    def ask(self, order: Order, patience: float) -> list[Reply]:
        """Every rank's reply, by rank."""
        self._tell(order.line(), patience)
        return [measure(self._ours, order), *(self._reply(rank, patience) for rank in range(1, self._comm.size))]

    def release(self, patience: float) -> None:
        """No more orders."""
        self._tell(b"", patience)

    def _tell(self, line: bytes, patience: float) -> None:
        for rank in range(1, self._comm.size):
            self._comm.send(np.frombuffer(line, np.uint8), dest=rank, tag=_ORDERS, timeout=patience)

    def _reply(self, rank: int, patience: float) -> Reply:
        return parse_reply(self._comm.recv(source=rank, tag=_REPLIES, timeout=patience).tobytes())


def run_inside(request: Request) -> bool:
    """Measure, and show it on rank 0. Whether all results were right, as far as this rank knows."""
    wishes = request.wishes
    with init() as comm:
        if not wishes.root < comm.size:
            raise ConfigError(variable="-r", value=wishes.root, allowed=f"0 to {comm.size - 1}")
        if comm.rank:
            _obey(comm, wishes.patience)
            return True
        together = Together(comm)
        hosts = len({comm.membership.member(rank).host for rank in range(comm.size)})
        where = "one host" if hosts == 1 else f"{hosts} hosts"
        about = [About(name=page.OURS, version=together.version, flags="none")]
        right = Report(request, ranks=comm.size, where=where, systems=about).measure({page.OURS: together})
        together.release(wishes.patience)
        return right


def _obey(comm: Communicator, patience: float) -> None:
    """Between two orders rank 0 waits for the others' replies, each within its patience, and no longer."""
    ours = Ours(comm)
    while line := comm.recv(source=0, tag=_ORDERS, timeout=patience * comm.size).tobytes():
        reply = measure(ours, parse_order(line)).line()
        comm.send(np.frombuffer(reply, np.uint8), dest=0, tag=_REPLIES, timeout=patience)
