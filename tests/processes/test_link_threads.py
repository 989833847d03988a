"""Many threads of one process talk to one peer at once: no wake-up is lost, nobody starves."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nexar.links.link import Link
from nexar_tools.bare_nodes import LinkedNode
from nexar_tools.peer_process import PeerProcess
from tests.processes.scale import measured, schemes, sized
from tests.processes.talk import echo, end_echo, post, round_trip, say

THREADS = list(range(100, 108))
ASYNCIO = 108
ROUND_TRIPS = sized(10_000, 50_000)  # of two messages each; half of it where every step is a switch
EVENT_TIMEOUT = sized(40.0, 300.0)


class Crowd:
    """Everybody talks until together they have talked enough."""

    def __init__(self, node: LinkedNode, link: Link, round_trips: int) -> None:
        self.node, self.link, self.round_trips = node, link, round_trips
        self.counts = dict.fromkeys([*THREADS, ASYNCIO], 0)
        self.failures: list[BaseException] = []
        self.deadline = time.monotonic() + EVENT_TIMEOUT

    @property
    def enough(self) -> bool:
        return bool(self.failures) or sum(self.counts.values()) >= self.round_trips or time.monotonic() > self.deadline

    def talk(self, tag: int) -> None:
        while not self.enough:
            round_trip(self.node, self.link, tag, self.counts[tag].to_bytes(8, "little"), timeout=15)
            self.counts[tag] += 1

    async def talk_in_a_loop(self) -> None:
        while not self.enough:
            data = self.counts[ASYNCIO].to_bytes(8, "little")
            answer = post(self.node, self.link.peer, ASYNCIO)
            await say(self.link, ASYNCIO, data)
            await asyncio.wait_for(_finished(answer), 15)
            assert answer.into == data
            self.counts[ASYNCIO] += 1

    def run(self) -> None:
        members = [threading.Thread(target=self._guarded, args=(tag,)) for tag in THREADS]
        for thread in members:
            thread.start()
        try:
            asyncio.run(self.talk_in_a_loop())
        finally:
            for thread in members:
                thread.join(20)
            end_echo(self.link, *THREADS, ASYNCIO)

    def _guarded(self, tag: int) -> None:
        try:
            self.talk(tag)
        except BaseException as error:  # noqa: BLE001  # shown by the test
            self.failures.append(error)


async def _finished(operation: Any) -> None:
    await operation


@pytest.fixture(params=[None, 1e-6], ids=["usual switches", "switches at every step"])
def switch_interval(request: pytest.FixtureRequest) -> Iterator[float | None]:
    """How often threads of this process take turns, in seconds; None: as usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(request.param or usual)
    yield request.param
    sys.setswitchinterval(usual)


def echo_with(node: LinkedNode, link: Link, interval: float | None) -> int:
    if interval is not None:
        sys.setswitchinterval(interval)
    return echo(node, link, [*THREADS, ASYNCIO])


@pytest.mark.full
@schemes("shm", "quic", "tls")
def test_eight_threads_and_a_loop_share_a_link(
    scheme: str, switch_interval: float | None, record_property: Any
) -> None:
    with PeerProcess(echo_with, [switch_interval], schemes=[scheme]) as peer:
        crowd = Crowd(peer.node, peer.link, ROUND_TRIPS // (2 if switch_interval else 1))
        begin = time.monotonic()
        crowd.run()
        elapsed = time.monotonic() - begin
        assert crowd.failures == []
        assert peer.result() == sum(crowd.counts.values())
    counts = [crowd.counts[tag] for tag in THREADS]
    measured(
        record_property,
        scheme=scheme,
        messages_per_second=round(2 * sum(crowd.counts.values()) / elapsed),
        slowest_to_mean=round(min(counts) / (sum(counts) / len(counts)), 2),
        loop_to_mean=round(crowd.counts[ASYNCIO] / (sum(counts) / len(counts)), 2),
    )
    assert sum(crowd.counts.values()) >= crowd.round_trips
    assert min(counts) >= sum(counts) / len(counts) / 2
    assert crowd.counts[ASYNCIO] > 0
