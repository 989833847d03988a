"""Ctrl-C while a receive is blocked: it raises at once, and the link goes on as if nothing had been."""

import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from nexar.links.link import Link
from nexar.links.messages import ANY
from nexar.wire.frame import Space
from nexar_tools.bare_nodes import LinkedNode
from nexar_tools.peer_process import PeerProcess
from tests.processes.scale import measured, schemes, sized
from tests.processes.talk import TALKING, await_that, echo, end_echo, post, receive, round_trip, say

TIMES = sized(15, 200)
ANYWHEN = sized(200, 200)  # what each leaves behind unread uses credit up, so there cannot be many
NEVER, READY, AFTER, BUSY = 1, 2, 3, 4
LAST = 1 << 40


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
    herald = threading.Thread(target=_signal_when_blocked, args=(link, threading.get_ident()))
    try:
        herald.start()
        receive(node, link.peer, NEVER, timeout=20)
    finally:
        herald.join()


def _signal_when_blocked(link: Link, thread: int) -> None:
    await_that(lambda: _is_waiting(sys._current_frames()[thread]), "the main thread to block")
    say(link, READY, b"")


def _is_waiting(frame: FrameType | None) -> bool:
    """Is this thread inside Progress.wait?"""
    while frame is not None:
        if frame.f_code.co_name == "_wait" and frame.f_code.co_filename.endswith("links/progress.py"):
            return True
        frame = frame.f_back
    return False


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


# -- at any moment -------------------------------------------------------------------------------------------------


class Interrupter(threading.Thread):
    """Presses Ctrl-C again and again, whatever the main thread does; it hurts only while `armed`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.armed = False
        self.over = False
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def run(self) -> None:
        chance = random.Random(1)
        while not self.over:
            time.sleep(chance.uniform(0.0005, 0.003))
            os.kill(os.getpid(), signal.SIGINT)


def talk_although_interrupted(node: LinkedNode, link: Link, times: int) -> int:
    """Send and receive in the main thread, with a new tag after each interrupt; how many round trips were made."""
    interrupter = Interrupter()
    round_trip(node, link, times + 1, timeout=5)  # from the next wait on, a handler set later is sheltered too
    interrupter.start()
    trips = 0
    for tag in range(1, times + 1):
        with suppress(KeyboardInterrupt):
            interrupter.armed = True
            while True:
                _talk(node, link, tag)
                trips += 1
    interrupter.over = True
    interrupter.join()
    round_trip(node, link, times + 1, timeout=5)
    say(link, LAST, b"")
    return trips


def _talk(node: LinkedNode, link: Link, tag: int) -> None:
    answers = [post(node, link.peer, tag) for _ in range(4)]
    sends = [say(link, tag, bytes(size)) for size in (8, 2000, 60_000, 100_000)]
    node.wait(*answers, *sends, timeout=5)


def echo_every_tag(node: LinkedNode, link: Link) -> None:
    while True:
        message = node.matching.post(None, source=link.peer, space=Space.TAGGED, tag=ANY)
        node.wait(message, timeout=30)
        assert message.frame is not None
        if message.frame.tag == LAST:
            return
        say(link, message.frame.tag, message.into)  # what nobody receives any more waits, and is dropped at the end


@pytest.mark.full
@schemes("shm", "quic", "tls")
def test_ctrl_c_at_any_moment_leaves_the_link_whole(scheme: str, record_property: Any) -> None:
    with PeerProcess(talk_although_interrupted, [ANYWHEN], schemes=[scheme], node_class=TALKING) as peer:
        echo_every_tag(peer.node, peer.link)
        trips = peer.result()
        assert peer.node.losses == []
    measured(record_property, scheme=scheme, interrupts=ANYWHEN, round_trips=trips)
