"""Checks all packages that nexar uses: licences, sources, bans, and that their versions are locked.

Needs no network. Python packages are those of the running environment, crates those of native/Cargo.lock.
`setup/packages.toml` holds the policy.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
OURS = frozenset({"nexar", "nexar-native"})
_TOKEN = re.compile(r"\(|\)|[^()\s]+")


def main() -> int:
    """Prints violations; 0 if there are none."""
    policy = tomllib.loads((HERE / "packages.toml").read_text())
    python, crates = list(_check_python(policy)), list(_check_crates(policy))
    for fault in [*python, *crates]:
        print(f"packages: {fault}")
    return 1 if python or crates else 0


# ---------------------------------------------------------------- Python


def _check_python(policy: dict[str, Any]) -> Iterator[str]:
    locked = _locked(HERE / "requirements" / "dev.txt")
    runtime, everything = _closure({""}), _closure({"", "dev"})
    for name, found in sorted(everything.items()):
        allowed = _allowed(policy, tools=name not in runtime)
        if name in policy["banned"]["python"]:
            yield f"{name} is banned: {policy['banned']['python'][name]}"
        if found.version not in locked.get(name, ()):
            yield f"{name} {found.version} is not what setup/requirements/dev.txt locks; run make lock, then make setup"
        licence = _licence(found, policy["synonyms"])
        if not permits(licence, allowed):
            yield f"{name} {found.version} has the licence {licence!r}, which setup/packages.toml does not allow"


def _locked(path: Path) -> dict[str, set[str]]:
    """Versions by name: a package may have several, for different interpreters."""
    versions: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", path.read_text(), re.MULTILINE):
        versions.setdefault(canonicalize_name(name), set()).add(version)
    return versions


def _closure(extras: set[str]) -> dict[str, Distribution]:
    """The transitive dependencies of nexar with these extras, for this interpreter and system."""
    found: dict[str, Distribution] = {}
    asked: set[tuple[str, frozenset[str]]] = set()
    waiting = [("nexar", frozenset(extras))]
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in asked:
            continue
        asked.add((name, wanted))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue  # pip has installed what is needed here; the rest is for other systems
        if name not in OURS:
            found[name] = package
        waiting += [
            (canonicalize_name(needed.name), frozenset({"", *needed.extras}))
            for needed in map(Requirement, package.requires or ())
            if any(needed.marker is None or needed.marker.evaluate({"extra": extra}) for extra in wanted)
        ]
    return found


def _licence(package: Distribution, synonyms: dict[str, str]) -> str:
    """The SPDX expression that the package states, or that we know its text to mean."""
    facts: Any = package.metadata
    stated = facts.get("License-Expression") or ""
    text = (facts.get("License") or "").strip()
    classifiers = [each.rpartition(" :: ")[2] for each in facts.get_all("Classifier") or () if "License ::" in each]
    for each in (stated, text, *classifiers):
        if each and "\n" not in each and (each in synonyms or each == stated or permits(each, frozenset({each}))):
            return synonyms.get(each, each)
    return stated or text.partition("\n")[0] or ", ".join(classifiers) or "none"


# ---------------------------------------------------------------- Rust


def _check_crates(policy: dict[str, Any]) -> Iterator[str]:
    manifest = HERE.parent / "native" / "Cargo.toml"
    if shutil.which("cargo") is None or not manifest.exists():
        print("packages: crates not checked: no cargo on PATH, or no crate")
        return
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--manifest-path", str(manifest)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        yield f"cargo metadata --locked failed: {ran.stderr.strip()}"
        return
    allowed = _allowed(policy, tools=False)
    for crate in json.loads(ran.stdout)["packages"]:
        who = f"crate {crate['name']} {crate['version']}"
        source = crate["source"]
        if crate["name"] in policy["banned"]["rust"]:
            yield f"{who} is banned: {policy['banned']['rust'][crate['name']]}"
        if source is not None and not (source.startswith("registry+") and source.endswith("/crates.io-index")):
            yield f"{who} comes from {source}; only crates.io is allowed"
        if not permits(crate["license"] or "none", allowed):
            yield f"{who} has the licence {crate['license']!r}, which setup/packages.toml does not allow"


# ---------------------------------------------------------------- licences


def _allowed(policy: dict[str, Any], *, tools: bool) -> frozenset[str]:
    licences = policy["licences"]
    return frozenset([*licences["runtime"], *(licences["tools"] if tools else ())])


def permits(expression: str, allowed: frozenset[str]) -> bool:
    """Whether the expression can be satisfied with allowed licences. False if it cannot be parsed."""
    tokens = _TOKEN.findall(expression.replace("/", " OR "))
    try:
        verdict = _either(tokens, allowed)
    except IndexError:
        return False
    return verdict and not tokens


def _either(tokens: list[str], allowed: frozenset[str]) -> bool:
    verdict = _both(tokens, allowed)
    while tokens and tokens[0].upper() == "OR":
        tokens.pop(0)
        verdict = _both(tokens, allowed) or verdict
    return verdict


def _both(tokens: list[str], allowed: frozenset[str]) -> bool:
    verdict = _one(tokens, allowed)
    while tokens and tokens[0].upper() == "AND":
        tokens.pop(0)
        verdict = _one(tokens, allowed) and verdict
    return verdict


def _one(tokens: list[str], allowed: frozenset[str]) -> bool:
    name = tokens.pop(0)
    if name == "(":
        verdict = _either(tokens, allowed)
        return tokens.pop(0) == ")" and verdict
    if tokens and tokens[0].upper() == "WITH":
        tokens.pop(0)
        name = f"{name} WITH {tokens.pop(0)}"
    return name in allowed


if __name__ == "__main__":
    sys.exit(main())
