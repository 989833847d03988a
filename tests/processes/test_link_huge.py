"""An array of more than 4 GiB through a link: lengths and offsets that no 32 bits hold, and no copy of it anywhere."""

import mmap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nexar.links.link import Link
from nexar_tools.bare_nodes import LinkedNode
from nexar_tools.peer_process import PeerProcess
from tests.processes.scale import MIB, measured, schemes, sized
from tests.processes.talk import post, receive, say

SIZE = sized(64 * MIB, 5 << 30)
NEEDED = 2 * SIZE + 1024 * MIB  # both arrays are real memory
BLOCK = 8 * MIB // 8
SECONDS = 240.0


def available_bytes() -> int:
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(facts["MemAvailable"].split()[0]) * 1024


def peak_bytes() -> int:
    """The most memory this process ever had."""
    facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(facts["VmHWM"].split()[0]) * 1024


def numbers(size: int) -> NDArray[np.uint64]:
    """Memory whose pages are all there."""
    made = np.frombuffer(mmap.mmap(-1, size), np.uint64)
    made.fill(0)
    return made


def count_up(array: NDArray[np.uint64]) -> None:
    for start in range(0, len(array), BLOCK):
        array[start : start + BLOCK] = np.arange(start, min(start + BLOCK, len(array)), dtype=np.uint64)


def misplaced(array: NDArray[np.uint64]) -> int:
    """How many numbers are not where they were sent from."""
    wrong = 0
    for start in range(0, len(array), BLOCK):
        block = array[start : start + BLOCK]
        wrong += int(np.count_nonzero(block != np.arange(start, start + len(block), dtype=np.uint64)))
    return wrong


def take_in(node: LinkedNode, link: Link, size: int) -> list[int]:
    """How many numbers came wrong, and what it cost beside the array."""
    array = numbers(size)
    operation = post(node, link.peer, 1, array.view(np.uint8).data)
    before = peak_bytes()
    say(link, 2, b"ready")
    node.wait(operation, timeout=SECONDS)
    return [peak_bytes() - before, misplaced(array)]


@pytest.mark.full
@pytest.mark.timeout(2 * SECONDS)
@schemes("quic", "tls", "shm")
def test_an_array_of_5_gib_arrives_in_its_place_and_nowhere_else(scheme: str, record_property: Any) -> None:
    if available_bytes() < NEEDED:
        pytest.skip(f"needs {NEEDED // MIB} MiB of free memory, there are {available_bytes() // MIB}")
    array = numbers(SIZE)
    count_up(array)
    with PeerProcess(take_in, [SIZE], schemes=[scheme]) as peer:
        receive(peer.node, peer.peer_node, 2)
        before, begin = peak_bytes(), time.monotonic()
        peer.node.wait(say(peer.link, 1, array.view(np.uint8)), timeout=SECONDS)
        seconds, grown_here = time.monotonic() - begin, peak_bytes() - before
        grown_there, wrong = peer.result(timeout=SECONDS)
    growth = [grown_here // MIB, grown_there // MIB]
    gigabytes_per_second = round(SIZE / seconds / 1e9, 2)
    measured(
        record_property, scheme=scheme, mib=SIZE // MIB, seconds=round(seconds, 2), growth_mib=growth,
        gigabytes_per_second=gigabytes_per_second,
    )  # fmt: skip
    assert wrong == 0
    assert max(growth) < 96
