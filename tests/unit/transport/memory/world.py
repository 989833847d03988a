"""Nodes on a memory network that a test drives by hand, in virtual time."""

import time

from nexar.testing import VirtualClock
from nexar.transport.base import Carrier, Expected
from nexar.transport.memory import MemoryNetwork, MemoryTransport
from tests.conformance.harness import Node, Pair, Side


class Bell:
    """A waker that counts kicks, and a sleeper that never sleeps."""

    def __init__(self) -> None:
        self.kicks = 0

    def watch(self, descriptor: int, *, readable: bool = True, writable: bool = False) -> None:
        raise AssertionError("the memory transport has no descriptors")

    def unwatch(self, descriptor: int) -> None:
        raise AssertionError("the memory transport has no descriptors")

    def wake(self) -> None:
        self.kicks += 1

    def sleep(self, timeout: float, spin: float) -> None:
        raise AssertionError("nobody sleeps in virtual time")


class World:
    """Node n listens on memory:n."""

    def __init__(self, *numbers: int) -> None:
        self.clock = VirtualClock()
        self.network = MemoryNetwork(self.clock)
        self.clock.on_advance(self.network.changed)
        self.nodes = {number: self._node(number) for number in numbers}

    def _node(self, number: int) -> Node:
        bell = Bell()
        node = Node(number, MemoryTransport(bell, number, self.network), bell)
        node.transport.listen(f"memory:{number}", node)
        return node

    def dial(self, source: int, destination: int, expected: int | None = None) -> Carrier:
        transport = self.nodes[source].transport
        wanted = Expected(destination if expected is None else expected)
        return transport.connect(f"memory:{destination}", wanted, time.monotonic() + 5)

    def pair(self, source: int, destination: int) -> Pair:
        near = self.dial(source, destination)
        self.settle()
        far = self.nodes[destination].accepted[-1]
        pair = Pair(Side(self.nodes[source], near), Side(self.nodes[destination], far))
        near.attach(pair.left.received)
        far.attach(pair.right.received)
        return pair

    def settle(self) -> None:
        """Drive everybody until nothing happens any more."""
        busy = True
        while busy:
            busy = any([node.poll() for node in self.nodes.values()])  # noqa: C419 - each of them is polled

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.settle()
