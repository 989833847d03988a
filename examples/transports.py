"""Two processes exchange NumPy arrays over every transport that is available here.

    python examples/transports.py

For each transport:

1. An *authority* signs a certificate for each of two nodes. A node is a process; its certificate names it.
2. A second process starts. The two connect and verify each other's certificate. The connection is a *carrier*. (Shared
   memory uses a secret instead, and the memory transport works inside one process.)
3. A *link* uses the carrier. It provides ordered messages with tags, back-pressure, and a timeout for every wait.
   Receives and sends are *posted* and then waited for together; the waiting thread moves the bytes.
4. Arrays of several types are sent and come back negated, without intermediate copies.

Applications do not use links directly: `nexar.init()` opens them for calls such as `comm.send(x, dest=1)`; see
first_cluster.py.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from nexar.arrays.views import as_bytes, code_and_shape, from_bytes
from nexar.links.link import Link
from nexar.links.operation import Operation
from nexar.links.sending import MessageHeader
from nexar.security.authority import Authority
from nexar.security.certificates import Trust
from nexar.testing.bare_nodes import LinkedNode
from nexar.testing.peer_process import PeerProcess
from nexar.testing.transports import why_unavailable
from nexar.transport.memory import MemoryNetwork
from nexar.wire.frame import Space

Array = np.ndarray[Any, Any]

TAG = 7
TYPES = ("int8", "int32", "float32", "float64", "complex64")
LARGE_BYTES = 16 << 20
LARGE_ROUNDS = 8
PINGS = 2000


INTRODUCTION = """\
Transports: two processes verify each other's certificates, exchange NumPy
arrays over a link and check every element. Plain tcp must be enabled
explicitly and warns that it is not encrypted:
"""


class Transport(NamedTuple):
    """One row of the table."""

    scheme: str
    between: str
    encrypted: str


TRANSPORTS = (
    Transport("quic", "any hosts", "yes"),
    Transport("tls", "any hosts", "yes"),
    Transport("tcp", "trusted hosts", "NO"),
    Transport("shm", "one host", "–"),
    Transport("memory", "one process", "–"),
)


# -- sending and receiving an array over a link ----------------------------------------------------------------------


class Line:
    """A link with operations for arrays."""

    def __init__(self, node: LinkedNode, link: Link) -> None:
        self.node, self.link = node, link

    def post_send(self, array: Array) -> Operation:
        """Post a send. The message carries dtype and shape; its bytes are read from the array itself."""
        dtype, shape = code_and_shape(array)
        return self.link.post_send(0, as_bytes(array), shape=shape, about=MessageHeader(Space.TAGGED, TAG, dtype))

    def post_receive(self, into: Array) -> Operation:
        """Post a receive into an array. Nothing is copied if it is posted before the message arrives."""
        dtype, _ = code_and_shape(into)
        return self.node.matching.post(as_bytes(into), source=self.link.peer, space=Space.TAGGED, tag=TAG, dtype=dtype)

    def receive_any(self) -> Array:
        """Receive an array of any dtype and shape."""
        receive = self.node.matching.post(None, source=self.link.peer, space=Space.TAGGED, tag=TAG)
        self.node.wait(receive)
        return from_bytes(receive.into, receive.frame.dtype, receive.shape)


# -- the peer, in a separate process ---------------------------------------------------------------------------------


def mirror(node: LinkedNode, link: Link) -> int:
    """Send every array back negated, then answer pings, then receive large arrays. Return the bytes received."""
    line = Line(node, link)
    received = 0
    for _ in TYPES:
        array = line.receive_any()
        received += array.nbytes
        node.wait(line.post_send(-array))
    return received + answer_pings(line) + receive_large(line)


def answer_pings(line: Line) -> int:
    """Send each 8-byte message back."""
    ball = np.zeros(1)
    for _ in range(PINGS):
        line.node.wait(line.post_receive(ball))
        line.post_send(ball)
    return ball.nbytes * PINGS


def receive_large(line: Line) -> int:
    """Receive large arrays. Two receives are always posted, so the next transfer overlaps with this one."""
    buffers = [np.ones(LARGE_BYTES, np.uint8) for _ in range(2)]
    posted = [line.post_receive(buffer) for buffer in buffers]
    for done in range(LARGE_ROUNDS):
        line.node.wait(posted[done % 2])
        if done + 2 < LARGE_ROUNDS:
            posted[done % 2] = line.post_receive(buffers[done % 2])
    return LARGE_BYTES * LARGE_ROUNDS


# -- this side -------------------------------------------------------------------------------------------------------


def check_arrays(line: Line) -> str:
    """Check that arrays of every dtype come back negated, with the same dtype and shape."""
    generator = np.random.default_rng(7)
    for name in TYPES:
        sent = generator.integers(-100, 100, (300, 400)).astype(name)
        back = np.empty_like(sent)
        line.node.wait(line.post_receive(back), line.post_send(sent))
        if not np.array_equal(back, -sent):
            raise AssertionError(f"an array of {name} came back wrong")
    return f"{len(TYPES)} dtypes"


def measure_round_trip(line: Line) -> float:
    """Median seconds of an 8-byte round trip."""
    ball, back = np.zeros(1), np.zeros(1)
    times = []
    for _ in range(PINGS):
        begin = time.perf_counter()
        receive = line.post_receive(back)
        line.post_send(ball)
        line.node.wait(receive)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure_throughput(line: Line) -> float:
    """Bytes per second, one way, of 16 MB arrays. A send is done when the peer has received all of it."""
    array = np.ones(LARGE_BYTES, np.uint8)
    begin = time.perf_counter()
    sends = [line.post_send(array) for _ in range(LARGE_ROUNDS)]
    line.node.wait(*sends)
    return LARGE_BYTES * LARGE_ROUNDS / (time.perf_counter() - begin)


# -- connecting the two ----------------------------------------------------------------------------------------------


@contextmanager
def connected(scheme: str) -> Iterator[tuple[Line, Callable[[], int]]]:
    """The line of this process, and a function that returns the result of the peer."""
    if scheme == "memory":
        with connected_threads() as both:
            yield both
    else:
        with PeerProcess(mirror, schemes=[scheme]) as peer:
            yield Line(peer.node, peer.link), peer.result


@contextmanager
def connected_threads() -> Iterator[tuple[Line, Callable[[], int]]]:
    """The same with a thread instead of a second process: the steps that PeerProcess does."""
    authority = Authority.create("demo")
    trust = Trust(authority.certificate_pem)
    network = MemoryNetwork()
    with (
        LinkedNode(authority.admit(1), trust, ["memory"], network=network) as near,
        LinkedNode(authority.admit(2), trust, ["memory"], network=network) as far,
    ):
        link = near.connect(2, far.addresses_for(1))
        received: list[int] = []
        other = threading.Thread(target=lambda: received.append(mirror(far, far.accept())))
        other.start()
        try:
            yield Line(near, link), lambda: other.join() or received[0]
        finally:
            other.join()


def exchange(transport: Transport) -> tuple[str, str, str]:
    """The last three columns of a row."""
    with connected(transport.scheme) as (line, other_side):
        checked = check_arrays(line)
        seconds = measure_round_trip(line)
        rate = measure_throughput(line)
        other_side()
    return f"{seconds * 1e6:.0f} µs", f"{rate / 1e9:.2f} GB/s", f"[green]✔[/] {checked}"


def main() -> None:
    """Measure one transport after the other."""
    console = Console()
    console.print(INTRODUCTION)
    table = Table("transport", "for", "encrypted", *_numbers("8 bytes\nround trip", "16 MB\none way"), "checked")
    absent = {transport: why_unavailable(transport.scheme) for transport in TRANSPORTS}
    for transport in TRANSPORTS:
        with console.status(f"{transport.scheme} …"):
            cells = exchange(transport) if absent[transport] is None else ("–", "–", "unavailable")
        table.add_row(*transport, *cells)
    console.print(table)
    for transport, reason in absent.items():
        if reason is not None:
            console.print(f"{transport.scheme} is unavailable: {reason}")


def _numbers(*headings: str) -> list[Column]:
    return [Column(heading, justify="right") for heading in headings]


if __name__ == "__main__":
    main()
