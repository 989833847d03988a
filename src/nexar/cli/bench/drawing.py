"""Has the plot drawn: by this interpreter if it has matplotlib, else by the one that `make bench-peers` made."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from nexar.cli.bench import plot
from nexar.errors import UsageError

_PATIENCE = 120.0


def artist(peers: Path) -> str:
    """An interpreter with matplotlib. UsageError says how to get one; asked before anything is measured."""
    if importlib.util.find_spec("matplotlib") is not None:
        return sys.executable
    python = peers / "gloo" / "bin" / "python"
    if not python.exists():
        raise UsageError("--plot needs matplotlib: pip install matplotlib, or `make bench-peers`, which brings it")
    return str(python)


def draw(python: str, results: str, path: Path) -> None:
    """Results as JSON → a picture in a file, whose ending says of which kind."""
    program = [python, str(plot.__file__), str(path)]
    done = subprocess.run(program, input=results, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(f"--plot {path} was not drawn: {last}")
