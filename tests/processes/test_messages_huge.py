"""A message of more than 4 GiB from one process to another, through a communicator."""

import time
from functools import partial
from typing import Any

import pytest

from nexar.communicator.communicator import Communicator
from nexar.launch.spawn import spawn
from tests.processes.scale import MIB, measured, schemes
from tests.processes.test_link_huge import (
    NEEDED,
    SECONDS,
    SIZE,
    available_bytes,
    count_up,
    misplaced,
    numbers,
    peak_bytes,
)

PIECES = 3


def talk(comm: Communicator, *, size: int, verb: str) -> tuple[int, int, float]:
    """How many numbers came wrong, what it cost beside the array, how long it took."""
    array = numbers(size)
    cuts = [array[start : start + len(array) // PIECES] for start in range(0, len(array), len(array) // PIECES)]
    if comm.rank == 0:
        count_up(array)
    comm.barrier(timeout=SECONDS)
    before, begin = peak_bytes(), time.monotonic()
    if verb == "array":
        comm.send(array, 1, timeout=SECONDS) if comm.rank == 0 else comm.recv(array, 0, timeout=SECONDS)
    else:
        comm.send_iov(cuts, 1, timeout=SECONDS) if comm.rank == 0 else comm.recv_iov(cuts, 0, timeout=SECONDS)
    seconds = time.monotonic() - begin
    grown = peak_bytes() - before
    return misplaced(array), grown, seconds


@pytest.mark.full
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("verb", ["array", "buffers"])
@schemes("quic", "tls", "shm")
def test_a_message_of_5_gib_arrives_in_its_place_and_nowhere_else(
    scheme: str, verb: str, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEXAR_FULL", raising=False)  # no setting of nexar's, which would say so
    if available_bytes() < NEEDED:
        pytest.skip(f"needs {NEEDED // MIB} MiB of free memory, there are {available_bytes() // MIB}")
    transports = ("shm", "tls") if scheme == "shm" else (scheme,)
    results = spawn(partial(talk, size=SIZE, verb=verb), 2, transports=transports)
    growth = [grown // MIB for _, grown, _ in results]
    measured(
        record_property, scheme=scheme, verb=verb, mib=SIZE // MIB, seconds=round(results[0][2], 2), growth_mib=growth,
        gigabytes_per_second=round(SIZE / results[0][2] / 1e9, 2),
    )  # fmt: skip
    assert [wrong for wrong, _, _ in results] == [0, 0]
    assert max(growth) < 96
