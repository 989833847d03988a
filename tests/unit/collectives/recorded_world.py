"""Ranks that have call logs and nothing else: control messages travel through a queue, until a test delivers them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from nexar.cluster.membership import Member, Membership
from nexar.collectives.call_log import CallLog
from nexar.collectives.fingerprint import Fingerprint
from nexar.errors import OperationTimeout, PeerLost
from nexar.links.flow_control import UnexpectedBuffers
from nexar.links.matching import Matching
from nexar.links.operation import DeferredIO, Operation
from nexar.links.router import NoticeDispatch, Router
from nexar.transport.buffer_pool import BufferPool
from nexar.wire.control import Message, decode, encode
from nexar.wire.frame import Frame, FrameKind, Space

NODES = 100
"""The node of rank r is NODES + r."""


class Line:
    """What one rank has to speak to another."""

    def __init__(self, world: World, source: int, dest: int) -> None:
        self.world = world
        self.source = source
        self.dest = dest
        self.cut = False

    @property
    def peer(self) -> int:
        return NODES + self.dest

    def send_control(self, message: Message) -> bool:
        if self.cut:
            raise PeerLost(rank=self.dest, cause="cut")
        self.world.said.append((self.source, self.dest, message))
        self.world.queue.append((self.source, self.dest, encode(message)))
        return True


class Rank:
    """The group of one rank."""

    communicator = 3

    def __init__(self, world: World, rank: int, size: int) -> None:
        self.world = world
        self.rank = rank
        members = tuple(Member(NODES + each, f"host-{each}", bytes(32), {}) for each in range(size))
        self.membership = Membership("test", 1, members)
        self.lock = threading.Lock()
        outbox = DeferredIO()
        early = UnexpectedBuffers(1 << 20, BufferPool.of_profile("training"))
        self.matching = Matching(self.communicator, 1, self.lock, early, outbox)
        self.notices = NoticeDispatch(self.lock)
        self.router = cast(Router, SimpleNamespace(deferred_io=outbox, notices=self.notices))
        self.lines: dict[int, Line] = {}
        self.carried = 0.0
        self.call_log = CallLog(self)

    def carried_bytes(self) -> float:
        return self.carried

    def speakers(self) -> dict[int, Line]:
        return self.lines

    def rank_of(self, node: int) -> int:
        return node - NODES

    def wait(self, operations: Sequence[Operation], deadline: float, abort_signal: Operation | None = None) -> None:
        self.world.deliver()
        if not all(operation.done for operation in operations) and (abort_signal is None or abort_signal.error is None):
            raise OperationTimeout(operation="the wait", waiting_for="a test", timeout=1.0)

    def receives(self, source: int, sequence: int, fingerprint: Fingerprint) -> bool:
        """A frame of a collective comes."""
        operation, dtype, count, root, reduce_op, way = fingerprint
        frame = Frame(
            kind=int(FrameKind.EAGER), space=int(Space.COLLECTIVE), sequence=sequence, operation=operation, dtype=dtype,
            count=count, root=root, reduce_op=reduce_op, way=way,
        )  # fmt: skip
        with self.lock:
            taken = self.matching.mismatch_detector.check_frame(NODES + source, frame)
        self.router.deferred_io.flush()
        return taken


class World:
    """Ranks 0 to size - 1. `pairs`: who has a link with whom; by default all have."""

    def __init__(self, size: int, pairs: Sequence[tuple[int, int]] | None = None) -> None:
        self.queue: deque[tuple[int, int, bytes]] = deque()
        self.said: list[tuple[int, int, Message]] = []
        self.deaf: set[int] = set()  # who does not dispatch: stopped
        self.ranks = [Rank(self, rank, size) for rank in range(size)]
        all_pairs = [(one, other) for one in range(size) for other in range(one)]
        for one, other in all_pairs if pairs is None else pairs:
            self.ranks[one].lines[other] = Line(self, one, other)
            self.ranks[other].lines[one] = Line(self, other, one)

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def deliver(self) -> None:
        """Everything that was said, and what is said in answer."""
        while self.queue:
            source, dest, body = self.queue.popleft()
            message: Any = decode(body)
            if dest not in self.deaf:
                self.ranks[dest].notices.arrived(Line(self, dest, source), message)
