"""One run of `nexar bench` that starts all ranks itself: make the hosts, start the systems, let them take turns."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from nexar.cli.bench.hosts import opened_hosts
from nexar.cli.bench.plans import Plan, Setting, plan_ours, plan_rival
from nexar.cli.bench.report import About, Report, Request
from nexar.cli.bench.runners import Runners
from nexar.environment import inherited
from nexar.launch.plan import without_outer_launch


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Which systems are started, and where."""

    ranks: int
    hosts: int
    mtu: int
    encrypt_bulk: bool | None
    rivals: tuple[str, ...]
    peers: Path


def run(request: Request, world: World) -> bool:
    """Measure and show. Whether all results of nexar were right; UsageError, SystemFailed."""
    with ExitStack() as stack:
        hosts = stack.enter_context(opened_hosts(world.hosts, world.mtu))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nexar-bench-")))
        setting = Setting(
            hosts=hosts,
            ranks=world.ranks,
            cores=len(os.sched_getaffinity(0)),
            folder=folder,
            peers=world.peers,
            python=sys.executable,
            sources=Path(__file__).parents[3],
        )
        plans = [plan_ours(setting, _variables(world)), *(plan_rival(name, setting) for name in world.rivals)]
        systems = {plan.name: stack.enter_context(_runners(plan, setting)) for plan in plans}
        about = [About(name=name, version=each.version, flags=each.plan.flags) for name, each in systems.items()]
        where = "one host" if world.hosts == 1 else f"two hosts (network namespaces, MTU {world.mtu})"
        return Report(request, ranks=world.ranks, where=where, systems=about).measure(systems)


def _runners(plan: Plan, setting: Setting) -> Runners:
    return Runners(
        plan,
        setting.ranks,
        path=setting.line(plan.name),
        environment=without_outer_launch(inherited()),
        folder=setting.folder,
    )


def _variables(world: World) -> dict[str, str]:
    """What our ranks are told beside what they inherit."""
    if world.encrypt_bulk is None:
        return {}
    return {"NEXAR_ENCRYPT_BULK_TRANSPORT": str(world.encrypt_bulk).lower()}
