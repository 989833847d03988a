"""A node in a process of its own, which dials its parent, says so, and is driven until it is killed.

usage: python -m tests.conformance.dying_peer SCHEME WORLD ADDRESS PARENT_NODE   (WORLD: a file with a pickled World)
"""

import pickle
import sys
import time
from pathlib import Path

from nexar.transport.base import Expected
from tests.conformance.harness import Node, Side, pattern
from tests.conformance.transports import CASES, CHILD


def main(scheme: str, world_file: str, address: str, parent: str) -> None:
    world = pickle.loads(Path(world_file).read_bytes())
    node = Node(CHILD, *CASES[scheme].make(CHILD, world))
    with node.driving():
        side = Side(node, node.transport.connect(address, Expected(int(parent)), time.monotonic() + 20))
        side.carrier.attach(side.received)
        side.send(b"I am here")
        side.carrier.send_payload(1, memoryview(pattern(64 << 20)))
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
