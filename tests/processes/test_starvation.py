"""Healthy ranks that get too little CPU do not take one another for dead."""

import time
from pathlib import Path

import pytest

from tests.processes.nexar_command import Nexar
from tests.processes.scale import FULL
from tests.processes.story import Story

RANKS = 64 if FULL else 16
BARRIERS = 100 if FULL else 30
BUSY = 0 if FULL else 8
STARVED = Path(__file__).with_name("starved_rank.py")
EVENT_TIMEOUT = 400.0
pytestmark = pytest.mark.timeout(EVENT_TIMEOUT + 60)


@pytest.mark.full
def test_ranks_that_starve_lose_nobody(tmp_path: Path) -> None:
    with Nexar("run", "-n", str(RANKS), str(STARVED), str(BARRIERS), str(BUSY), cwd=tmp_path) as launched:
        assert launched.end(EVENT_TIMEOUT) == 0, launched.stderr
    assert launched.stdout.count("lost nobody") == RANKS


@pytest.mark.full
def test_a_rank_that_gets_no_cpu_while_it_is_probed_is_given_the_heartbeat_timeout(tmp_path: Path) -> None:
    """Its system takes connections for it, and it answers nothing for three seconds of ten."""
    with Story(tmp_path, 3, heartbeat_timeout=10) as story:
        (here,) = story.reported(1, "here")
        story.order(0, "starve", 1, here["pid"])
        story.await_all([0], lambda rank: bool(story.reported(rank, "obeys")), "order")
        time.sleep(3.0)  # what the story is about: three times as long as a probe takes on an idle machine
        story.go_on(1)
        story.await_more([0, 1, 2])
        assert not any(story.reported(rank, "noticed", state="lost") for rank in range(3)), story.describe()
        assert not any(story.reported(rank, "adopted") for rank in range(3)), story.describe()
        story.finish()
