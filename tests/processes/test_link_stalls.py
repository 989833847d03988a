"""A peer that stops in the middle of a transfer and goes on later: the receive times out, the message is not lost."""

import hashlib
import signal
import time
from typing import Any

import pytest

from nexar.errors import OperationTimeout
from nexar.links.link import Link
from nexar.testing.linked_node import LinkedNode
from tests.processes.scale import MIB, measured, schemes
from tests.processes.star import Star
from tests.processes.talk import await_that, echo, end_echo, noise, post, receive, round_trip, say

SIZE = 64 * MIB
TIMEOUT = 0.3


def send_one(node: LinkedNode, link: Link, size: int) -> str:
    data = noise(size)
    receive(node, link.peer, 2)
    node.wait(say(link, 1, data))
    return hashlib.sha256(data).hexdigest()


@schemes("shm", "quic", "tls")
def test_a_transfer_that_stalls_times_out_and_is_received_later(scheme: str, record_property: Any) -> None:
    with Star([scheme]) as star:
        stalling, other = star.start(send_one, [SIZE]), star.start(echo)
        into = bytearray(SIZE)
        pending = post(star.node, stalling.number, 1, memoryview(into))
        say(stalling.link, 2, b"go")
        await_that(lambda: any(into[:64]), "the first bytes")
        stalling.signal(signal.SIGSTOP, expendable=False)
        begin = time.monotonic()
        stalled = not pending.done
        if stalled:
            with pytest.raises(OperationTimeout, match="with tag 1"):
                star.node.wait(pending, timeout=TIMEOUT)
        elapsed = time.monotonic() - begin
        into[:] = bytes(SIZE)  # ours again
        round_trip(star.node, other.link)
        stalling.signal(signal.SIGCONT, expendable=False)
        if stalled:
            assert hashlib.sha256(receive(star.node, stalling.number, 1)).hexdigest() == stalling.result()
            assert not any(into)
        end_echo(other.link)
    measured(record_property, scheme=scheme, stalled=stalled, timed_out_after_ms=round(elapsed * 1e3))
    assert elapsed < TIMEOUT + 1
