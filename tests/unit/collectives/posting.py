"""A group in which nothing travels by itself: a test sees what was posted, and decides what becomes of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

from nexar.errors import Cancelled
from nexar.links.messages import collective_tag
from nexar.links.operation import Operation
from nexar.links.sending import MessageHeader
from nexar.types import AwaitedPeer

LOCK = threading.Lock()


class Posted(Operation):
    """Done when a test says so."""

    def __init__(self, label: str = "posted", lock: Any = None) -> None:
        super().__init__(LOCK if lock is None else lock)
        self.label = label
        self.cancelled = False
        self.into: Any = None
        self.data = b""
        self.shape: tuple[int, ...] = ()
        self.frame = SimpleNamespace(dtype=0)

    @property
    def name(self) -> str:
        return self.label

    def awaited(self) -> AwaitedPeer:
        return AwaitedPeer(rank=7)

    def cancel(self) -> None:
        if not self.done:
            self.cancelled = True
            self.end(Cancelled(operation=self.label))

    def end(self, error: BaseException | None = None) -> None:
        with self.lock:
            self.finish(error)


class Hub:
    """All messages: a send is kept until a receive asks for it. `hold`: sends are done only when released."""

    def __init__(self, *, hold: bool = False) -> None:
        self.hold = hold
        self.sent: deque[tuple[int, int, int, Posted]] = deque()  # source, dest, tag, what
        self.asked: list[tuple[int, int, int, Posted]] = []
        self.posted: list[Posted] = []

    def match(self) -> None:
        for asked in list(self.asked):
            found = next((each for each in self.sent if each[:3] == asked[:3]), None)
            if found is not None:
                self.asked.remove(asked)
                self.sent.remove(found)
                self._deliver(found[3], asked[3])

    def _deliver(self, send: Posted, receive: Posted) -> None:
        if receive.into is None:
            receive.into = memoryview(bytearray(send.data))
        else:
            assert len(receive.into) == len(send.data)
            receive.into[:] = send.data
        receive.shape, receive.frame = send.shape, send.frame
        receive.end()


class PostingGroup:
    """One rank's."""

    def __init__(self, hub: Hub, rank: int, size: int) -> None:
        self.hub, self.rank, self.size = hub, rank, size

    def post_receive(self, rank: int, into: Any, *, space: int, tag: Any, dtype: int = 0) -> Posted:
        receive = Posted(f"receive from {rank}")
        receive.into = into
        self.hub.asked.append((rank, self.rank, tag, receive))
        self.hub.posted.append(receive)
        return receive

    def post_send(self, rank: int, data: Any, deadline: float, *, about: MessageHeader, shape: Any = ()) -> Posted:
        send = Posted(f"send to {rank}")
        send.data, send.shape, send.frame = bytes(data), shape, SimpleNamespace(dtype=about.dtype)
        self.hub.sent.append((self.rank, rank, collective_tag(about.sequence, about.step), send))
        self.hub.posted.append(send)
        if not self.hub.hold:
            send.end()
        return send


def run_all(hub: Hub, runs: list[Generator[Any, None, Any]]) -> list[Any]:
    """In turn, each as far as it gets, until all have ended; their results."""
    results: dict[int, Any] = {}
    awaited: dict[int, Any] = dict.fromkeys(range(len(runs)), ())
    for _ in range(10_000):
        for index, run in enumerate(runs):
            if index not in results and all(each.done for each in awaited[index]):
                try:
                    awaited[index] = next(run)
                except StopIteration as stop:
                    results[index] = stop.value
        hub.match()
        if len(results) == len(runs):
            return [results[index] for index in range(len(runs))]
    raise AssertionError("they wait for one another")
