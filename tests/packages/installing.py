"""Installs a package of this directory as an installer would: its module, and beside it what its metadata says."""

import shutil
import tomllib
from pathlib import Path

HERE = Path(__file__).parent


def install(name: str, into: Path) -> str:
    """The package of the folder `name`; its name. Put `into` on the path."""
    project = tomllib.loads((HERE / name / "pyproject.toml").read_text())
    facts = project["project"]
    for module in project["tool"]["setuptools"]["py-modules"]:
        shutil.copy(HERE / name / f"{module}.py", into)
    _write_metadata(into, facts["name"], facts["version"], facts["entry-points"])
    return str(facts["name"])


def install_broken(name: str, group: str, point: str, into: Path) -> None:
    """A package whose module is missing."""
    _write_metadata(into, name, "0.1.0", {group: {point: "a_module_that_is_nowhere:Thing"}})


def _write_metadata(into: Path, name: str, version: str, groups: dict[str, dict[str, str]]) -> None:
    folder = into / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [line for group, points in groups.items() for line in (f"[{group}]", *map(" = ".join, points.items()))]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
