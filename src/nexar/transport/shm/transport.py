"""The shared-memory transport: carriers between processes of one user on one host."""

from __future__ import annotations

import socket
import threading
import time
from typing import Final

from nexar.transport.base import Acceptor, Carrier, CarrierLost, ConnectRefused, Expected, Peer, Transport, Waker
from nexar.transport.shm.address import SCHEME, ShmAddress, listen_directory, parse_address
from nexar.transport.shm.carrier import ShmCarrier
from nexar.transport.shm.descriptors import Descriptors
from nexar.transport.shm.dialer import Dial
from nexar.transport.shm.doorbell import Doorbell, fence
from nexar.transport.shm.handshake import Refused
from nexar.transport.shm.listener import Listener
from nexar.transport.shm.place import make_place, why_not_ours
from nexar.transport.shm.segment import Geometry, Segment, sleep_word
from nexar.transport.shm.support import missing_support

# Between sleeps the descriptors are asked only every so many polls: a system call would dominate an idle poll, and
# while nobody sleeps a doorbell has only deaths and new dials to tell.
_POLLS_PER_LOOK: Final = 256

# After a sleep is armed, the rings are looked at again after the first of these, then ever more rarely up to the
# second. The doorbell is the signal; the re-check would only find what both fences (doorbell.py) had let through. A
# store leaves its core within microseconds, so what was stored around the moment of arming is visible long before the
# first re-check, and what is stored later meets a sleeping word that has long been visible itself and rings. Hence
# the first re-check finds all there could be to find, and going on rarely costs nothing: an idle process wakes ten
# times a second.
_FIRST_RECHECK: Final = 0.001
_LAST_RECHECK: Final = 0.1


class ShmTransport(Transport):
    """Made with the node's Waker. `ring_bytes` (a power of two) is the room for frames in each direction of each pair;
    `directory` is where the listening socket's own directory is made."""

    scheme = SCHEME

    def __init__(self, waker: Waker, node: int, *, ring_bytes: int = 1 << 20, directory: str | None = None) -> None:
        self._waker = waker
        self._node = node
        self._geometry = Geometry(ring_bytes=ring_bytes)
        self._directory = directory
        self._descriptors = Descriptors()
        self._lock = threading.Lock()  # over the next four
        self._dials: set[Dial] = set()  # under way
        self._carriers: set[ShmCarrier] = set()
        self._attached: tuple[ShmCarrier, ...] = ()  # those with a sink; replaced, never changed: poll reads it freely
        self._closed = False
        self._listener: Listener | None = None  # written by listen and close
        self._acceptor: Acceptor | None = None  # written by listen, before the listener is there
        self._armed = False  # the driving thread sleeps or is about to; it alone writes, senders read
        self._nap = 0  # even number of the last sleep; the driving thread writes
        self._recheck = _FIRST_RECHECK  # the driving thread writes
        self._polls = 0  # since the descriptors were looked at; the driving thread writes
        waker.watch(self._descriptors.fileno())

    # ------------------------------------------------------------------ making carriers
    def listen(self, address: str, acceptor: Acceptor) -> str:
        self._require_support()
        if self._listener is not None or self._closed:
            raise OSError("this transport listens already, or is closed")
        place = make_place(listen_directory(address) or self._directory)
        self._acceptor = acceptor
        try:
            self._listener = Listener(self._node, place, self._descriptors, acceptor, self._accepted)
        except BaseException:
            place.remove()
            raise
        self.address = self._listener.address_for(None).shown
        return self.address

    def address_for(self, node: int) -> str | None:
        listener = self._listener
        return None if listener is None else listener.address_for(node).secret

    def connect(self, address: str, expected: Expected, deadline: float) -> Carrier:
        target = self._target(address, expected)
        try:
            self._require_support()
            connection, segment = self._dial(target, deadline)
        except TimeoutError:
            raise
        except Refused as error:
            raise ConnectRefused(target.shown, str(error), verification=True) from error
        except OSError as error:
            raise ConnectRefused(target.shown, str(error)) from error
        return self._add(connection, segment, Peer(target.node, None, True, target.shown), dialed=True)

    def _dial(self, target: ShmAddress, deadline: float) -> tuple[socket.socket, Segment]:
        dial = Dial(deadline)
        try:
            self._begin(dial)
            segment = dial.run(target, self._node, self._geometry)
        except BaseException:
            self._end(dial)
            dial.connection.close()
            raise
        self._end(dial)
        return dial.connection, segment

    def _begin(self, dial: Dial) -> None:
        with self._lock:
            self._dials.add(dial)
            if self._closed:
                dial.hang_up()

    def _end(self, dial: Dial) -> None:
        with self._lock:
            self._dials.discard(dial)

    def _target(self, address: str, expected: Expected) -> ShmAddress:
        try:
            target = parse_address(address)
        except ValueError as error:
            raise ConnectRefused("shm", str(error)) from error
        if target.key is None:
            raise ConnectRefused(
                target.shown, "it has no key: the listener's address_for(node) makes one for each peer"
            )
        if target.node != expected.node:
            raise ConnectRefused(target.shown, "it is the address of another node", verification=True)
        foreign = why_not_ours(target.path)
        if foreign is not None:
            raise ConnectRefused(target.shown, foreign, verification=True)
        return target

    def _require_support(self) -> None:
        reason = missing_support()
        if reason is not None:
            raise OSError(reason)

    def _accepted(self, connection: socket.socket, segment: Segment, node: int, process: str) -> None:
        assert self._acceptor is not None
        carrier = self._add(connection, segment, Peer(node, None, True, process), dialed=False)
        try:
            self._acceptor.carrier_accepted(carrier)
        except BaseException as error:
            carrier.fail(CarrierLost("fault", f"the acceptor raised {error!r}"))
            raise

    def _add(self, connection: socket.socket, segment: Segment, peer: Peer, *, dialed: bool) -> ShmCarrier:
        bell = Doorbell(connection, segment.words, sleep_word(segment.side), sleep_word(1 - segment.side))
        carrier = ShmCarrier(self, peer, dialed, segment, bell)
        with self._lock:
            closed = self._closed
            if not closed:
                self._carriers.add(carrier)
        if closed:
            carrier.abort("the transport is closed")
            raise ConnectRefused(peer.address, "this side's transport is closed")
        self._descriptors.add(bell.fileno(), carrier.answer_bell)
        return carrier

    # ------------------------------------------------------------------ what carriers ask (any thread)
    def attached(self, carrier: ShmCarrier) -> None:
        """Drive it from now on. Again: it was handed over, and is driven already."""
        with self._lock:
            if carrier in self._carriers and carrier not in self._attached:
                self._attached = (*self._attached, carrier)
        self.poke()

    def forget(self, carrier: ShmCarrier) -> None:
        """It has ended."""
        self.silence(carrier)
        with self._lock:
            self._carriers.discard(carrier)
            self._attached = tuple(each for each in self._attached if each is not carrier)

    def silence(self, carrier: ShmCarrier) -> None:
        """Its doorbell has hung up, which would be readable for ever."""
        self._descriptors.remove(carrier.bell.fileno())

    def poke(self) -> None:
        """End the driving thread's sleep, if there is one. Who adds work does so before this looks at `_armed`, and
        `arm` sets that before it looks for work: one of the two sees the other.
        """
        if self._armed:
            self._waker.kick()

    # ------------------------------------------------------------------ driving
    def poll(self) -> bool:
        happened = False
        self._polls += 1
        if self._armed or self._polls >= _POLLS_PER_LOOK:
            happened = self._look_at_descriptors()
        for carrier in self._attached:
            if carrier.drive():
                happened = True
        if happened:
            self._recheck = _FIRST_RECHECK
        return happened

    def _look_at_descriptors(self) -> bool:
        self._polls = 0
        if self._armed:
            self._wake()
        happened = self._descriptors.dispatch()
        listener = self._listener
        if listener is not None and listener.due() is not None:
            listener.expire(time.monotonic())
        return happened

    def _wake(self) -> None:
        for carrier in self._attached:
            carrier.wake()
        self._armed = False

    @property
    def spins(self) -> bool:
        return bool(self._attached)

    def arm(self) -> bool:
        self._armed = True
        self._nap += 2
        carriers = self._attached
        for carrier in carriers:
            carrier.fall_asleep(self._nap)
        fence()  # see doorbell.py: the look below must not overtake the words just stored
        if all(carrier.may_sleep() for carrier in carriers):
            self._recheck = min(2 * self._recheck, _LAST_RECHECK)
            return True
        self._wake()
        return False

    def due(self) -> float | None:
        listener = self._listener
        candidates = None if listener is None else listener.due()
        if not self._attached:
            return candidates
        recheck = time.monotonic() + self._recheck
        return recheck if candidates is None else min(recheck, candidates)

    # ------------------------------------------------------------------ the end
    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            carriers = list(self._carriers)
            for dial in self._dials:
                dial.hang_up()
        for carrier in carriers:
            carrier.abort("the transport was closed")
        listener, self._listener = self._listener, None
        self.address = None
        if listener is not None:
            listener.close()
        self._waker.unwatch(self._descriptors.fileno())
        self._descriptors.close()

    def abandon(self) -> None:
        self._closed = True
        for carrier in self._carriers:
            carrier.abandon()
        self._carriers, self._attached = set(), ()
        listener, self._listener = self._listener, None
        self.address = None
        if listener is not None:
            listener.abandon()
        self._descriptors.abandon()
