"""The type stub says what the module has."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest


def test_the_stub_agrees_with_the_module(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    allowed = tmp_path / "allowed"
    allowed.write_text("nexar_quic.nexar_quic\n")  # the extension inside the package
    outcome = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "nexar_quic", "--allowlist", str(allowed)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_the_stub_is_shipped() -> None:
    package = files("nexar_quic")
    assert (package / "py.typed").is_file()
    assert (package / "__init__.pyi").is_file()
