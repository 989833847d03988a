"""How many threads a rank has, idle and while it recovers from the death of another, and how often these hand over."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.processes.nexar_command import Nexar
from tests.processes.scale import measured

RANK = Path(__file__).with_name("threads_rank.py")
HANDOVER_RANK = Path(__file__).with_name("handover_rank.py")
MAX_HANDOVERS = 2  # from the thread that notes a loss to the one that raises: each costs a wake-up and the GIL
MAX_IDLE = 6
"""The main thread, the control loop, the progress thread, the seed session; under `nexar run` also a thread that
reports how the rank ends, and one that closes the node when the main thread has ended.
"""
MAX_RECOVERING = 14  # builds and dials come on top of it


def test_a_rank_has_few_threads_idle_and_while_it_recovers(tmp_path: Path, record_property: Any) -> None:
    command = ("run", "-n", 4, "--on-failure", "continue", RANK)
    with Nexar(*command, cwd=tmp_path, OPENBLAS_NUM_THREADS="1") as ran:
        ran.end()
    facts = [json.loads(line.partition("] ")[2]) for line in ran.stdout.splitlines() if '"idle"' in line]
    assert len(facts) == 3, ran.stderr
    for each in facts:
        assert len(each["idle"]) <= MAX_IDLE, each
        assert len(each["recovering"]) <= MAX_RECOVERING, each
        # The QUIC endpoint and the watch for ended processes have a native thread each. It is not Python's and does
        # not need the GIL; the kernel lets no thread wait for sockets and futexes together.
        assert set(each["native_names"]) <= {"nexar-quic", "nexar-exits"}, each
        assert each["native"] <= 2, each
        assert not [name for name in each["after"] if name.startswith("nexar-dial")], each
    counts = {name: [len(each[name]) for each in facts] for name in ("idle", "recovering", "after")}
    measured(record_property, **counts)


def test_few_threads_hand_over_from_a_death_to_the_exception(tmp_path: Path, record_property: Any) -> None:
    command = ("run", "-n", 4, "--on-failure", "continue", HANDOVER_RANK)
    with Nexar(*command, cwd=tmp_path, OPENBLAS_NUM_THREADS="1") as ran:
        ran.end()
    facts = [json.loads(line.partition("] ")[2]) for line in ran.stdout.splitlines() if '"threads"' in line]
    assert len(facts) == 3, ran.stderr
    handovers = [sum(one != other for one, other in pairwise(each["threads"])) for each in facts]
    measured(record_property, handovers=handovers, threads=[each["threads"] for each in facts])
    assert max(handovers) <= MAX_HANDOVERS, facts
    assert all(each["threads"][-2:] == ["MainThread"] * 2 for each in facts), "the caller drives the build"
