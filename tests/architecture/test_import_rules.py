"""Who may import whom. Floors, rings and doors are contracts of import-linter; purity is checked here, by reading."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGE, ROOT, files, imports, module_name, shown

PURE_ROOMS = [
    "arrays.partition",
    "cli.doctor.advice",
    "cli.doctor.observations",
    "cli.doctor.questions",
    "cli.doctor.reachability",
    "cluster.change",
    "cluster.circle",
    "cluster.decisions",
    "cluster.membership",
    "collectives.choose",
    "collectives.schedule",
    "collectives.schedules",
    "config",
    "errors",
    "launch.detect",
    "launch.door",
    "launch.lines",
    "launch.plan",
    "launch.slurm",
    "launch.start",
    "links.carrier",
    "security.invitation",
    "security.renewal",
    "topology",
    "transport.pending_connections",
    "types",
    "wire",
]
"""Rooms that think and do not act. A room on this list is checked from the day it exists."""

WORLD = {"asyncio", "multiprocessing", "os", "random", "select", "selectors", "signal", "socket", "ssl", "subprocess",
         "threading", "time"}  # fmt: skip
"""Modules by which the outside world, chance and time come in."""


def pure_files() -> list[Path]:
    return [path for path in files(".py", below=PACKAGE) if _is_pure(module_name(path).removeprefix("nexar."))]


def _is_pure(module: str) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in PURE_ROOMS)


def test_the_contracts_of_the_house_are_kept():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_there_are_pure_rooms_to_check():
    assert {module_name(path) for path in pure_files()} >= {"nexar.types", "nexar.errors", "nexar.config", "nexar.wire"}


@pytest.mark.parametrize("path", pure_files(), ids=shown)
def test_a_pure_room_imports_nothing_of_the_world(path):
    """To name the type of what is handed in, a source of chance for example, is no import."""
    assert {name.split(".")[0] for name in imports(path, running=True)} & WORLD == set()


@pytest.mark.parametrize("path", files(".py", below=PACKAGE), ids=shown)
def test_nobody_inside_comes_in_by_the_front_door(path):
    assert path.name == "__main__.py" or "nexar" not in imports(path), "import the room, not the package"
