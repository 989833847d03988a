"""One run of `nexar bench` that starts all ranks itself: make the hosts, start the systems, let them take turns.

`nexar bench` as a program that a launcher has started: ours alone, on whatever hosts the ranks are.

    nexar run -n 4 -m nexar bench all_reduce
    nexar run -n 2 --ticket-file T -m nexar bench all_reduce      on each of several hosts

Rank 0 has the table; it tells the others what to measure by messages.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from nexar.cli.bench import report
from nexar.cli.bench.measuring import measure
from nexar.cli.bench.protocol import BenchOrder, BenchReply, parse_order, parse_reply
from nexar.cli.bench.rank import NexarSystem
from nexar.cli.bench.report import BenchReport, BenchRequest, SystemInfo
from nexar.cli.bench.systems import SystemPlan, SystemRanks, SystemSettings, opened_hosts, plan_nexar, plan_other
from nexar.communicator.communicator import Communicator
from nexar.environment import inherited
from nexar.errors import ConfigError
from nexar.launch.init import init
from nexar.launch.plan import without_outer_launch


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSetup:
    """Which systems are started, and where."""

    ranks: int
    hosts: int
    mtu: int
    encrypt_bulk: bool | None
    rivals: tuple[str, ...]
    peers: Path


def run(request: BenchRequest, world: BenchSetup) -> bool:
    """Measure and show. Whether all results of nexar were right; UsageError, SystemFailed."""
    with ExitStack() as stack:
        hosts = stack.enter_context(opened_hosts(world.hosts, world.mtu))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nexar-bench-")))
        setting = SystemSettings(
            hosts=hosts,
            ranks=world.ranks,
            cores=len(os.sched_getaffinity(0)),
            folder=folder,
            peers=world.peers,
            python=sys.executable,
            sources=Path(__file__).parents[3],
        )
        plans = [plan_nexar(setting, _variables(world)), *(plan_other(name, setting) for name in world.rivals)]
        systems = {plan.name: stack.enter_context(_runners(plan, setting)) for plan in plans}
        about = [SystemInfo(name=name, version=each.version, flags=each.plan.flags) for name, each in systems.items()]
        where = "one host" if world.hosts == 1 else f"two hosts (network namespaces, MTU {world.mtu})"
        return BenchReport(request, ranks=world.ranks, where=where, systems=about).measure(systems)


def _runners(plan: SystemPlan, setting: SystemSettings) -> SystemRanks:
    return SystemRanks(
        plan,
        setting.ranks,
        path=setting.line(plan.name),
        environment=without_outer_launch(inherited()),
        folder=setting.folder,
    )


def _variables(world: BenchSetup) -> dict[str, str]:
    """What our ranks are told beside what they inherit."""
    if world.encrypt_bulk is None:
        return {}
    return {"NEXAR_ENCRYPT_BULK_TRANSPORT": str(world.encrypt_bulk).lower()}


_ORDERS: Final = 1
_REPLIES: Final = 2


class LaunchedRanks:
    """All ranks of this launch, told what to do by this one, which is rank 0."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._ours = NexarSystem(comm)
        self.version = self._ours.version

    def ask(self, order: BenchOrder, reply_timeout: float) -> list[BenchReply]:
        """Every rank's reply, by rank."""
        self._tell(order.line(), reply_timeout)
        return [measure(self._ours, order), *(self._reply(rank, reply_timeout) for rank in range(1, self._comm.size))]

    def release(self, reply_timeout: float) -> None:
        """No more orders."""
        self._tell(b"", reply_timeout)

    def _tell(self, line: bytes, reply_timeout: float) -> None:
        for rank in range(1, self._comm.size):
            self._comm.send(np.frombuffer(line, np.uint8), dest=rank, tag=_ORDERS, timeout=reply_timeout)

    def _reply(self, rank: int, reply_timeout: float) -> BenchReply:
        return parse_reply(self._comm.recv(source=rank, tag=_REPLIES, timeout=reply_timeout).tobytes())


def run_inside(request: BenchRequest) -> bool:
    """Measure, and show it on rank 0. Whether all results were right, as far as this rank knows."""
    options = request.options
    with init() as comm:
        if not options.root < comm.size:
            raise ConfigError(variable="-r", value=options.root, allowed=f"0 to {comm.size - 1}")
        if comm.rank:
            _serve(comm, options.reply_timeout)
            return True
        together = LaunchedRanks(comm)
        hosts = len({comm.membership.member(rank).host for rank in range(comm.size)})
        where = "one host" if hosts == 1 else f"{hosts} hosts"
        about = [SystemInfo(name=report.NEXAR, version=together.version, flags="none")]
        right = BenchReport(request, ranks=comm.size, where=where, systems=about).measure({report.NEXAR: together})
        together.release(options.reply_timeout)
        return right


def _serve(comm: Communicator, reply_timeout: float) -> None:
    """Between two orders rank 0 waits for the others' replies, each within its patience, and no longer."""
    ours = NexarSystem(comm)
    while line := comm.recv(source=0, tag=_ORDERS, timeout=reply_timeout * comm.size).tobytes():
        reply = measure(ours, parse_order(line)).line()
        comm.send(np.frombuffer(reply, np.uint8), dest=0, tag=_REPLIES, timeout=reply_timeout)
