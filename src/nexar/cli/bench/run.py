"""One run of `nexar bench`: make the hosts, start the systems, let them take turns, show what was found."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import nexar
from nexar.cli.bench import page
from nexar.cli.bench.comparison import Row, Wishes, rows
from nexar.cli.bench.drawing import artist, draw
from nexar.cli.bench.hosts import opened_hosts
from nexar.cli.bench.measures import MEASURES
from nexar.cli.bench.plans import Plan, Setting, plan_ours, plan_rival
from nexar.cli.bench.runners import Runners
from nexar.environment import inherited
from nexar.launch.plan import without_outer_launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `nexar bench` was asked for, checked."""

    measures: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: int
    hosts: int
    mtu: int
    encrypt_bulk: bool | None
    rivals: tuple[str, ...]
    peers: Path
    wishes: Wishes
    as_json: bool
    plot: Path | None


def run(request: Request) -> bool:
    """Measure and show. Whether all results of nexar were right; UsageError, SystemFailed."""
    python = None if request.plot is None else artist(request.peers)
    with ExitStack() as stack:
        hosts = stack.enter_context(opened_hosts(request.hosts, request.mtu))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nexar-bench-")))
        setting = Setting(
            hosts=hosts,
            ranks=request.ranks,
            cores=len(os.sched_getaffinity(0)),
            folder=folder,
            peers=request.peers,
            python=sys.executable,
            sources=Path(nexar.__file__).parents[1],
        )
        plans = [plan_ours(setting, _variables(request)), *(plan_rival(name, setting) for name in request.rivals)]
        systems = {plan.name: stack.enter_context(_runners(plan, setting)) for plan in plans}
        if not request.as_json:
            print("\n".join(f"# {text}" for text in _introduction(request, list(systems.values()))), flush=True)
        found = list(_measured(request, systems))
    facts = _facts(request, list(systems.values()))
    if request.as_json:
        print(page.as_json(facts, found))
    if python is not None and request.plot is not None:
        draw(python, page.as_json(facts, found), request.plot)
    return not any(row.figures[page.OURS].wrong for row in found if page.OURS in row.figures)


def _measured(request: Request, systems: dict[str, Runners]) -> Iterator[Row]:
    for name in request.measures:
        if not request.as_json:
            print(page.head(name, request.rivals), flush=True)
        shown = []
        for row in rows(systems, MEASURES[name], request.sizes, request.wishes, request.ranks):
            shown.append(row)
            if not request.as_json:
                print(page.line(row, request.rivals), flush=True)
            yield row
        if not request.as_json and page.notes(shown):
            print("\n".join(page.notes(shown)), flush=True)


def _runners(plan: Plan, setting: Setting) -> Runners:
    return Runners(
        plan,
        setting.ranks,
        path=setting.line(plan.name),
        environment=without_outer_launch(inherited()),
        folder=setting.folder,
    )


def _variables(request: Request) -> dict[str, str]:
    if request.encrypt_bulk is None:
        return {}
    return {"NEXAR_ENCRYPT_BULK_TRANSPORT": str(request.encrypt_bulk).lower()}


def _introduction(request: Request, systems: list[Runners]) -> list[str]:
    where = "one host" if request.hosts == 1 else f"two hosts (network namespaces, MTU {request.mtu})"
    lines = [f"{request.ranks} ranks on {where}; {_machine()}"]
    lines += [f"{each.plan.name}: {each.version}; flags: {each.plan.flags}" for each in systems]
    lines.append("time: median of calls, on the slowest rank; systems take turns")
    if request.rivals:
        lines.append("ratio: ours to theirs, of busbw; above 1, nexar is faster")
    return lines


def _machine() -> str:
    return f"{_processor()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        for text in facts.read_text().splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _facts(request: Request, systems: list[Runners]) -> dict[str, object]:
    return {
        "title": "; ".join(_introduction(request, systems)[:1]),
        "machine": _machine(),
        "numpy": version("numpy"),
        "ranks": request.ranks,
        "hosts": request.hosts,
        "mtu": request.mtu if request.hosts > 1 else None,
        "systems": [{"name": each.plan.name, "version": each.version, "flags": each.plan.flags} for each in systems],
    }
