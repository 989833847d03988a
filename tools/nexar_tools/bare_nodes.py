"""Nodes without a cluster: with links (`LinkedNode`), or one bare transport (`RawNode`)."""

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
from nexar.transport.base import Carrier, Expected
from nexar.transport.memory import MemoryNetwork
from nexar.transport.sleeper import PollSleeper
from nexar.types import NodeId, format_node
from nexar.wire.control import Message
from nexar_tools.transports import listen_address, make_transports

if TYPE_CHECKING:
    from nexar.transport.quic.transport import QuicSettings


class LinkedNode:
    """A node with links to other nodes. Any thread may wait; the waiting thread drives."""

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
        """`sidecar`: the scheme of a second carrier for large payloads."""
        self.node = credentials.node
        self._sidecar = sidecar
        self._connected: set[NodeId] = set()  # peers whose first carrier has come; the driving thread writes it
        self.refusals: list[tuple[str, str]] = []  # the driving thread appends
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
        """The addresses that `peer` can dial, by scheme."""
        found = {scheme: transport.address_for(peer) for scheme, transport in self.transports.items()}
        return {scheme: address for scheme, address in found.items() if address is not None}

    def connect(self, peer: NodeId, addresses: Mapping[str, str], timeout: float = 10.0) -> Link:
        """Returns one link over all common schemes, or the existing one. Raises UsageError if there is none."""
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
                self._adopt(link, self.transports[scheme].connect(addresses[scheme], Expected(peer), deadline))
        return link

    def _adopt(self, link: Link, carrier: Carrier) -> None:
        if carrier.scheme == self._sidecar:
            link.sidecar.adopt(carrier)
        else:
            link.adopt(carrier)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this node is closed; make a new one")

    def accept(self, timeout: float = 10.0) -> Link:
        """Returns the next link that a peer opened. Raises TimeoutError."""
        self._check_open()
        try:
            return self._inbound.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no peer connected within {timeout} s") from None

    def _link(self, peer: NodeId) -> Link:
        if peer not in self._links:
            self._links[peer] = Link(self.router, peer, on_control=self._on_control, on_lost=self._on_lost)
        return self._links[peer]

    def carrier_accepted(self, carrier: Carrier) -> None:
        """A peer's first carrier creates the link; later ones join it."""
        peer = carrier.peer.node
        new = peer not in self._links or (self._sidecar is not None and peer not in self._connected)
        link = self._link(peer)
        self._adopt(link, carrier)
        if carrier.scheme != self._sidecar:
            self._connected.add(peer)
            if new:
                self._inbound.put(link)

    def candidate_refused(self, address: str, reason: str) -> None:
        self.refusals.append((address, reason))

    def wait(self, *operations: Operation, timeout: float = 30.0) -> None:
        self.progress.wait(operations, time.monotonic() + timeout)

    def close(self) -> None:
        """Closes links first, then transports. In a forked child, as a node, nothing: any lock may be held there."""
        if self.progress.is_abandoned:
            return
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
    """A node with one bare transport. The caller attaches sinks to its carriers and calls `drive`."""

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
        """`schemes` has one entry. `config` is ignored."""
        (scheme,) = schemes
        self.node = credentials.node
        self.spin = spin
        self.accepted: list[Carrier] = []
        self.refusals: list[tuple[str, str]] = []
        transports, self.sleeper = make_transports([scheme], credentials, trust, host=host)
        self.transport = transports[scheme]
        self.transport.listen(listen_address(scheme, host), self)

    def addresses_for(self, peer: NodeId) -> dict[str, str]:
        address = self.transport.address_for(peer)
        return {} if address is None else {self.transport.scheme: address}

    def connect(self, peer: NodeId, addresses: Mapping[str, str], timeout: float = 10.0) -> Carrier:
        (address,) = addresses.values()
        return self.transport.connect(address, Expected(peer), time.monotonic() + timeout)

    def accept(self, timeout: float = 10.0) -> Carrier:
        """Drives until a peer has connected. Raises TimeoutError."""
        self.drive(lambda: bool(self.accepted), timeout)
        return self.accepted.pop(0)

    def drive(self, until: Callable[[], bool], timeout: float) -> None:
        """Drives in this thread until `until()` is true. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        transport = self.transport
        idle_since: float | None = None
        while not until():
            if transport.poll():
                idle_since = None
                continue
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(f"node {self.node}: no progress with its peer within {timeout} s")
            if idle_since is None:
                idle_since = now
            self._sleep(deadline - now, spinning=now - idle_since < self.spin)

    def _sleep(self, timeout: float, *, spinning: bool) -> None:
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
        self.accepted.append(carrier)

    def candidate_refused(self, address: str, reason: str) -> None:
        self.refusals.append((address, reason))

    def close(self) -> None:
        self.transport.close()
        if isinstance(self.sleeper, PollSleeper):
            self.sleeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
