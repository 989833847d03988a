"""Eight bytes there and back, while two pairs of processes share two cores."""

import time
from contextlib import ExitStack
from typing import Any

import pytest

from nexar.links.link import Link
from nexar_tools.bare_nodes import LinkedNode
from nexar_tools.peer_process import PeerPair
from tests.processes.scale import measured, percentile, schemes, sized, spread
from tests.processes.talk import echo, end_echo, round_trip

ROUNDS = sized(2000, 20_000)
BOUND = sized(20e-3, 400e-6)
"""Seconds. On an idle machine the median is far below a millisecond. Beside busy processes both ends of a round trip
wait for their slices, a few milliseconds each; a waiter that keeps the core from its peer costs many slices."""


def measure(node: LinkedNode, link: Link) -> list[float]:
    deadline = time.monotonic() + sized(5.0, 60.0)
    for _ in range(50):
        round_trip(node, link)
    times = [round_trip(node, link)]
    while len(times) < ROUNDS and time.monotonic() < deadline:
        times.append(round_trip(node, link))
    end_echo(link)
    return times


@pytest.mark.full
@schemes("shm", "quic", "tls")
def test_four_ranks_on_two_cores_answer_one_another_soon(scheme: str, record_property: Any) -> None:
    with ExitStack() as stack:
        pairs = [stack.enter_context(PeerPair(measure, echo, schemes=[scheme])) for _ in range(2)]
        times = [pair.results()[0] for pair in pairs]
    measured(record_property, scheme=scheme, first=spread(times[0]), second=spread(times[1]))
    assert max(percentile(each, 50) for each in times) <= BOUND
