"""Import rules: `make lint` checks layers, cycles and restricted imports; this file checks purity."""

from pathlib import Path

from tests.architecture.sources import PACKAGE, files, imports, module_name, shown

PURE_MODULES = [
    "arrays.views",
    "cli.doctor.observations",
    "cli.doctor.reachability",
    "cluster.decisions",
    "cluster.membership",
    "collectives.operations",
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


def test_every_pure_module_exists():
    assert [pure for pure in PURE_MODULES if not any(_belongs_to(path, pure) for path in pure_files())] == []


def test_a_pure_module_has_no_access_to_the_outside_world():
    """An import for annotations only, for example of random.Random, is allowed."""
    imported = {shown(path): {name.split(".")[0] for name in imports(path, running=True)} for path in pure_files()}
    assert {path: names & SIDE_EFFECTS for path, names in imported.items() if names & SIDE_EFFECTS} == {}


def test_no_module_imports_the_top_level_package():
    """Import the module, not the package."""
    paths = [path for path in files(".py", below=PACKAGE) if path.name != "__main__.py"]
    assert [shown(path) for path in paths if "nexar" in imports(path)] == []
