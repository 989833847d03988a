"""Sleeping and waking between two processes."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from nexar.transport.shm.doorbell import Doorbell
from tests.conformance.harness import quieten
from tests.unit.transport.shm.alternation import MESSAGES, alternate
from tests.unit.transport.shm.stage import RIGHT, connected, connected_process, make_node


def test_no_wake_up_is_lost_over_many_turns_although_nobody_looks_by_the_clock(tmp_path: Path) -> None:
    node = make_node(RIGHT, tmp_path)
    with connected_process(node, "alternate") as (side, child):
        alternate(side, seed=1, begins=True)
        assert len(side.heard.frames) == MESSAGES // 2
        assert child.wait(20) == 0
    node.close()


def test_the_death_of_a_process_is_noticed_in_sleep_within_moments(tmp_path: Path) -> None:
    node = make_node(RIGHT, tmp_path)
    with connected_process(node, "hold") as (side, child):
        while not side.heard.frames:
            if not node.poll():
                node.rest(1)
        while node.poll() or not node.transport.arm():
            continue
        os.kill(child.pid, signal.SIGKILL)
        begin = time.monotonic()
        node.sleeper.sleep(20, 0)
        while not side.heard.lost:
            node.poll()
        assert time.monotonic() - begin < 1.0  # milliseconds, on a machine with nothing else to do
        assert side.heard.lost[0].kind == "peer"
    node.close()


def test_the_death_of_a_process_is_noticed_without_any_sleep(tmp_path: Path) -> None:
    node = make_node(RIGHT, tmp_path)
    with connected_process(node, "hold") as (side, child):
        while not side.heard.frames:
            node.poll()
        child.kill()
        begin = time.monotonic()
        while not side.heard.lost:
            node.poll()
        assert time.monotonic() - begin < 1.0
    node.close()


def test_what_a_process_sent_before_it_died_is_delivered_first(tmp_path: Path) -> None:
    node = make_node(RIGHT, tmp_path)
    with connected_process(node, "flood") as (side, child):
        child.wait()
        while not side.heard.lost:
            node.poll()
        assert side.heard.tags == list(range(20))
        assert [what for what, _ in side.heard.heard] == ["frame"] * 20 + ["lost"]
    node.close()


def test_a_byte_is_written_once_for_each_sleep_and_never_to_one_who_is_awake() -> None:
    ours, theirs = socket.socketpair()
    words = memoryview(bytearray(64)).cast("Q")
    bell = Doorbell(ours, words, 0, 1)
    for _ in range(5):
        bell.ring(2)
    bell.ring(4)
    assert theirs.recv(100) == b"\x01\x01"
    bell.nudge()
    words[1] = 6
    bell.nudge()
    bell.nudge()
    assert theirs.recv(100) == b"\x01"
    words.release()
    bell.nudge()
    bell.close(None)
    assert theirs.recv(100) == b""
    theirs.close()


def test_an_awake_peer_costs_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(tmp_path) as pair:
        pair.quieten()
        for node in pair.nodes:
            node.poll()
        written: list[int] = []
        monkeypatch.setattr(Doorbell, "ring", lambda _, nap: written.append(nap))
        for _ in range(100):
            pair.left.send(b"x")
            pair.right.node.poll()
        assert written == []


def test_an_idle_node_looks_ever_more_rarely(tmp_path: Path) -> None:
    with connected(tmp_path) as pair:
        transport = pair.left.node.transport
        quieten(pair.nodes)
        pauses = []
        for _ in range(10):
            assert not transport.poll()
            assert transport.arm()
            due = transport.due()
            assert due is not None
            pauses.append(due - time.monotonic())
        assert 0.05 < pauses[-1] <= 0.1
        transport.poll()
        pair.right.send(b"news")
        pair.until(lambda: pair.left.heard.frames, "the news")
        transport.poll()
        assert transport.arm()
        assert (transport.due() or 0) - time.monotonic() <= 0.002
        transport.poll()
