"""A process that is stopped: the others go on without it, and when it continues it is notified, and disturbs nobody."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes.scale import measured
from tests.processes.story import Story, causes

TIMEOUT = 2.0


@pytest.mark.parametrize("transports", ["shm,quic,tls", "tls"])
def test_a_rank_that_is_stopped_is_lost_and_when_it_continues_it_is_expelled(
    transports: str, tmp_path: Path, record_property: Any
) -> None:
    settings = {"transports": transports, "heartbeat_interval": 0.2, "heartbeat_timeout": TIMEOUT}
    with Story(tmp_path, 4, **settings) as story:
        stopped = time.monotonic()
        story.stop(1)
        took = story.await_sum([0, 2, 3]) - stopped
        story.go_on(1)
        expelled = story.await_error(1, "Expelled")
        story.await_more([0, 2, 3])
        story.finish()
        (change,) = story.reported(0, "changed")
    assert took > TIMEOUT / 2  # packets were received until it was stopped, heartbeats a little before
    assert (expelled["epoch"], expelled["reason"]) == (2, causes(change)[1])
    assert change["ranks"] == [0, 2, 3]
    measured(record_property, recovery_s=round(took, 2))
