"""Runs `nexar bench`: with ranks that it starts itself, or inside the ranks of a launch.

nexar run -n 4 -m nexar bench all_reduce
nexar run -n 2 --ticket-file T -m nexar bench all_reduce      on each of several hosts
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
    """The systems to start, and their hosts."""

    ranks: int
    hosts: int
    mtu: int
    encrypt_bulk: bool | None
    others: tuple[str, ...]
    peers: Path


def run(request: BenchRequest, setup: BenchSetup) -> bool:
    """Return whether all results of nexar were right. Raises UsageError, SystemFailed."""
    with ExitStack() as stack:
        hosts = stack.enter_context(opened_hosts(setup.hosts, setup.mtu))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nexar-bench-")))
        setting = SystemSettings(
            hosts=hosts,
            ranks=setup.ranks,
            cores=len(os.sched_getaffinity(0)),
            folder=folder,
            peers=setup.peers,
            python=sys.executable,
            sources=Path(__file__).parents[3],
        )
        plans = [plan_nexar(setting, _variables(setup)), *(plan_other(name, setting) for name in setup.others)]
        systems = {plan.name: stack.enter_context(_start_ranks(plan, setting)) for plan in plans}
        infos = [SystemInfo(name=name, version=each.version, flags=each.plan.flags) for name, each in systems.items()]
        where = "one host" if setup.hosts == 1 else f"two hosts (network namespaces, MTU {setup.mtu})"
        return BenchReport(request, ranks=setup.ranks, where=where, systems=infos).measure(systems)


def _start_ranks(plan: SystemPlan, setting: SystemSettings) -> SystemRanks:
    return SystemRanks(
        plan,
        setting.ranks,
        path=setting.line(plan.name),
        environment=without_outer_launch(inherited()),
        folder=setting.folder,
    )


def _variables(setup: BenchSetup) -> dict[str, str]:
    if setup.encrypt_bulk is None:
        return {}
    return {"NEXAR_ENCRYPT_BULK_TRANSPORT": str(setup.encrypt_bulk).lower()}


_ORDERS: Final = 1
_REPLIES: Final = 2


class LaunchedRanks:
    """All ranks of this launch, directed by rank 0."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._system = NexarSystem(comm)
        self.version = self._system.version

    def ask(self, order: BenchOrder, reply_timeout: float) -> list[BenchReply]:
        self._send_order(order.line(), reply_timeout)
        return [measure(self._system, order), *(self._reply(rank, reply_timeout) for rank in range(1, self._comm.size))]

    def release(self, reply_timeout: float) -> None:
        self._send_order(b"", reply_timeout)

    def _send_order(self, line: bytes, reply_timeout: float) -> None:
        for rank in range(1, self._comm.size):
            self._comm.send(np.frombuffer(line, np.uint8), dest=rank, tag=_ORDERS, timeout=reply_timeout)

    def _reply(self, rank: int, reply_timeout: float) -> BenchReply:
        return parse_reply(self._comm.recv(source=rank, tag=_REPLIES, timeout=reply_timeout).tobytes())


def run_inside(request: BenchRequest) -> bool:
    """Rank 0 directs the others and prints. Returns whether all results that this rank knows were right."""
    options = request.options
    with init() as comm:
        if not options.root < comm.size:
            raise ConfigError(variable="-r", value=options.root, allowed=f"0 to {comm.size - 1}")
        if comm.rank:
            _serve(comm, options.reply_timeout)
            return True
        launched = LaunchedRanks(comm)
        hosts = len({comm.membership.member(rank).host for rank in range(comm.size)})
        where = "one host" if hosts == 1 else f"{hosts} hosts"
        infos = [SystemInfo(name=report.NEXAR, version=launched.version, flags="none")]
        correct = BenchReport(request, ranks=comm.size, where=where, systems=infos).measure({report.NEXAR: launched})
        launched.release(options.reply_timeout)
        return correct


def _serve(comm: Communicator, reply_timeout: float) -> None:
    """Between two orders rank 0 waits at most `reply_timeout` for each reply."""
    system = NexarSystem(comm)
    while line := comm.recv(source=0, tag=_ORDERS, timeout=reply_timeout * comm.size).tobytes():
        reply = measure(system, parse_order(line)).line()
        comm.send(np.frombuffer(reply, np.uint8), dest=0, tag=_REPLIES, timeout=reply_timeout)
