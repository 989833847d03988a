"""Import rules: import-linter checks layers, cycles and restricted imports; this file checks purity."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.sources import PACKAGE, ROOT, files, imports, module_name, shown

PURE_MODULES = [
    "arrays.views",
    "cli.doctor.observations",
    "cli.doctor.reachability",
    "cluster.decisions",
    "cluster.membership",
    "collectives.schedule",
    "collectives.schedules",
    "collectives.selection",
    "config",
    "errors",
    "launch.detect",
    "launch.entry",
    "launch.output_lines",
    "launch.plan",
    "links.carrier_selection",
    "security.authority",
    "security.invitation",
    "topology",
    "transport.unverified",
    "types",
    "wire",
]
"""Modules and packages that compute and do nothing else."""

SIDE_EFFECTS = {"asyncio", "multiprocessing", "os", "random", "select", "selectors", "signal", "socket", "ssl",
                "subprocess", "threading", "time"}  # fmt: skip
"""Modules that give access to the outside world, to chance and to time."""


def pure_files() -> list[Path]:
    return [path for path in files(".py", below=PACKAGE) if any(_belongs_to(path, pure) for pure in PURE_MODULES)]


def _belongs_to(path: Path, pure: str) -> bool:
    return f"{module_name(path)}.".startswith(f"nexar.{pure}.")


def test_the_import_contracts_are_kept():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("pure", PURE_MODULES)
def test_a_pure_module_exists(pure):
    assert any(_belongs_to(path, pure) for path in pure_files())


@pytest.mark.parametrize("path", pure_files(), ids=shown)
def test_a_pure_module_has_no_access_to_the_outside_world(path):
    """An import for annotations only, for example of random.Random, is allowed."""
    assert {name.split(".")[0] for name in imports(path, running=True)} & SIDE_EFFECTS == set()


@pytest.mark.parametrize("path", files(".py", below=PACKAGE), ids=shown)
def test_no_module_imports_the_top_level_package(path):
    assert path.name == "__main__.py" or "nexar" not in imports(path), "import the module, not the package"
