"""Healthy ranks that get too little CPU do not take one another for dead."""

from pathlib import Path

import pytest

from tests.processes.nexar_command import Nexar
from tests.processes.scale import FULL

RANKS = 64 if FULL else 16
BARRIERS = 100 if FULL else 30
BUSY = 0 if FULL else 8
STARVED = Path(__file__).with_name("starved_rank.py")
PATIENCE = 400.0
pytestmark = pytest.mark.timeout(PATIENCE + 60)


def test_ranks_that_starve_lose_nobody(tmp_path: Path) -> None:
    with Nexar("run", "-n", str(RANKS), str(STARVED), str(BARRIERS), str(BUSY), cwd=tmp_path) as launched:
        assert launched.end(PATIENCE) == 0, launched.stderr
    assert launched.stdout.count("lost nobody") == RANKS
