"""A peer process that dies without a message."""

import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conformance.conftest import MakeNode
from tests.conformance.harness import Node, Side, pump
from tests.conformance.transports import CHILD, LEFT, Case, World


@contextmanager
def _child(case: Case, world: World, node: Node, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Side]]:
    """A peer process, and our end of the carrier to it."""
    if not case.between_processes:
        pytest.skip(f"{case.name} joins nodes of one process only")
    (tmp_path / "world").write_bytes(pickle.dumps(world.for_another_process()))
    address = str(node.transport.address_for(CHILD))
    command = [sys.executable, "-m", "tests.conformance.dying_peer", case.name, str(tmp_path / "world"), address]
    child = subprocess.Popen([*command, str(node.number)])
    try:
        pump([node], lambda: node.accepted or child.poll() is not None, "the dial of a child process")
        assert child.poll() is None, "the child process ended"
        side = Side(node, node.accepted[0])
        side.carrier.attach(side.received)
        yield child, side
    finally:
        child.kill()
        child.wait()


def test_the_death_of_a_peer_is_a_loss(case: Case, world: World, make_node: MakeNode, tmp_path: Path) -> None:
    node = make_node(LEFT)
    with _child(case, world, node, tmp_path) as (child, side):
        side.carrier.expect_payload(1, memoryview(bytearray(64 << 20)))
        pump([node], lambda: side.received.frames, "the first frame of the child")
        child.send_signal(signal.SIGKILL)
        child.wait()
        pump([node], lambda: side.received.lost, "the loss of a dead peer")
        assert len(side.received.lost) == 1
        assert not side.received.lost[0].misbehaved


@pytest.mark.full
def test_a_peer_that_dies_in_mid_payload_leaves_the_memory_free(
    case: Case, world: World, make_node: MakeNode, tmp_path: Path
) -> None:
    node = make_node(LEFT)
    into = bytearray(64 << 20)
    with _child(case, world, node, tmp_path) as (child, side):
        side.carrier.expect_payload(1, memoryview(into))
        pump([node], lambda: into[0], "the first bytes of a payload")
        child.send_signal(signal.SIGKILL)
        child.wait()
        pump([node], lambda: side.received.lost, "the loss of a dead peer")
    into[:] = b"\xaa" * len(into)
    assert not node.poll()
    assert into == b"\xaa" * len(into)
