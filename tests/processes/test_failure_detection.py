"""Processes that are killed, stopped, or hold the GIL: what others see of it, and how soon."""

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_public_key

from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.decisions.failure_detector import LivenessReport
from nexar.cluster.decisions.membership_events import LossKind
from nexar.cluster.heartbeat import Heartbeat
from nexar.cluster.membership import Member, Membership, decode_member, encode_membership
from nexar.cluster.peer_probe import PingTable, ended_on_this_host, probe_peer
from nexar.config import Config
from nexar.security.authority import Authority
from nexar.wire.control import Pong
from nexar_tools.peer_process import PeerProcess
from nexar_tools.transports import why_unavailable
from tests.processes.heartbeat_node import INTERVAL, send_heartbeats_and_hold
from tests.processes.scale import measured
from tests.ranks import EVENT_TIMEOUT
from tests.unit.cluster.connection_ends import End
from tests.unit.cluster.memory_mesh import eventually, soon

ROOT = Path(__file__).parents[2]
TIMEOUT = 1.0
HELD = 3.0
quic = pytest.mark.skipif(why_unavailable("quic") is not None, reason=str(why_unavailable("quic")))


# ---------------------------------------------------------------- killed


class Doomed:
    """The other process, and this side's end of the line to it."""

    def __init__(self, process: "subprocess.Popen[str]", end: End, member: Member) -> None:
        self.process = process
        self.end = end
        self.member = member

    def send(self, **facts: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(facts) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return cast("dict[str, Any]", json.loads(self.process.stdout.readline()))


@contextmanager
def doomed(*, it_dials: bool) -> Iterator[Doomed]:
    """A node in a process of its own, lined to one here."""
    command = [sys.executable, "-m", "tests.processes.doomed_node"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    authority, end = Authority.create("ours"), End()
    end.certify(authority)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        with process:
            other = Doomed(process, end, end.member)
            facts = other.receive()
            other.member = decode_member(bytes.fromhex(facts["member"]))
            members = (other.member, end.member) if it_dials else (end.member, other.member)
            membership = Membership("ours", 1, members)
            certificate = authority.issue(facts["node"], cast(Any, load_pem_public_key(facts["key"].encode())))
            end.adopt(membership)
            other.send(
                certificate=certificate.public_bytes(Encoding.PEM).decode(),
                authority=authority.certificate_pem.decode(),
                membership=encode_membership(membership).hex(),
            )
            assert other.receive() == {"lines": [end.node.id]}
            eventually(lambda: end.lines.peers == {other.member.node}, "a line")
            yield other
            if process.poll() is None:
                other.send()
    finally:
        end.close()


@pytest.mark.parametrize("it_dials", [True, False])
def test_a_process_that_is_killed_is_known_to_have_ended_within_milliseconds(
    it_dials: bool, record_property: Any
) -> None:
    with doomed(it_dials=it_dials) as other:
        begin = time.monotonic()
        other.process.kill()
        eventually(lambda: other.end.ended, "the end of the line")
        noticed = time.monotonic()
        failure = probe_peer(other.end.node, other.member, None, PingTable(), soon())
        certain = time.monotonic()
    ((node, hint),) = other.end.ended
    assert node == other.member.node
    assert hint.startswith("its connection ended: ")
    assert failure is not None
    assert failure.text.startswith("its process has ended (connection refused at ")
    measured(record_property, noticed_ms=(noticed - begin) * 1e3, certain_ms=(certain - begin) * 1e3)
    assert certain - begin < 2.0


def test_a_process_of_this_host_is_known_to_have_ended_without_a_probe(record_property: Any) -> None:
    with doomed(it_dials=True) as other:
        assert ended_on_this_host(other.end.node, other.member) is None
        other.process.kill()
        assert other.process.stdout is not None
        while other.process.stdout.read():
            pass  # until the system has closed its descriptors
        ended, failure = time.monotonic(), None
        while failure is None and time.monotonic() < ended + EVENT_TIMEOUT:
            failure = ended_on_this_host(other.end.node, other.member)
        certain = time.monotonic()
        eventually(lambda: other.end.ended, "the end of the line")
    assert failure is not None
    assert failure.kind is LossKind.ENDED
    measured(record_property, certain_ms=round((certain - ended) * 1e3, 2))
    assert certain - ended < 1.0  # 2 ms where it has a core to itself


def test_a_process_that_ends_politely_leaves_no_hint() -> None:
    with doomed(it_dials=True) as other:
        other.send()
        assert other.process.wait(EVENT_TIMEOUT) == 0
        eventually(lambda: not other.end.lines.peers, "the end of the line")
    assert other.end.ended == []


def test_a_process_that_is_stopped_keeps_its_line() -> None:
    with doomed(it_dials=True) as other:
        other.process.send_signal(signal.SIGSTOP)
        assert probe_peer(other.end.node, other.member, None, PingTable(), soon()) is None  # its system answers for it
        assert other.end.lines.peers == {other.member.node}
        other.process.send_signal(signal.SIGCONT)
    assert other.end.ended == []


# ---------------------------------------------------------------- stuck, and stopped


class Watch:
    """A heartbeat here, over the link of a PeerProcess."""

    def __init__(self, peer: PeerProcess) -> None:
        me, other = peer.node.node, peer.peer_node
        config = Config(heartbeat_interval=INTERVAL, heartbeat_timeout=TIMEOUT)
        self.found: queue.SimpleQueue[LivenessReport] = queue.SimpleQueue()
        node = cast(Any, SimpleNamespace(id=me, config=config))
        self.control_loop = ControlLoop()
        self.heartbeat = Heartbeat(
            node, lambda: {other: peer.link}, lambda: ((), ""), self.found.put, control_loop=self.control_loop
        )
        peer.node.on_heartbeat = self.heartbeat.arrived
        members = tuple(Member(each, "here", bytes(32), {}) for each in (me, other))
        self.heartbeat.adopt(Membership("ours", 1, members))
        eventually(
            lambda: (known := self.heartbeat.known(other)) is not None and known.heartbeat is not None, "a heartbeat"
        )

    def next(self) -> LivenessReport:
        return self.found.get(timeout=EVENT_TIMEOUT)


@contextmanager
def watching(scheme: str) -> Iterator[tuple[PeerProcess, Watch]]:
    terms = {"schemes": [scheme], "node_class": "tests.processes.heartbeat_node:HeartbeatNode"}
    with PeerProcess(send_heartbeats_and_hold, [HELD], **terms) as peer:
        watch = Watch(peer)
        try:
            yield peer, watch
        finally:
            watch.heartbeat.close()
            watch.control_loop.close()
            peer.kill()


@quic
def test_python_that_holds_the_gil_is_stuck_and_not_lost_and_then_it_is_back() -> None:
    with watching("quic") as (peer, watch):
        peer.link.send_control(Pong(0))
        stuck = watch.next()
        assert (stuck.state, stuck.is_loss) == ("stuck", False)
        assert stuck.cause.startswith("alive but stuck in all_reduce #1234 for ")
        assert watch.next().state == "alive"


@quic
def test_a_process_that_is_stopped_is_silent_and_when_it_goes_on_it_is_back() -> None:
    with watching("quic") as (peer, watch):
        peer.stop()
        silent = watch.next()
        assert (silent.state, silent.is_loss) == ("silent", True)
        assert "no packet for " in silent.cause
        peer.resume()
        assert watch.next().state in ("alive", "stuck")


def test_without_quic_python_that_holds_the_gil_cannot_be_distinguished_from_a_stopped_process() -> None:
    with watching("tls") as (peer, watch):
        peer.link.send_control(Pong(0))
        silent = watch.next()
        assert silent.state == "silent"
        assert "dead, stopped, stuck or cut off" in silent.cause
