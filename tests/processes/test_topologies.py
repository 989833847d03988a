"""Ranks of sparse worlds are killed: who is left agrees over whatever ways are left, and sums right."""

from pathlib import Path
from typing import Any

import pytest

from tests.processes.launcher import EVENT_TIMEOUT
from tests.processes.nexar_command import Nexar
from tests.processes.scale import measured, sized
from tests.processes.story import Story

TOPOLOGIES = sized(("k_regular:2", "hypercube"), ("k_regular:2", "k_regular:4", "hypercube"))


@pytest.mark.full
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_rank_is_killed_and_the_others_go_on(topology: str, tmp_path: Path, record_property: Any) -> None:
    size = sized(5, 9)
    left = [rank for rank in range(size) if rank != 1]
    with Story(tmp_path, size, topology=topology) as story:
        killed = story.kill(1)
        took = story.await_sum(left) - killed
        story.await_more(left)
        story.finish()
    measured(record_property, topology=topology, recovery_ms=round(took * 1e3, 1))


@pytest.mark.full
def test_a_ring_that_is_cut_in_two_heals(tmp_path: Path, record_property: Any) -> None:
    """Neither half reaches the other over neighbours: control dials whom it needs, and the ring is closed anew."""
    with Story(tmp_path, 6, topology="k_regular:2") as story:
        killed = story.kill(1, 4)
        took = story.await_sum([0, 2, 3, 5]) - killed
        story.await_more([0, 2, 3, 5])
        story.finish()
    measured(record_property, recovery_ms=round(took * 1e3, 1))


ENDING_FIRST = """
import os, signal, sys
from pathlib import Path
import numpy as np
import nexar

comm = nexar.init()
rest = comm.group([0, 2])
comm.barrier()
if rest is None:
    if sys.argv[1] == "closes":
        comm.close()
    Path(f"gone{comm.rank}").touch()
    if sys.argv[1] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit()
over, rounds = 0, 0
while over < 20:
    opposite = 1 - rest.rank
    rest.send(np.array([rounds]), opposite, tag=rounds)
    assert rest.recv(source=opposite, tag=rounds)[0] == rounds
    over += int(rest.all_reduce(len(list(Path(".").glob("gone*"))), op="min")) == 2
    rounds += 1
rest.barrier()
print("shortcuts", comm.stats()["relay"]["shortcuts"])
comm.close()
"""


@pytest.mark.full
@pytest.mark.parametrize("manner", ["closes", "dies"])
def test_who_ends_first_takes_no_way_of_the_others_along(manner: str, tmp_path: Path, record_property: Any) -> None:
    """Of a ring of four, 1 and 3 end: between 0 and 2 there is no way left, and they talk to each other."""
    script = tmp_path / "ending_first.py"
    script.write_text(ENDING_FIRST)
    with Nexar(
        "run", "-n", 4, "--on-failure", "continue", script, manner, cwd=tmp_path, NEXAR_TOPOLOGY="k_regular:2"
    ) as run:
        assert run.end(2 * EVENT_TIMEOUT) == 0, run.stderr
    shortcuts = [int(line.split()[-1]) for line in run.stdout.splitlines()]
    assert len(shortcuts) == 2
    measured(record_property, shortcuts=sum(shortcuts))
