"""Two connected shared-memory nodes, and a process of its own to talk to."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nexar.transport.shm.carrier import ShmCarrier
from nexar.transport.shm.transport import ShmTransport
from nexar.transport.sleeper import PollSleeper
from tests.conformance.harness import Node, Pair, Side, dial, pump

LEFT, RIGHT, CHILD = 11, 22, 33


def make_node(number: int, directory: Path, ring_bytes: int = 1 << 20) -> Node:
    sleeper = PollSleeper()
    node = Node(number, ShmTransport(sleeper, number, ring_bytes=ring_bytes, directory=str(directory)), sleeper)
    node.transport.listen("", node)
    return node


@contextmanager
def connected(directory: Path, ring_bytes: int = 1 << 20) -> Iterator[Pair]:
    with ExitStack() as stack:
        left, right = make_node(LEFT, directory, ring_bytes), make_node(RIGHT, directory, ring_bytes)
        stack.callback(right.close)
        stack.callback(left.close)
        near, far = dial(left, right)
        pair = Pair(Side(left, near), Side(right, far))
        near.attach(pair.left.received)
        far.attach(pair.right.received)
        yield pair


def inside(side: Side) -> ShmCarrier:
    """The carrier as what it is, for tests that reach into its memory as a hostile peer would."""
    assert isinstance(side.carrier, ShmCarrier)
    return side.carrier


@contextmanager
def connected_process(node: Node, role: str) -> Iterator[tuple[Side, subprocess.Popen[bytes]]]:
    """A child that dials `node` and plays `role` (see peer_process.py); killed at the end if it still runs."""
    address = node.transport.address_for(CHILD)
    assert address is not None
    command = [sys.executable, "-m", "tests.unit.transport.shm.peer_process", role, address, str(node.number)]
    child = subprocess.Popen(command)
    try:
        pump([node], lambda: node.accepted, "the child's dial")
        side = Side(node, node.accepted[0])
        side.carrier.attach(side.received)
        yield side, child
    finally:
        child.kill()
        child.wait()
