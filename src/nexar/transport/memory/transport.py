"""Where the dials of other nodes arrive.

What joins the memory transports of one process: who listens where, what time it is, what the weather is like.

One node's end of a memory network.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from typing import Final, Protocol

from nexar.clock import Clock, SystemClock
from nexar.transport.base import Acceptor, Carrier, CarrierLost, ConnectRefused, Expected, Peer, Transport, Waker
from nexar.transport.memory.carrier import CarrierHost, CarrierNetwork, MemoryCarrier
from nexar.transport.memory.pipe import DeliveryFault, Direction, FaultModel, Pipe
from nexar.types import UNKNOWN_NODE, format_node

_BACKLOG: Final = 4096


class DialEndpoint(CarrierHost, Protocol):
    """What dialing asks of the transports at both ends."""

    node: int
    name: str

    @property
    def network(self) -> CarrierNetwork:
        """What lies between them."""
        ...

    def admit(self, carrier: MemoryCarrier) -> bool:
        """Any thread: the carrier is the transport's to close. False if that is closed itself."""
        ...


class MemoryListener:
    """Makes a pair of carriers for each dial; the acceptor hears of it when its node is driven next."""

    def __init__(self, host: DialEndpoint, acceptor: Acceptor) -> None:
        self.node = host.node
        self._host = host
        self._acceptor = acceptor
        # Appended by dialing threads, taken by the driving thread.
        self._accepted: deque[MemoryCarrier] = deque()
        self._refused: deque[tuple[str, str]] = deque(maxlen=_BACKLOG)

    def dial(self, dialer: DialEndpoint, address: str, expected: Expected) -> MemoryCarrier:
        """The dialer's end. Raises ConnectRefused."""
        if expected.node not in (UNKNOWN_NODE, self.node):
            reason = f"node {format_node(self.node)} is there, not {format_node(expected.node)}"
            self._refused.append((dialer.name, reason))
            self._host.waker.wake()
            raise ConnectRefused(address, reason, verification=True)
        if len(self._accepted) >= _BACKLOG:
            raise ConnectRefused(address, f"{_BACKLOG} dials wait to be accepted")
        near, far = self._make_pair(dialer, address, anonymous=expected.anonymous)
        if not (dialer.admit(near) and self._host.admit(far)):
            near.abort("the node is closed")
            raise ConnectRefused(address, "the node is closed")
        self._accepted.append(far)
        self._host.waker.wake()
        return near

    def _make_pair(self, dialer: DialEndpoint, address: str, *, anonymous: bool) -> tuple[MemoryCarrier, MemoryCarrier]:
        here, there = dialer.node, self.node
        forth, back = Pipe(), Pipe()
        network = self._host.network
        peer = Peer(node=there, certificate=None, verified=True, address=address)
        near = MemoryCarrier(dialer, network, peer, Direction(there, here), out=forth, inbound=back, dialed=True)
        # Nothing could be shown here that would prove more; but who joins is to be treated alike everywhere.
        shown = UNKNOWN_NODE if anonymous else here
        peer = Peer(node=shown, certificate=None, verified=not anonymous, address=dialer.name)
        far = MemoryCarrier(self._host, network, peer, Direction(here, there), out=back, inbound=forth, dialed=False)
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


class NetworkMember(Protocol):
    """What a network asks of the transports on it."""

    def look_again(self) -> None:
        """Any thread: what was held back may be due."""

    def drives(self, thread: int) -> bool:
        """Any thread: whether that thread is driving here, and so perhaps inside a sink."""
        ...


class MemoryNetwork:
    """A world of nodes in one process. Every method may be called from any thread."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.fault_model: FaultModel | None = None  # written by whoever makes the weather, read by everybody
        self._lock = threading.Lock()  # guards the two below
        self._listeners: dict[str, MemoryListener] = {}
        self._members: set[NetworkMember] = set()
        self._numbers = itertools.count(1)  # next() is atomic

    def enter(self, member: NetworkMember) -> None:
        """A transport is made."""
        with self._lock:
            self._members.add(member)

    def leave(self, member: NetworkMember) -> None:
        """A transport is closed."""
        with self._lock:
            self._members.discard(member)

    def bind(self, address: str, listener: MemoryListener) -> str:
        """Claim `address`: "memory:NAME", where an empty name or 0 asks for any. OSError if it is taken."""
        name = address.removeprefix("memory").removeprefix(":")
        real = f"memory:{name if name not in ('', '0') else f'node-{next(self._numbers)}'}"
        with self._lock:
            if real in self._listeners:
                raise OSError(f"{real} is in use")
            self._listeners[real] = listener
        return real

    def unbind(self, address: str) -> None:
        """Dials to `address` are refused from now on."""
        with self._lock:
            self._listeners.pop(address, None)

    def find(self, address: str) -> MemoryListener | None:
        """Who listens there."""
        with self._lock:
            return self._listeners.get(address)

    def is_driver(self, thread: int) -> bool:
        """Whether that thread drives a node of this network, and so must not wait for the sinks of another."""
        with self._lock:
            return any(member.drives(thread) for member in self._members)

    def changed(self) -> None:
        """Time was moved, or the weather changed: every node looks again at what it holds back."""
        with self._lock:
            members = list(self._members)
        for member in members:
            member.look_again()


class MemoryTransport(Transport):
    """See transport.base. Needs no descriptor: senders kick the waker of the node they send to."""

    scheme = "memory"

    def __init__(self, waker: Waker, node: int, network: MemoryNetwork) -> None:
        self.waker = waker
        self.node = node
        self.network = network
        self.name = f"memory node {format_node(node)}"
        self.address = None
        self._listener: MemoryListener | None = None  # written by listen() and close()
        self._lock = threading.RLock()  # guards _carriers and _closed; reentrant as in memory.pipe
        self._carriers: set[MemoryCarrier] = set()
        self._closed = False
        self._closing = threading.Event()  # set with _closed: ends the dials that nobody answers
        self._ready: deque[MemoryCarrier] = deque()  # appended by any thread, taken by the driving thread
        # The driving thread's own:
        self._held: list[tuple[float, int, MemoryCarrier]] = []  # heap: carriers with something that is not due yet
        self._ties = itertools.count()
        # Written by the driving thread, read by those who abort:
        self._inside: MemoryCarrier | None = None  # the carrier whose sink may be running
        self._driver: int | None = None  # the thread that is in poll()
        network.enter(self)

    # -- making carriers ---------------------------------------------------------------------------------------

    def listen(self, address: str, acceptor: Acceptor) -> str:
        if self.address is not None:
            raise OSError(f"{self.name} already listens on {self.address}")
        listener = MemoryListener(self, acceptor)
        self.address = self.network.bind(address, listener)
        self._listener = listener
        return self.address

    def connect(self, address: str, expected: Expected, deadline: float) -> Carrier:
        listener = self.network.find(address)
        fault_model = self.network.fault_model
        if listener is None:
            raise ConnectRefused(address, "nobody listens there")
        verdict = (
            DeliveryFault.PASS if fault_model is None else fault_model.judge_dial(Direction(self.node, listener.node))
        )
        if verdict is DeliveryFault.CUT:
            raise ConnectRefused(address, "the network refuses")
        if verdict is DeliveryFault.HOLD or time.monotonic() >= deadline:
            if self._closing.wait(max(0.0, deadline - time.monotonic())):  # nobody will answer
                raise ConnectRefused(address, "this side is closed")
            raise TimeoutError(f"{address} did not answer in time")
        if verdict is DeliveryFault.DOUBLE:
            listener.dial(self, address, expected).abort("this dial was sent twice")
        return listener.dial(self, address, expected)

    def admit(self, carrier: MemoryCarrier) -> bool:
        """Any thread: the carrier is ours to close. False if we are closed ourselves."""
        with self._lock:
            if not self._closed:
                self._carriers.add(carrier)
            return not self._closed

    def forget(self, carrier: MemoryCarrier) -> None:
        """Any thread: the carrier has ended."""
        with self._lock:
            self._carriers.discard(carrier)

    # -- driving -----------------------------------------------------------------------------------------------

    def make_ready(self, carrier: MemoryCarrier) -> None:
        """Any thread: the driving thread shall look at this carrier."""
        self._ready.append(carrier)
        self.waker.wake()

    def hold(self, carrier: MemoryCarrier, due: float) -> None:
        """Driving thread: look at this carrier again at `due`."""
        heapq.heappush(self._held, (due, next(self._ties), carrier))

    def poll(self) -> bool:
        if not (self._ready or self._held or (self._listener is not None and self._listener.pending())):
            return False
        self._driver = threading.get_ident()
        try:
            return self._poll()
        finally:
            self._driver = None

    def _poll(self) -> bool:
        if self._listener is not None:
            self._listener.drive()
        if self._held:
            self._release()
        turns = len(self._ready)  # what becomes ready meanwhile has its turn at the next poll
        for _ in range(turns):
            self._enter(self._ready.popleft())
        return turns > 0

    def _enter(self, carrier: MemoryCarrier) -> None:
        self._inside = carrier  # before the carrier looks whether it has ended; see memory.carrier
        try:
            carrier.drive()
        finally:
            self._inside = None
            carrier.left()

    def _release(self) -> None:
        now = self.network.clock.now()
        while self._held and self._held[0][0] <= now:
            heapq.heappop(self._held)[2].schedule()

    def is_driven_elsewhere(self, carrier: MemoryCarrier) -> bool:
        """Whether another thread may be inside a sink of this carrier, and this one may wait for it."""
        return self._inside is carrier and not self.network.is_driver(threading.get_ident())

    def drives(self, thread: int) -> bool:
        """Whether that thread is in poll(), and so perhaps inside a sink."""
        return self._driver == thread

    def prepare_sleep(self) -> bool:
        return not (self._ready or (self._listener is not None and self._listener.pending()))

    def due(self) -> float | None:
        """Only the system's clock moves by itself; another one says so through MemoryNetwork.changed()."""
        if not self._held or not isinstance(self.network.clock, SystemClock):
            return None
        return self._held[0][0]

    def look_again(self) -> None:
        """Any thread: what was held back may be due."""
        with self._lock:
            carriers = list(self._carriers)
        for carrier in carriers:
            carrier.schedule()

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._closing.set()
            carriers = list(self._carriers)
        if self.address is not None:
            self.network.unbind(self.address)
        self._listener = None
        for carrier in carriers:
            carrier.abort("the node is closed")
        self.network.leave(self)

    def abandon(self) -> None:
        self._closed = True
        self._listener = None
        for carrier in list(self._carriers):
            carrier.abandon()
