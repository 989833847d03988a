"""How many threads a rank has, idle and while it recovers from the death of another."""

import json
from pathlib import Path
from typing import Any

from tests.processes.nexar_command import Nexar
from tests.processes.scale import measured

RANK = Path(__file__).with_name("threads_rank.py")
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
        # The QUIC endpoint has one native thread, which is not Python's and does not need the GIL.
        assert set(each["native_names"]) <= {"nexar-quic"}, each
        assert each["native"] <= 1, each
        assert not [name for name in each["after"] if name.startswith("nexar-dial")], each
    counts = {name: [len(each[name]) for each in facts] for name in ("idle", "recovering", "after")}
    measured(record_property, **counts)
