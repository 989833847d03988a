"""A node with links and nothing above them: what tests, benchmarks and the demo need before there is a cluster.

Identity, addresses and who dials whom are given by the caller; a cluster finds them out by itself.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

from nexar.config import Config
from nexar.errors import LinkClosed, NexarError, UsageError
from nexar.links.link import Link
from nexar.links.operation import Operation
from nexar.links.parting import part
from nexar.links.progress import Progress, spin_of
from nexar.links.router import Router
from nexar.security.credentials import Credentials, Trust
from nexar.testing.transports import listen_address, make_transports
from nexar.transport.base import Carrier, Expected
from nexar.transport.memory import MemoryNetwork
from nexar.transport.sleep import PollSleeper
from nexar.types import NodeId, format_node
from nexar.wire.messages import Message

if TYPE_CHECKING:
    from nexar.transport.quic.settings import QuicSettings


class LinkedNode:
    """Close it, or leave its `with` block: links politely, then transports."""

    def __init__(
        self,
        credentials: Credentials,
        trust: Trust,
        schemes: Sequence[str],
        *,
        host: str = "127.0.0.1",
        config: Config | None = None,
        network: MemoryNetwork | None = None,
        quic_settings: QuicSettings | None = None,
        spin: float | None = None,
        sidecar: str | None = None,
        on_control: Callable[[Link, Message], None] | None = None,
        on_lost: Callable[[Link, NexarError], None] | None = None,
    ) -> None:
        """`sidecar`: the one of the schemes that carries large payloads beside the others."""
        self.node = credentials.node
        self._sidecar = sidecar
        self._met: set[NodeId] = set()  # peers whose first carrier has come; written by the driving thread
        self.refusals: list[tuple[str, str]] = []  # appended by the driving thread
        self._links: dict[NodeId, Link] = {}  # written by the driving thread and by connect()
        self._inbound: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._closed = False  # written once, by close()
        self._on_control = on_control
        self._on_lost = on_lost
        self.transports, self._sleeper = make_transports(
            schemes, credentials, trust, host=host, network=network, quic_settings=quic_settings
        )
        config = config or Config()
        spin = spin_of(config.spin_microsecs) if spin is None else spin
        self.progress = Progress(self._sleeper, list(self.transports.values()), spin=spin)
        self.router = Router(self.node, config, self.progress)
        self.matching = self.router.open(0)
        for scheme, transport in self.transports.items():
            transport.listen(listen_address(scheme, host), self)

    def addresses_for(self, peer: NodeId) -> dict[str, str]:
        """What `peer` must know to dial us, by scheme."""
        found = {scheme: transport.address_for(peer) for scheme, transport in self.transports.items()}
        return {scheme: address for scheme, address in found.items() if address is not None}

    def connect(self, peer: NodeId, addresses: Mapping[str, str], timeout: float = 10.0) -> Link:
        """Dial every scheme that both have; one link over all of them. Linked already: that link, as it is."""
        self._check_open()
        common = [scheme for scheme in self.transports if scheme in addresses]
        if not common:
            offered, ours = ", ".join(addresses) or "nothing", ", ".join(self.transports)
            raise UsageError(f"node {format_node(peer)} offers {offered}, this node has {ours}: no transport in common")
        deadline = time.monotonic() + timeout
        link = self._link(peer)
        if isinstance(link.failure, LinkClosed):
            raise link.failure
        for scheme in common:
            if scheme not in link.schemes:
                self._give(link, self.transports[scheme].connect(addresses[scheme], Expected(peer), deadline))
        return link

    def _give(self, link: Link, carrier: Carrier) -> None:
        if carrier.scheme == self._sidecar:
            link.sidecar.adopt(carrier)
        else:
            link.adopt(carrier)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this node is closed; make a new one")

    def accept(self, timeout: float = 10.0) -> Link:
        """The next link a peer opened to us. TimeoutError if none comes."""
        self._check_open()
        try:
            return self._inbound.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"nobody connected within {timeout} s") from None

    def _link(self, peer: NodeId) -> Link:
        if peer not in self._links:
            self._links[peer] = Link(self.router, peer, on_control=self._on_control, on_lost=self._on_lost)
        return self._links[peer]

    def carrier_accepted(self, carrier: Carrier) -> None:
        """See Acceptor: a new peer's first carrier makes the link; more carriers join it."""
        peer = carrier.peer.node
        new = peer not in self._links or (self._sidecar is not None and peer not in self._met)
        link = self._link(peer)
        self._give(link, carrier)
        if carrier.scheme != self._sidecar:
            self._met.add(peer)
            if new:
                self._inbound.put(link)

    def candidate_refused(self, address: str, reason: str) -> None:
        """See Acceptor."""
        self.refusals.append((address, reason))

    def wait(self, *operations: Operation, timeout: float = 30.0) -> None:
        """Until all are done."""
        self.progress.wait(operations, time.monotonic() + timeout)

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        part(self.progress, list(self._links.values()), patience=2.0, longest=30.0)
        self.progress.close()
        if isinstance(self._sleeper, PollSleeper):
            self._sleeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
