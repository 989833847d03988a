"""One node's end of a memory network."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque

from nexar.clock import SystemClock
from nexar.transport.base import Acceptor, Carrier, ConnectRefused, Expected, Transport, Waker
from nexar.transport.memory.carrier import MemoryCarrier
from nexar.transport.memory.listener import MemoryListener
from nexar.transport.memory.network import MemoryNetwork
from nexar.transport.memory.weather import Verdict, Way
from nexar.types import format_node


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
        weather = self.network.weather
        if listener is None:
            raise ConnectRefused(address, "nobody listens there")
        verdict = Verdict.PASS if weather is None else weather.judge_dial(Way(self.node, listener.node))
        if verdict is Verdict.CUT:
            raise ConnectRefused(address, "the network refuses")
        if verdict is Verdict.HOLD or time.monotonic() >= deadline:
            if self._closing.wait(max(0.0, deadline - time.monotonic())):  # nobody will answer
                raise ConnectRefused(address, "this side is closed")
            raise TimeoutError(f"{address} did not answer in time")
        if verdict is Verdict.DOUBLE:
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
        self.waker.kick()

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

    def arm(self) -> bool:
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
