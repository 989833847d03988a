"""Compressed reductions of real processes, one of which is killed in the middle of a call."""

from pathlib import Path

import pytest

from tests.processes.nexar_command import Nexar, introductions
from tests.processes.scale import sized

RANK = Path(__file__).with_name("compressed_rank.py")
ROOT = Path(__file__).parents[2]


FEW = [("topk", "tls"), ("randomk", "shm,tls")]


@pytest.mark.parametrize(("compressor", "transports"), sized(FEW, [*FEW, ("int8", "shm,tls"), ("topk", "quic")]))
def test_survivors_find_array_and_residual_as_they_were_and_go_on(
    compressor: str, transports: str, tmp_path: Path
) -> None:
    with Nexar(
        "run", "-n", 3, "--on-failure", "continue", RANK, compressor, cwd=tmp_path, NEXAR_TRANSPORTS=transports
    ) as running:
        reported = introductions(running)
    assert sorted(reported) == [0, 1]
    assert [(each["changes"], each["size"], each["untouched"]) for each in reported.values()] == [(1, 2, True)] * 2
    assert reported[0]["last"] == reported[1]["last"]
