"""A node with links and nothing above them: what tests, benchmarks and the demo need before there is a cluster.

Identity, addresses and who dials whom are given by the caller; a cluster finds them out by itself.

A node with one transport and nothing above it: for the figures of a carrier alone.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

from nexar.config import Config
from nexar.errors import LinkClosed, NexarError, UsageError
from nexar.links.link import Link, close_all
from nexar.links.operation import Operation
from nexar.links.progress import DEFAULT_SPIN, Progress, spin_of
from nexar.links.router import Router
from nexar.security.certificates import Credentials, Trust
from nexar.testing.transports import listen_address, make_transports
from nexar.transport.base import Carrier, Expected
from nexar.transport.memory import MemoryNetwork
from nexar.transport.sleeper import PollSleeper
from nexar.types import NodeId, format_node
from nexar.wire.control import Message

if TYPE_CHECKING:
    from nexar.transport.quic.transport import QuicSettings


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
        close_all(self.progress, list(self._links.values()), close_timeout=2.0, longest=30.0)
        self.progress.close()
        if isinstance(self._sleeper, PollSleeper):
            self._sleeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class RawNode:
    """Gives carriers without a sink; the caller attaches one and drives with `drive`. Nobody drives meanwhile."""

    def __init__(
        self,
        credentials: Credentials,
        trust: Trust,
        schemes: Sequence[str],
        *,
        host: str = "127.0.0.1",
        config: Config | None = None,
        spin: float = DEFAULT_SPIN,
    ) -> None:
        """`schemes` holds one. `config` is what links need; there are none here."""
        (scheme,) = schemes
        self.node = credentials.node
        self.spin = spin
        self.accepted: list[Carrier] = []
        self.refusals: list[tuple[str, str]] = []
        transports, self.sleeper = make_transports([scheme], credentials, trust, host=host)
        self.transport = transports[scheme]
        self.transport.listen(listen_address(scheme, host), self)

    def addresses_for(self, peer: NodeId) -> dict[str, str]:
        """What `peer` must know to dial us."""
        address = self.transport.address_for(peer)
        return {} if address is None else {self.transport.scheme: address}

    def connect(self, peer: NodeId, addresses: Mapping[str, str], timeout: float = 10.0) -> Carrier:
        """Dial."""
        (address,) = addresses.values()
        return self.transport.connect(address, Expected(peer), time.monotonic() + timeout)

    def accept(self, timeout: float = 10.0) -> Carrier:
        """The next carrier a peer dialed. Drives meanwhile."""
        self.drive(lambda: bool(self.accepted), timeout)
        return self.accepted.pop(0)

    def drive(self, until: Callable[[], bool], timeout: float) -> None:
        """Drive in this thread until it is so; TimeoutError if that takes too long. A waiting link does the same."""
        deadline = time.monotonic() + timeout
        transport = self.transport
        quiet_since: float | None = None
        while not until():
            if transport.poll():
                quiet_since = None
                continue
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(f"waited {timeout} s in vain for the peer of node {self.node}")
            if quiet_since is None:
                quiet_since = now
            self._rest(deadline - now, spinning=now - quiet_since < self.spin)

    def _rest(self, timeout: float, *, spinning: bool) -> None:
        if spinning and self.transport.spins:
            os.sched_yield()
            return
        if not self.transport.prepare_sleep():
            return
        due = self.transport.due()
        if due is not None:
            timeout = min(timeout, due - time.monotonic())
        self.sleeper.sleep(max(timeout, 0.0), self.spin if spinning else 0.0)

    def carrier_accepted(self, carrier: Carrier) -> None:
        """See Acceptor."""
        self.accepted.append(carrier)

    def candidate_refused(self, address: str, reason: str) -> None:
        """See Acceptor."""
        self.refusals.append((address, reason))

    def close(self) -> None:
        """Idempotent."""
        self.transport.close()
        if isinstance(self.sleeper, PollSleeper):
            self.sleeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
