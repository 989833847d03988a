"""A node here, and any number of peers in processes of their own, each linked to it.

with Star(["tls"]) as star:
    reader, other = star.start(function), star.start(another)
    star.node.wait(reader.link.post_send(...))
    assert other.result() == ...
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from nexar.config import Config
from nexar.links.link import Link
from nexar.security.authority import Authority
from nexar.security.certificates import Trust
from nexar_tools.peer_process import PeerHandle
from nexar_tools.peer_protocol import ConnectTo, PeerStart, reference
from tests.processes.talk import TALKING, TalkingNode

HERE = 0x10
STARTING = 120.0


class Ray:
    """One peer process and the link to it."""

    def __init__(self, peer: PeerHandle, number: int, addresses: Mapping[str, str]) -> None:
        self.peer = peer
        self.number = number
        self.addresses = addresses
        self.link: Link = None  # type: ignore[assignment]  # as soon as it is connected
        self.collected = False

    @property
    def pid(self) -> int:
        return self.peer.process.pid

    def result(self, timeout: float = 30.0) -> Any:
        """What its function returned; raises PeerFailed."""
        self.collected = True
        return self.peer.result(time.monotonic() + timeout)

    def signal(self, number: int, *, expendable: bool = True) -> None:
        """Expendable: that it does not end well is no failure of the test."""
        self.peer.expendable = expendable
        self.peer.process.signal(number)


class Star:
    """A `with` block. Peers that were not asked for their result are asked at its end."""

    def __init__(self, schemes: Sequence[str], **settings: Any) -> None:
        self.schemes = list(schemes)
        self.settings = settings
        self.authority = Authority.create("star")
        self.trust = Trust(self.authority.certificate_pem)
        self.rays: list[Ray] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        credentials = self.authority.admit(HERE)
        self.node = TalkingNode(credentials, self.trust, self.schemes, config=Config(**self.settings))
        return self

    def start(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any] = (),
        *,
        node_class: str = TALKING,
        peer_dials: Sequence[str] | None = None,
    ) -> Ray:
        """A process that calls `function(node, link, *arguments)`. `peer_dials`: by these schemes, rather than we."""
        deadline = time.monotonic() + STARTING
        ray = self._begin(function, arguments, node_class, deadline)
        if peer_dials is None:
            ray.peer.order(ConnectTo(), deadline)
            ray.link = self.node.connect(ray.number, ray.addresses)
        else:
            known = self.node.addresses_for(ray.number)
            ray.peer.order(ConnectTo({scheme: known[scheme] for scheme in peer_dials}), deadline)
            ray.link = self.node.accept(STARTING)
        return ray

    def _begin(self, function: Callable[..., Any], arguments: Sequence[Any], node_class: str, deadline: float) -> Ray:
        number = HERE + 1 + len(self.rays)
        peer = PeerHandle()
        self._stack.push(peer.leave)
        start = PeerStart(
            credentials=self.authority.admit(number), trust=self.trust, peer=HERE, schemes=self.schemes,
            host="127.0.0.1", settings=self.settings, node_class=node_class, function=reference(function),
            arguments=list(arguments), path=sys.path, timeout=STARTING,
        )  # fmt: skip
        peer.order(start, deadline)
        self.rays.append(Ray(peer, number, peer.ready(deadline).addresses))
        return self.rays[-1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.node.close()
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            try:
                self._collect()
            finally:
                self.node.close()

    def _collect(self) -> None:
        for ray in self.rays:
            if not ray.collected and not ray.peer.expendable:
                ray.result()
