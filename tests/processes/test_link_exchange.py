"""Both ends do the same at the same time: send first, or nothing at all."""

import hashlib
import sys
import time
from typing import Any

import pytest

from nexar.links.link import Link
from nexar_tools.bare_nodes import LinkedNode
from nexar_tools.peer_process import PeerProcess
from tests.processes.scale import MIB, measured, schemes, sized
from tests.processes.talk import IDLE_TIMEOUT, KEEP_ALIVE, TALKING, echo, end_echo, noise, receive, round_trip, say

SIZE = sized(64 * MIB, 256 * MIB)


def send_then_receive(node: LinkedNode, link: Link, size: int) -> list[str]:
    """The hashes of what was sent and of what came."""
    data = noise(size)
    node.wait(say(link, 1, data))
    return [hashlib.sha256(part).hexdigest() for part in (data, receive(node, link.peer, 1))]


@schemes("shm", "quic", "tls")
def test_both_ends_send_a_large_message_and_only_then_receive(scheme: str, record_property: Any) -> None:
    with PeerProcess(send_then_receive, [SIZE], schemes=[scheme]) as peer:
        begin = time.monotonic()
        sent, came = send_then_receive(peer.node, peer.link, SIZE)
        assert peer.result() == [came, sent]
        measured(record_property, scheme=scheme, seconds=round(time.monotonic() - begin, 3))


def compute(seconds: float) -> None:
    """First as Python code usually does, then without ever letting another thread have the interpreter."""
    _spin(seconds / 2)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        _spin(seconds / 2)
    finally:
        sys.setswitchinterval(interval)


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def compute_then_echo(node: LinkedNode, link: Link, seconds: float) -> int:
    round_trip(node, link, 9)
    compute(seconds)
    return echo(node, link)


@pytest.mark.full
@schemes("shm", "quic", "tls")
def test_a_link_outlives_two_ends_that_only_compute(scheme: str, record_property: Any) -> None:
    seconds = sized(3 * IDLE_TIMEOUT if scheme == "quic" else 1.0, 60.0)
    assert seconds > IDLE_TIMEOUT > KEEP_ALIVE or scheme != "quic"
    with PeerProcess(compute_then_echo, [seconds], schemes=[scheme], node_class=TALKING) as peer:
        node, link = peer.node, peer.link
        say(link, 9, receive(node, link.peer, 9))
        compute(seconds)
        round_trip(node, link)  # may have to wait until the peer has computed
        next_ones = [round_trip(node, link) for _ in range(20)]
        assert node.ping(link) < 5
        end_echo(link)
        assert peer.result() == 21
    measured(record_property, scheme=scheme, next_us=round(sorted(next_ones)[10] * 1e6))
    assert node.losses == []
