"""A node with one transport and nothing above it: for the figures of a carrier alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from nexar.config import Config
from nexar.links.progress import DEFAULT_SPIN
from nexar.security.credentials import Credentials, Trust
from nexar.testing.transports import listen_address, make_transports
from nexar.transport.base import Carrier, Expected
from nexar.transport.sleep import PollSleeper
from nexar.types import NodeId


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
        if not self.transport.arm():
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
