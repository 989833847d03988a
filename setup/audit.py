"""Reports known vulnerabilities of locked packages: pip-audit for Python packages, cargo-audit for crates.

Exit status: 0 none known, 1 a vulnerability is known, 2 an advisory database could not be queried; the last is not an
approval.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CARGO = HERE.parent / "native"
UNKNOWN = 2


def main() -> int:
    """Queries all; a known vulnerability takes precedence over a failed query."""
    answers = [_audit_python(path) for path in sorted((HERE / "requirements").glob("*.txt"))]
    answers.append(_audit_crates())
    if UNKNOWN in answers:
        print("audit: INCOMPLETE: an advisory database could not be asked (see above); this is no approval")
    return 1 if 1 in answers else max(answers)


def _audit_python(path: Path) -> int:
    shown = path.relative_to(HERE.parent)
    command = [sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip", "--requirement", str(path)]
    ran = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    report = _report(ran.stdout)
    if report is None:
        return _unreachable(f"Python packages of {shown}", ran.stderr)
    found = [(each["name"], each["version"], flaw) for each in report["dependencies"] for flaw in each.get("vulns", ())]
    for name, version, flaw in found:
        fixed = ", ".join(flaw["fix_versions"]) or "none yet"
        print(f"audit: {shown}: {name} {version}: {flaw['id']} (fixed in: {fixed})")
    print(f"audit: {shown}: {len(report['dependencies'])} packages, {len(found)} known vulnerabilities")
    return 1 if found else 0


def _audit_crates() -> int:
    if shutil.which("cargo-audit") is None:
        return _unreachable("crates", "cargo-audit is not installed: cargo install --locked cargo-audit")
    command = ["cargo", "audit", "--json", "--file", str(CARGO / "Cargo.lock")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    report = _report(ran.stdout)
    if report is None:
        return _unreachable("crates", ran.stderr)
    found = report["vulnerabilities"]["list"]
    for flaw in found:
        print(f"audit: crate {flaw['package']['name']} {flaw['package']['version']}: {flaw['advisory']['id']}")
    print(
        f"audit: native/Cargo.lock: {report['lockfile']['dependency-count']} crates, {len(found)} known vulnerabilities"
    )
    return 1 if found else 0


def _report(text: str) -> Any:
    """The tool's report; None if it produced none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _unreachable(what: str, why: str) -> int:
    reason = next((line for line in reversed(why.strip().splitlines()) if line.strip()), "no reason given")
    print(f"audit: {what}: NOT CHECKED: the advisory database cannot be reached, or the tool failed: {reason.strip()}")
    return UNKNOWN


if __name__ == "__main__":
    sys.exit(main())
