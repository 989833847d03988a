"""Benchmark talker over a Link, with ordering, tags, credit and deadlines."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from memory import touched

from nexar.links.link import Link
from nexar.links.operation import Operation
from nexar.wire.frame import Space
from nexar_tools.bare_nodes import LinkedNode

TIMEOUT = 60.0
WINDOW = 2  # large messages in flight: while one is granted, the other flows


class PlainSidecarNode(LinkedNode):
    """Sends large payloads over plain TCP."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, sidecar="tcp", **settings)


class EncryptedSidecarNode(LinkedNode):
    """Sends large payloads over TLS."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, sidecar="tls", **settings)


class LinkTalker:
    """Implements Talker."""

    def __init__(self, node: LinkedNode, link: Link) -> None:
        self._link = link
        self._matching = node.matching
        self._wait = node.progress.wait
        self._peer = link.peer

    def prepare(self, size: int) -> None:
        self.outgoing, self.incoming = memoryview(bytearray(size)), memoryview(bytearray(size))
        self._deadline = time.monotonic() + TIMEOUT

    def expect(self) -> None:
        self._receive = self._post(self.incoming)

    def say(self) -> None:
        """A send that is not done at once (no credit) completes while waiting for the answer."""
        self._sent = self._link.post_send(0, self.outgoing)

    def hear(self) -> None:
        self._wait([self._receive], self._deadline)

    def stream(self, size: int, out: int, into: int) -> None:
        data = touched(size)
        places = [touched(size, 1 + number) for number in range(WINDOW)] if into else []
        sends: deque[Operation] = deque()
        receives: deque[Operation] = deque()
        posted_out = posted_in = 0
        deadline = time.monotonic() + TIMEOUT
        while posted_in < into or posted_out < out or sends or receives:
            while posted_in < into and len(receives) < WINDOW:
                receives.append(self._post(places[posted_in % WINDOW]))
                posted_in += 1
            while posted_out < out and len(sends) < WINDOW:
                sends.append(self._link.post_send(0, data))
                posted_out += 1
            self._wait([queue.popleft() for queue in (receives, sends) if queue], deadline)

    def _post(self, into: memoryview) -> Operation:
        return self._matching.post(into, source=self._peer, space=Space.UNTAGGED, tag=0)
