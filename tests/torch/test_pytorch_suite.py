"""PyTorch's own tests of a backend pass, with two and four ranks; and the documentation says what came of them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.architecture.sources import ROOT
from tests.processes.scale import FULL
from tests.torch.pytorch_suite import reasons

DOCUMENTED = "With torch 2.15 on a machine without GPU"
EVENT_TIMEOUT = 900.0
pytestmark = pytest.mark.timeout(EVENT_TIMEOUT + 50)


def results(folder: Path, world: int, backend: str = "nexar") -> dict[str, Any]:
    """By name: how each ended, how long it took, and why it was skipped or failed."""
    written = folder / f"{backend}-{world}"
    command = [sys.executable, "-m", "tests.torch.pytorch_suite", "--world", world, "--backend", backend]
    words = [*map(str, command), "--json", str(written)]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=EVENT_TIMEOUT)
    assert written.exists(), ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(written.read_text())["results"]
    return found


def ended(results: dict[str, Any], how: str) -> list[str]:
    return [f"{name}: {words}" for name, (state, _, words) in results.items() if state == how]


def documented() -> str:
    """What the documentation says, in one line; empty for a torch or a machine that it is not about."""
    text = " ".join((ROOT / "docs" / "howto" / "torch.md").read_text().split())
    here = f"With torch {'.'.join(torch.__version__.split('.')[:2])} on a machine without GPU"
    return text if here == DOCUMENTED and not torch.cuda.is_available() else ""


def test_all_of_them_pass_with_two_ranks(tmp_path):
    found = results(tmp_path, 2)
    assert ended(found, "FAILED") == []
    if text := documented():
        assert f"{DOCUMENTED} {len(ended(found, 'passed'))} pass with two ranks" in text
        for kind, count in reasons(found).items():
            assert f"| {count} | {kind} |" in text


def test_all_of_them_pass_with_four_ranks(tmp_path):
    found = results(tmp_path, 4)
    assert ended(found, "FAILED") == []
    if text := documented():
        assert f"and {len(ended(found, 'passed'))} with four, and none fails" in text


@pytest.mark.skipif(not FULL, reason="takes minutes, and is about Gloo: NEXAR_FULL=1 runs it")
def test_at_least_as_many_pass_as_with_gloo(tmp_path):
    ours, theirs = (len(ended(results(tmp_path, 2, backend), "passed")) for backend in ("nexar", "gloo"))
    assert ours >= theirs
    if text := documented():
        assert f"pass with two ranks (Gloo: {theirs})" in text
