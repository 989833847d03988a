"""Ten thousand first packets of QUIC clients that never send another, to a rank and to the seed: what they cost, and
what the ranks notice of it. Everybody is in a process of its own; the figures are in the test's record.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from nexar.transport.address import parse_address
from tests.cluster.joiners import EVENT_TIMEOUT
from tests.hostile.attack_scene import process
from tests.hostile.first_packets_main import PACKET_BYTES
from tests.hostile.unauthenticated_peers import has_quic
from tests.processes.scale import MIB, measured

HERE = Path(__file__).parent
PACKETS = 10_000
SOURCES = 64
ALLOWED_GROWTH = 32 * MIB

Record = Callable[[str, object], None]


class Rank:
    """One of flood_main's."""

    def __init__(self, ticket: str) -> None:
        command = [sys.executable, str(HERE / "flood_main.py"), ticket]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def receive(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    def figures(self) -> dict[str, float]:
        """Of what it did since it was last asked."""
        self.say("")
        found: dict[str, float] = self.receive()
        return found

    def await_calls(self, count: int) -> None:
        deadline, calls = time.monotonic() + EVENT_TIMEOUT, 0.0
        while calls < count:
            assert time.monotonic() < deadline, f"{calls} calls in {EVENT_TIMEOUT} s"
            calls += self.figures()["calls"]
            time.sleep(0.01)


@contextmanager
def rank(ticket: str) -> Iterator[Rank]:
    made = Rank(ticket)
    with made.process:
        try:
            yield made
        finally:
            made.process.kill()


def resident(pid: int, what: str = "VmRSS") -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(f"{what}:")]
    return int(line.split()[1]) << 10


def first_packets(count: int) -> list[bytes]:
    command = [sys.executable, str(HERE / "first_packets_main.py"), str(count)]
    made = subprocess.run(command, capture_output=True, check=True, timeout=3 * EVENT_TIMEOUT).stdout
    assert len(made) == count * PACKET_BYTES
    return [made[start : start + PACKET_BYTES] for start in range(0, len(made), PACKET_BYTES)]


def flood(place: tuple[str, int], packets: list[bytes]) -> None:
    """From many addresses, in bursts that the other side's socket holds."""
    with ExitStack() as stack:
        sources = [stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)) for _ in range(SOURCES)]
        for number, source in enumerate(sources):
            source.bind((f"127.0.2.{number + 1}", 0))
        for number, packet in enumerate(packets):
            sources[number % SOURCES].sendto(packet, place)
            if number % 100 == 0:
                time.sleep(0.01)


@pytest.mark.skipif(not has_quic(), reason="nexar_native is not installed")
def test_ten_thousand_unfinished_handshakes_cost_little_and_disturb_no_member(record_property: Record) -> None:
    packets = first_packets(PACKETS)
    with process("seed", "2", "{}") as seed, ExitStack() as stack:
        opened = seed.receive()
        ranks = [stack.enter_context(rank(opened["ticket"])) for _ in range(2)]
        address, _ = [each.receive() for each in ranks]
        place = parse_address(address)
        ranks[0].await_calls(100)
        pids = {"rank": ranks[0].process.pid, "seed": seed.pid}
        before = {name: resident(pid) for name, pid in pids.items()}
        normal = ranks[0].figures()
        flood(place, packets)
        flood(parse_address(opened["address"]), packets)
        during = ranks[0].figures()
        ranks[0].await_calls(100)
        grown = {name: resident(pid, "VmHWM") - before[name] for name, pid in pids.items()}
        for each in ranks:
            each.say("stop")
        assert [each.process.wait(EVENT_TIMEOUT) for each in ranks] == [0, 0]
    measured(record_property, packets=2 * len(packets), calls=during["calls"])
    measured(record_property, longest_s=round(during["longest_s"], 3), longest_before_s=round(normal["longest_s"], 3))
    measured(record_property, **{f"{name}_grown_mb": round(size / MIB, 1) for name, size in grown.items()})
    assert max(grown.values()) < ALLOWED_GROWTH
    assert during["calls"] > 0
