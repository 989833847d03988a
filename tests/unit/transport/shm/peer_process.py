"""The other process of some tests.

usage: python -m tests.unit.transport.shm.peer_process ROLE ADDRESS NODE

alternate  answers each frame with one, sleeping between them, until the carrier has finished
hold       says one thing and then only waits to be killed
flood      sends more than the rings hold, then dies without a message
"""

import os
import signal
import sys
import time

from nexar.transport.base import Expected
from nexar.transport.shm.transport import ShmTransport
from nexar.transport.sleeper import PollSleeper
from tests.conformance.harness import Node, Side
from tests.unit.transport.shm.alternation import alternate
from tests.unit.transport.shm.stage import CHILD


def main(role: str, address: str, parent: str) -> None:
    sleeper = PollSleeper()
    node = Node(CHILD, ShmTransport(sleeper, CHILD), sleeper)
    side = Side(node, node.transport.connect(address, Expected(int(parent)), time.monotonic() + 20))
    side.carrier.attach(side.received)
    if role == "alternate":
        alternate(side, seed=2, begins=False)
        node.close()
    if role == "hold":
        side.send(b"here")
        while True:
            signal.pause()
    if role == "flood":
        for tag in range(20):
            side.send(bytes(1000), tag=tag)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
