"""A peer that is killed in the middle of a large transfer."""

import signal
import threading
import time
from typing import Any

import pytest

from nexar.errors import PeerLost
from nexar.links.link import Link
from nexar_tools.bare_nodes import LinkedNode
from tests.processes.scale import FULL, MIB, measured, schemes
from tests.processes.star import Star
from tests.processes.talk import IDLE_TIMEOUT, echo, end_echo, post, receive, round_trip, say, source_of_zeros

SIZE = 64 * MIB


def stream_for_ever(node: LinkedNode, link: Link, size: int) -> None:
    """There is a transfer under way at any moment, in both directions."""
    into = memoryview(bytearray(size))
    while True:
        node.wait(say(link, 1, source_of_zeros(size)), post(node, link.peer, 2, into))


def stream_until_lost(node: LinkedNode, link: Link, rounds: threading.Semaphore, ended: list[float]) -> None:
    into = memoryview(bytearray(SIZE))
    try:
        while True:
            node.wait(say(link, 2, source_of_zeros(SIZE)), post(node, link.peer, 1, into))
            rounds.release()
    except PeerLost:
        ended.append(time.monotonic())


def wait_until_lost(node: LinkedNode, link: Link, ended: list[float]) -> None:
    with pytest.raises(PeerLost):
        receive(node, link.peer, 3)
    ended.append(time.monotonic())


def bound_of(scheme: str) -> float:
    if scheme == "quic":
        return IDLE_TIMEOUT + 1.0
    return 0.1 if FULL else 1.0


@schemes("shm", "quic", "tls")
def test_the_death_of_a_peer_in_mid_transfer_is_reported_to_everybody_at_once(
    scheme: str, record_property: Any
) -> None:
    rounds, ended = threading.Semaphore(0), []
    with Star([scheme]) as star:
        victim, other = star.start(stream_for_ever, [SIZE]), star.start(echo)
        threads = [
            threading.Thread(target=stream_until_lost, args=(star.node, victim.link, rounds, ended)),
            threading.Thread(target=wait_until_lost, args=(star.node, victim.link, ended)),
        ]
        for thread in threads:
            thread.start()
        assert rounds.acquire(timeout=20)
        killed = time.monotonic()
        victim.signal(signal.SIGKILL)
        for thread in threads:
            thread.join(20)
        round_trip(star.node, other.link)
        with pytest.raises(PeerLost):
            say(victim.link, 2, b"anybody?")
        end_echo(other.link)
    assert len(ended) == 2
    measured(record_property, scheme=scheme, lost_after_ms=[round((end - killed) * 1e3, 1) for end in sorted(ended)])
    assert max(ended) - killed <= bound_of(scheme)
