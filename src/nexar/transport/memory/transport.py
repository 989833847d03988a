"""The memory transport: a network of nodes in one process."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from typing import Final

from nexar.clock import Clock, SystemClock
from nexar.transport.base import Acceptor, Carrier, CarrierLost, ConnectRefused, Expected, Peer, Transport, Waker
from nexar.transport.memory.carrier import MemoryCarrier
from nexar.transport.memory.pipe import DeliveryFault, Direction, FaultModel, Pipe
from nexar.types import UNKNOWN_NODE, format_node

_BACKLOG: Final = 4096


class MemoryListener:
    """Makes a pair of carriers for each dial; the driver passes one to the acceptor later."""

    def __init__(self, host: MemoryTransport, acceptor: Acceptor) -> None:
        self.node = host.node
        self._host = host
        self._acceptor = acceptor
        # Appended by dialing threads, taken by the driver.
        self._accepted: deque[MemoryCarrier] = deque()
        self._refused: deque[tuple[str, str]] = deque(maxlen=_BACKLOG)

    def dial(self, dialer: MemoryTransport, address: str, expected: Expected) -> MemoryCarrier:
        """Return the dialer's end. Raises ConnectRefused."""
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

    def _make_pair(
        self, dialer: MemoryTransport, address: str, *, anonymous: bool
    ) -> tuple[MemoryCarrier, MemoryCarrier]:
        here, there = dialer.node, self.node
        forth, back = Pipe(), Pipe()
        network = self._host.network
        peer = Peer(node=there, certificate=None, verified=True, address=address)
        near = MemoryCarrier(dialer, network, peer, Direction(there, here), out=forth, inbound=back, dialed=True)
        # No certificates here, but a joining node is unverified on every transport.
        shown = UNKNOWN_NODE if anonymous else here
        peer = Peer(node=shown, certificate=None, verified=not anonymous, address=dialer.name)
        far = MemoryCarrier(self._host, network, peer, Direction(here, there), out=back, inbound=forth, dialed=False)
        near.join(far)
        return near, far

    def _pass_on(self, carrier: MemoryCarrier) -> None:
        try:
            self._acceptor.carrier_accepted(carrier)
        except BaseException as error:
            carrier.fail(CarrierLost("fault", f"the acceptor raised {error!r}"))
            raise

    def pending(self) -> bool:
        return bool(self._accepted or self._refused)

    def drive(self) -> None:
        """Call the acceptor. Driver only."""
        while self._accepted:
            self._pass_on(self._accepted.popleft())
        while self._refused:
            self._acceptor.candidate_refused(*self._refused.popleft())


class MemoryNetwork:
    """The nodes of one process that can dial each other. Any thread."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self.fault_model: FaultModel | None = None  # written by tests, read by any thread
        self._lock = threading.Lock()  # guards _listeners and _members
        self._listeners: dict[str, MemoryListener] = {}
        self._members: set[MemoryTransport] = set()
        self._numbers = itertools.count(1)  # next() is atomic

    def enter(self, member: MemoryTransport) -> None:
        with self._lock:
            self._members.add(member)

    def leave(self, member: MemoryTransport) -> None:
        with self._lock:
            self._members.discard(member)

    def bind(self, address: str, listener: MemoryListener) -> str:
        """Reserve "memory:NAME"; an empty name or 0 picks a free one. Raises OSError if in use."""
        name = address.removeprefix("memory").removeprefix(":")
        real = f"memory:{name if name not in ('', '0') else f'node-{next(self._numbers)}'}"
        with self._lock:
            if real in self._listeners:
                raise OSError(f"{real} is in use")
            self._listeners[real] = listener
        return real

    def unbind(self, address: str) -> None:
        with self._lock:
            self._listeners.pop(address, None)

    def find(self, address: str) -> MemoryListener | None:
        with self._lock:
            return self._listeners.get(address)

    def is_driver(self, thread: int) -> bool:
        """Whether that thread drives a node here and so must not wait for another node's sinks."""
        with self._lock:
            return any(member.drives(thread) for member in self._members)

    def changed(self) -> None:
        """Call it when time or the fault model has changed."""
        with self._lock:
            members = list(self._members)
        for member in members:
            member.recheck_delayed()


class MemoryTransport(Transport):
    """Uses no descriptors: senders wake the node they send to."""

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
        self._closing = threading.Event()  # set with _closed; ends blocked dials
        self._ready: deque[MemoryCarrier] = deque()  # appended by any thread, taken by the driver
        # Driver only:
        self._delayed: list[tuple[float, int, MemoryCarrier]] = []  # heap of carriers with items that are not due yet
        self._ties = itertools.count()
        # Written by the driver, read by aborting threads:
        self._entered: MemoryCarrier | None = None  # the carrier whose sink may be running
        self._driver: int | None = None  # the thread inside poll()
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
        decision = (
            DeliveryFault.PASS if fault_model is None else fault_model.decide_dial(Direction(self.node, listener.node))
        )
        if decision is DeliveryFault.CUT:
            raise ConnectRefused(address, "the network refuses")
        if decision is DeliveryFault.HOLD or time.monotonic() >= deadline:
            if self._closing.wait(max(0.0, deadline - time.monotonic())):  # nobody will answer
                raise ConnectRefused(address, "this side is closed")
            raise TimeoutError(f"{address} did not answer in time")
        if decision is DeliveryFault.DOUBLE:
            listener.dial(self, address, expected).abort("this dial was sent twice")
        return listener.dial(self, address, expected)

    def admit(self, carrier: MemoryCarrier) -> bool:
        """Register the carrier for closing; False if the transport is closed. Any thread."""
        with self._lock:
            if not self._closed:
                self._carriers.add(carrier)
            return not self._closed

    def forget(self, carrier: MemoryCarrier) -> None:
        with self._lock:
            self._carriers.discard(carrier)

    # -- driving -----------------------------------------------------------------------------------------------

    def make_ready(self, carrier: MemoryCarrier) -> None:
        """Queue the carrier for the driver. Any thread."""
        self._ready.append(carrier)
        self.waker.wake()

    def drive_at(self, carrier: MemoryCarrier, due: float) -> None:
        """Drive this carrier again at `due`. Driver only."""
        heapq.heappush(self._delayed, (due, next(self._ties), carrier))

    def poll(self) -> bool:
        if not (self._ready or self._delayed or (self._listener is not None and self._listener.pending())):
            return False
        self._driver = threading.get_ident()
        try:
            return self._poll()
        finally:
            self._driver = None

    def _poll(self) -> bool:
        if self._listener is not None:
            self._listener.drive()
        if self._delayed:
            self._release()
        turns = len(self._ready)  # a carrier that becomes ready meanwhile waits for the next poll
        for _ in range(turns):
            self._enter(self._ready.popleft())
        return turns > 0

    def _enter(self, carrier: MemoryCarrier) -> None:
        self._entered = carrier  # before the carrier checks whether it has ended; see memory.carrier
        try:
            carrier.drive()
        finally:
            self._entered = None
            carrier.driver_left()

    def _release(self) -> None:
        now = self.network.clock.now()
        while self._delayed and self._delayed[0][0] <= now:
            heapq.heappop(self._delayed)[2].schedule()

    def is_driven_elsewhere(self, carrier: MemoryCarrier) -> bool:
        """Whether another thread may be in this carrier's sink and the caller may wait for it."""
        return self._entered is carrier and not self.network.is_driver(threading.get_ident())

    def drives(self, thread: int) -> bool:
        """Whether that thread is in poll() and so may be in a sink. Any thread."""
        return self._driver == thread

    def prepare_sleep(self) -> bool:
        return not (self._ready or (self._listener is not None and self._listener.pending()))

    def due(self) -> float | None:
        """None with a test clock, which does not advance by itself."""
        if not self._delayed or not isinstance(self.network.clock, SystemClock):
            return None
        return self._delayed[0][0]

    def recheck_delayed(self) -> None:
        """Let the driver deliver delayed items that are due. Any thread."""
        with self._lock:
            carriers = list(self._carriers)
        for carrier in carriers:
            carrier.schedule()

    # -- closing -----------------------------------------------------------------------------------------------

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
