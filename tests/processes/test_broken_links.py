"""Two live ranks whose connection breaks, and one that holds the GIL: nobody is expelled for that."""

import time
from pathlib import Path
from typing import Any

import pytest

from nexar_tools.transports import why_unavailable
from tests.processes.scale import measured, sized
from tests.processes.story import Story

HELD = sized(4, 15)


def after(story: Story, rank: int) -> float | None:
    """When this rank has summed on a successor for the first time."""
    return next((float(line["at"]) for line in story.reported(rank, "right") if line["epoch"] > 1), None)


def test_a_connection_that_breaks_and_is_made_anew_costs_nobody_the_membership(
    tmp_path: Path, record_property: Any
) -> None:
    with Story(tmp_path, 4) as story:
        cut = time.monotonic()
        story.order(1, "cut", 2)
        story.await_all(range(4), lambda rank: after(story, rank) is not None, "sum on a successor")
        took = max(after(story, rank) or 0.0 for rank in range(4)) - cut
        story.await_more(range(4))
        story.finish()
        changes = [story.reported(rank, "changed") for rank in range(4)]
    assert all(changes)
    assert all((line["ranks"], line["lost"]) == ([0, 1, 2, 3], {}) for reported in changes for line in reported)
    measured(record_property, recovery_ms=round(took * 1e3, 1))


@pytest.mark.skipif(why_unavailable("quic") is not None, reason=str(why_unavailable("quic")))
def test_a_rank_that_holds_the_gil_is_reported_as_stuck_and_stays(tmp_path: Path) -> None:
    settings = {"transports": "quic", "heartbeat_interval": 0.2, "heartbeat_timeout": sized(1.5, 5.0)}
    with Story(tmp_path, 3, **settings) as story:
        story.order(1, "hold", HELD)
        story.await_all(
            [0, 2], lambda rank: bool(story.reported(rank, "noticed", state="stuck", rank=1)), "word of a stuck rank"
        )
        story.await_more([0, 1, 2])
        story.finish()
        noticed = {rank: story.reported(rank, "noticed") for rank in (0, 2)}
        assert not any(story.reported(rank, "changed") for rank in range(3))
    for lines in noticed.values():
        stuck = [line["cause"] for line in lines if (line["state"], line["rank"]) == ("stuck", 1)]
        assert any("alive" in cause and "stuck" in cause for cause in stuck), lines
        assert all(
            line["state"] in ("stuck", "back") for line in lines if line["rank"] == 1 and "left" not in line["state"]
        )
