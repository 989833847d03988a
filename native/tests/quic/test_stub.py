"""The type stub says what the module has."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

import pytest


def test_the_stub_agrees_with_the_module() -> None:
    pytest.importorskip("mypy")
    outcome = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "nexar_native"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_the_stub_is_shipped() -> None:
    package = files("nexar_native")
    assert (package / "py.typed").is_file()
    assert (package / "__init__.pyi").is_file()
    assert (package / "quic.pyi").is_file()
    assert (package / "bulk.pyi").is_file()
    assert (package / "exit_watch.pyi").is_file()
    assert (package / "reduce.pyi").is_file()
    assert (package / "shm.pyi").is_file()
