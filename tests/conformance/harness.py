"""Two connected nodes, what each of them received, and the hands that drive them."""

import functools
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nexar.transport.base import Carrier, CarrierLost, Expected, Sleeper, Transport
from nexar.wire.frame import Frame, FrameKind, Lane, encode

EVENT_TIMEOUT = 20.0
"""Seconds until a test that waits for an event gives up. Long, because the machine may be busy."""


class Recorder:
    """A sink that writes everything down, and complains if it is called twice at a time or after it was silenced."""

    def __init__(self) -> None:
        self.received: list[tuple[str, object]] = []  # written by the driving thread
        self.frames: list[tuple[Frame, bytes]] = []
        self.payloads: list[int] = []
        self.finished = 0
        self.lost: list[CarrierLost] = []
        self.faults: list[str] = []  # what no transport may do
        self.silenced = False  # set by a test when abort() has returned
        self.on_frame: Callable[[Carrier, Frame], object] | None = None
        self.on_payload: Callable[[Carrier, int], object] | None = None
        self._inside = threading.Lock()

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        with self._called("frame", frame):
            self.frames.append((frame, bytes(body)))
            if self.on_frame is not None:
                self.on_frame(carrier, frame)

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        with self._called("payload", transfer):
            self.payloads.append(transfer)
            if self.on_payload is not None:
                self.on_payload(carrier, transfer)

    def carrier_finished(self, carrier: Carrier) -> None:
        with self._called("finished", None):
            self.finished += 1

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        with self._called("lost", error):
            self.lost.append(error)

    @contextmanager
    def _called(self, what: str, fact: object) -> Iterator[None]:
        if self.silenced:
            self.faults.append(f"{what} after abort() had returned")
        if not self._inside.acquire(blocking=False):
            self.faults.append(f"{what} while another call was running")
            yield
            return
        try:
            self.received.append((what, fact))
            yield
        finally:
            self._inside.release()

    @property
    def tags(self) -> list[int]:
        return [frame.tag for frame, _ in self.frames]


class Node:
    """A transport with its sleeper; driven by hand (`poll`) or by a thread of its own (`driving`)."""

    def __init__(self, number: int, transport: Transport, sleeper: Sleeper) -> None:
        self.number = number
        self.transport = transport
        self.sleeper = sleeper
        self.accepted: list[Carrier] = []  # written by the driving thread
        self.refused: list[tuple[str, str]] = []

    def carrier_accepted(self, carrier: Carrier) -> None:
        self.accepted.append(carrier)

    def candidate_refused(self, address: str, reason: str) -> None:
        self.refused.append((address, reason))

    def poll(self) -> bool:
        return self.transport.poll()

    def rest(self, timeout: float) -> bool:
        """Sleep as a driving thread does. Returns whether it slept: it does not while there is something to poll."""
        if not self.transport.prepare_sleep():
            return False
        due = self.transport.due()
        if due is not None:
            timeout = min(timeout, due - time.monotonic())
        self.sleeper.sleep(max(timeout, 0.0), 0.0)
        return True

    @contextmanager
    def driving(self) -> Iterator[None]:
        """A thread drives the node meanwhile; what it raises comes out here."""
        stop = threading.Event()
        errors: list[BaseException] = []

        def drive() -> None:
            try:
                while not stop.is_set():
                    if not self.poll():
                        self.rest(0.5)
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)

        thread = threading.Thread(target=drive, name=f"drives node {self.number}")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            self.sleeper.wake()
            thread.join()
        if errors:
            raise errors[0]

    def close(self) -> None:
        self.transport.close()
        close = getattr(self.sleeper, "close", None)
        if close is not None and self.sleeper is not self.transport:
            close()


def pump(nodes: list[Node], until: Callable[[], object], what: str) -> None:
    """Drive all of them in this thread until it has happened."""
    deadline = time.monotonic() + EVENT_TIMEOUT
    while not until():
        busy = [node.poll() for node in nodes]
        if not any(busy):
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {EVENT_TIMEOUT} s in vain: {what}")
            for node in nodes:
                node.rest(0.0005)


def quieten(nodes: list[Node], seconds: float = 0.05) -> None:
    """Drive until nothing has happened for a while: for things that must *not* come."""
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < seconds:
        busy = [node.poll() for node in nodes]
        if any(busy):
            quiet_since = time.monotonic()
        else:
            for node in nodes:
                node.rest(0.001)


def wait_for(until: Callable[[], object], what: str) -> None:
    """Wait while others drive."""
    deadline = time.monotonic() + EVENT_TIMEOUT
    pause = threading.Event()
    while not until():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {EVENT_TIMEOUT} s in vain: {what}")
        pause.wait(0.001)


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run it elsewhere; the list gets its result, or what it raised."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:  # noqa: BLE001 - the caller looks at it
            outcome.append(error)

    thread = threading.Thread(target=run, name="calls")
    thread.start()
    return thread, outcome


def dial(
    near: Node, far: Node, address: str | None = None, *, patience: float = EVENT_TIMEOUT
) -> tuple[Carrier, Carrier]:
    """Both ends of a new carrier. The dialer blocks in a thread while both nodes are driven."""
    count = len(far.accepted)
    target = address or far.transport.address_for(near.number)
    assert target is not None
    deadline = time.monotonic() + patience
    thread, outcome = in_thread(lambda: near.transport.connect(target, Expected(far.number), deadline))
    pump([near, far], lambda: outcome and (isinstance(outcome[0], Exception) or len(far.accepted) > count), "a dial")
    thread.join()
    if not isinstance(outcome[0], Carrier):
        raise AssertionError(f"the dial failed: {outcome[0]!r}")
    return outcome[0], far.accepted[count]


@dataclass
class Side:
    """One end of a carrier."""

    node: Node
    carrier: Carrier
    received: Recorder = field(default_factory=Recorder)

    def send(
        self,
        body: bytes = b"",
        *,
        tag: int = 0,
        lane: Lane = Lane.DATA,
        communicator: int = 0,
        kind: int = FrameKind.CONTROL,
    ) -> None:
        frame = Frame(kind=kind, lane=lane, communicator=communicator, tag=tag, body=len(body))
        self.carrier.send_frame(lane, communicator, encode(frame), body)


@dataclass
class Pair:
    """Two connected nodes; `left` dialed."""

    left: Side
    right: Side

    @property
    def nodes(self) -> list[Node]:
        return [self.left.node, self.right.node]

    def until(self, condition: Callable[[], object], what: str) -> None:
        pump(self.nodes, condition, what)

    def quieten(self) -> None:
        quieten(self.nodes)

    @contextmanager
    def driving(self) -> Iterator[None]:
        with self.left.node.driving(), self.right.node.driving():
            yield

    def check_usable(self) -> None:
        """Frames and payloads pass both ways."""
        for sender, receiver in ((self.left, self.right), (self.right, self.left)):
            self.check_way(sender, receiver)

    def check_way(self, sender: Side, receiver: Side) -> None:
        frames, payloads = len(receiver.received.frames), len(receiver.received.payloads)
        transfer = 1_000_000 + payloads
        data, into = bytearray(pattern(100_001)), bytearray(100_001)
        receiver.carrier.expect_payload(transfer, memoryview(into))
        sender.carrier.send_payload(transfer, memoryview(data))
        sender.send(b"still here")
        self.until(lambda: len(receiver.received.frames) > frames, "a frame on a usable carrier")
        self.until(lambda: len(receiver.received.payloads) > payloads, "a payload on a usable carrier")
        assert receiver.received.frames[-1][1] == b"still here"
        assert into == data


def pattern(size: int, seed: int = 1) -> bytes:
    """Bytes that repeat nowhere soon and are never 0, so that memory not yet written can be distinguished."""
    block = _block(seed)
    return (block * (size // len(block) + 1))[:size]


@functools.cache
def _block(seed: int) -> bytes:
    index = np.arange(65_521)
    return (1 + (index * seed * 7 + index // 255) % 255).astype(np.uint8).tobytes()


def digest(data: bytes | bytearray | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")
