"""Where the dials of other nodes arrive."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from nexar.transport.base import Acceptor, CarrierLost, ConnectRefused, Expected, Peer
from nexar.transport.memory.carrier import Home, MemoryCarrier, Surroundings
from nexar.transport.memory.pipe import Pipe
from nexar.transport.memory.weather import Way
from nexar.types import UNKNOWN_NODE, format_node

_BACKLOG: Final = 4096


class Host(Home, Protocol):
    """What dialing asks of the transports at both ends."""

    node: int
    name: str

    @property
    def network(self) -> Surroundings:
        """What lies between them."""
        ...

    def admit(self, carrier: MemoryCarrier) -> bool:
        """Any thread: the carrier is the transport's to close. False if that is closed itself."""
        ...


class MemoryListener:
    """Makes a pair of carriers for each dial; the acceptor hears of it when its node is driven next."""

    def __init__(self, host: Host, acceptor: Acceptor) -> None:
        self.node = host.node
        self._host = host
        self._acceptor = acceptor
        # Appended by dialing threads, taken by the driving thread.
        self._accepted: deque[MemoryCarrier] = deque()
        self._refused: deque[tuple[str, str]] = deque(maxlen=_BACKLOG)

    def dial(self, dialer: Host, address: str, expected: Expected) -> MemoryCarrier:
        """The dialer's end. Raises ConnectRefused."""
        if expected.node not in (UNKNOWN_NODE, self.node):
            reason = f"node {format_node(self.node)} is there, not {format_node(expected.node)}"
            self._refused.append((dialer.name, reason))
            self._host.waker.kick()
            raise ConnectRefused(address, reason, verification=True)
        if len(self._accepted) >= _BACKLOG:
            raise ConnectRefused(address, f"{_BACKLOG} dials wait to be accepted")
        near, far = self._make_pair(dialer, address, anonymous=expected.anonymous)
        if not (dialer.admit(near) and self._host.admit(far)):
            near.abort("the node is closed")
            raise ConnectRefused(address, "the node is closed")
        self._accepted.append(far)
        self._host.waker.kick()
        return near

    def _make_pair(self, dialer: Host, address: str, *, anonymous: bool) -> tuple[MemoryCarrier, MemoryCarrier]:
        here, there = dialer.node, self.node
        forth, back = Pipe(), Pipe()
        network = self._host.network
        peer = Peer(node=there, certificate=None, verified=True, address=address)
        near = MemoryCarrier(dialer, network, peer, Way(there, here), out=forth, inbound=back, dialed=True)
        # Nothing could be shown here that would prove more; but who joins is to be treated alike everywhere.
        shown = UNKNOWN_NODE if anonymous else here
        peer = Peer(node=shown, certificate=None, verified=not anonymous, address=dialer.name)
        far = MemoryCarrier(self._host, network, peer, Way(here, there), out=back, inbound=forth, dialed=False)
        near.join(far)
        return near, far

    def _hand_over(self, carrier: MemoryCarrier) -> None:
        try:
            self._acceptor.carrier_accepted(carrier)
        except BaseException as error:
            carrier.fail(CarrierLost("fault", f"the acceptor raised {error!r}"))
            raise

    def pending(self) -> bool:
        """Whether the acceptor has something to hear."""
        return bool(self._accepted or self._refused)

    def drive(self) -> None:
        """Driving thread only: tell the acceptor."""
        while self._accepted:
            self._hand_over(self._accepted.popleft())
        while self._refused:
            self._acceptor.candidate_refused(*self._refused.popleft())
