"""A peer that stops in the middle of a transfer and goes on later: the receive times out, the message is not lost."""

import hashlib
import signal
import time
from typing import Any

import pytest

from nexar.errors import OperationTimeout
from nexar.links.link import Link
from nexar_tools.bare_nodes import LinkedNode
from tests.processes.scale import MIB, measured, schemes
from tests.processes.star import Ray, Star
from tests.processes.talk import await_that, echo, end_echo, noise, post, receive, round_trip, say

SIZE = 64 * MIB
TIMEOUT = 0.3
ATTEMPTS = 20
DATA, ASK = 1, 2
GO, END = b"go", b"end"


def send_on_demand(node: LinkedNode, link: Link, size: int) -> list[str]:
    """The same bytes each time; their hash, for each time."""
    data = noise(size)
    digest = hashlib.sha256(data).hexdigest()
    digests = []
    while receive(node, link.peer, ASK) == GO:
        node.wait(say(link, DATA, data))
        digests.append(digest)
    return digests


def stall(star: Star, stalling: Ray, into: bytearray) -> tuple[float, str] | None:
    """Stop the sender in the middle of a message; how long the receive took to time out, and what it said. The sender
    is stopped then.

    None: the message was nearly over. What has left the sender still lands, and this process may have slept between
    the first bytes and the signal, so one attempt cannot force a stall.
    """
    pending = post(star.node, stalling.number, DATA, memoryview(into))
    say(stalling.link, ASK, GO)
    await_that(lambda: any(into[:64]), "the first bytes")
    stalling.signal(signal.SIGSTOP, expendable=False)
    begin = time.monotonic()
    try:
        star.node.wait(pending, timeout=TIMEOUT)
    except OperationTimeout as timeout:
        return time.monotonic() - begin, str(timeout)
    stalling.signal(signal.SIGCONT, expendable=False)
    return None


@pytest.mark.full
@schemes("shm", "quic", "tls")
def test_a_transfer_that_stalls_times_out_and_is_received_later(scheme: str, record_property: Any) -> None:
    with Star([scheme]) as star:
        stalling, other = star.start(send_on_demand, [SIZE]), star.start(echo)
        attempts, into = 1, bytearray(SIZE)
        while (stalled := stall(star, stalling, into)) is None:
            attempts, into = attempts + 1, bytearray(SIZE)
            assert attempts <= ATTEMPTS, "the sender was never stopped in time"
        into[:] = bytes(SIZE)  # ours again
        round_trip(star.node, other.link)
        stalling.signal(signal.SIGCONT, expendable=False)
        late = hashlib.sha256(receive(star.node, stalling.number, DATA)).hexdigest()
        assert not any(into)
        say(stalling.link, ASK, END)
        assert stalling.result() == [late] * attempts
        end_echo(other.link)
    elapsed, words = stalled
    measured(record_property, scheme=scheme, attempts=attempts, timed_out_after_ms=round(elapsed * 1e3))
    assert elapsed < TIMEOUT + 1
    assert f"with tag {DATA}" in words
