"""Ctrl-C while a receive is blocked: it raises at once, and the link goes on as if nothing had been."""

import os
import signal
import threading
import time
from typing import Any

import pytest

from nexar.links.link import Link
from nexar.testing.linked_node import LinkedNode
from nexar.testing.peer_process import PeerProcess
from tests.processes.scale import measured, schemes, sized
from tests.processes.talk import echo, end_echo, receive, round_trip, say

TIMES = sized(15, 200)
NEVER, READY, AFTER, BUSY, END = 1, 2, 3, 4, 5


def be_interrupted(node: LinkedNode, link: Link, times: int, busy: bool) -> list[float]:
    """When each interrupt raised, by a clock that both processes share. The main thread, as Ctrl-C needs it."""
    others = [threading.Thread(target=echo, args=(node, link, [tag])) for tag in (BUSY, BUSY + 10) if busy]
    for thread in others:
        thread.start()
    raised = [_wait_for_ctrl_c(node, link) for _ in range(times)]
    for thread in others:
        thread.join()
    return raised


def _wait_for_ctrl_c(node: LinkedNode, link: Link) -> float:
    with pytest.raises(KeyboardInterrupt):
        _block(node, link)
    raised = time.monotonic()
    say(link, AFTER, receive(node, link.peer, AFTER))
    return raised


def _block(node: LinkedNode, link: Link) -> None:
    say(link, READY, b"")
    receive(node, link.peer, NEVER, timeout=20)


def chatter(node: LinkedNode, link: Link, tag: int, stop: threading.Event) -> None:
    while not stop.is_set():
        round_trip(node, link, tag)
    end_echo(link, tag)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "while others talk"])
@schemes("shm", "quic", "tls")
def test_ctrl_c_ends_a_blocked_receive_and_nothing_else(scheme: str, busy: bool, record_property: Any) -> None:
    stop, sent = threading.Event(), []
    with PeerProcess(be_interrupted, [TIMES, busy], schemes=[scheme]) as peer:
        node, link = peer.node, peer.link
        talkers = [threading.Thread(target=chatter, args=(node, link, tag, stop)) for tag in (BUSY, BUSY + 10) if busy]
        for thread in talkers:
            thread.start()
        try:
            for _ in range(TIMES):
                receive(node, link.peer, READY)
                sent.append(time.monotonic())
                os.kill(peer.pid, signal.SIGINT)
                round_trip(node, link, AFTER, b"still there?")
        finally:
            stop.set()
            for thread in talkers:
                thread.join(20)
        raised = peer.result()
    delays = [end - begin for begin, end in zip(sent, raised, strict=True)]
    measured(record_property, scheme=scheme, busy=busy, raised_after_ms=round(max(delays) * 1e3, 1))
    assert max(delays) < 1
