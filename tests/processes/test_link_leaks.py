"""Very many messages leave nothing behind, at either end."""

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from nexar.links.link import Link
from nexar_tools.bare_nodes import LinkedNode
from nexar_tools.peer_process import PeerProcess
from tests.processes.scale import MIB, measured, schemes, sized
from tests.processes.talk import post, receive, say

MESSAGES = sized(20_000, 200_000)
WARM_UP = 3000
WINDOW = 100
LARGE = bytes(100_000)  # more than travels whole


def stock() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "python_threads": threading.active_count(),
        "segments": sum(str(os.getpid()) in name for name in os.listdir("/dev/shm")),
        "resident_bytes": int(status["VmRSS"].split()[0]) * 1024,
    }


def send_many(node: LinkedNode, link: Link, count: int) -> None:
    for number in range(0, count, WINDOW):
        sends = [say(link, 1, number.to_bytes(8, "little")) for _ in range(WINDOW - 1)]
        node.wait(*sends, say(link, 1, LARGE), timeout=30)
        receive(node, link.peer, 2)


def receive_many(node: LinkedNode, link: Link, count: int) -> None:
    for number in range(0, count, WINDOW):
        operations = [post(node, link.peer, 1) for _ in range(WINDOW)]
        node.wait(*operations, timeout=30)
        assert operations[0].into == number.to_bytes(8, "little")
        assert operations[-1].into == LARGE
        say(link, 2, b"go on")


def receive_and_take_stock(node: LinkedNode, link: Link, warm_up: int, count: int) -> list[dict[str, int]]:
    receive_many(node, link, warm_up)
    before = stock()
    receive_many(node, link, count)
    return [before, stock()]


def compare(before: dict[str, int], after: dict[str, int]) -> int:
    """Nothing is new; gives the growth of memory."""
    growth = after.pop("resident_bytes") - before.pop("resident_bytes")
    assert after == before
    return growth


@pytest.mark.full
@schemes("shm", "quic", "tls")
def test_many_messages_leave_nothing_behind(scheme: str, record_property: Any) -> None:
    with PeerProcess(receive_and_take_stock, [WARM_UP, MESSAGES], schemes=[scheme]) as peer:
        send_many(peer.node, peer.link, WARM_UP)
        before = stock()
        send_many(peer.node, peer.link, MESSAGES)
        growth = [compare(before, stock()), compare(*peer.result())]
    measured(record_property, scheme=scheme, messages=MESSAGES, growth_kib=[bytes_ // 1024 for bytes_ in growth])
    assert max(growth) < 8 * MIB
