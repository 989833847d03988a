"""The shared-memory transport: carriers between processes of one user on one host."""

from __future__ import annotations

import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from nexar.transport.base import Acceptor, Carrier, CarrierLost, ConnectRefused, Expected, Peer, Transport, Waker
from nexar.transport.shm.carrier import ShmCarrier
from nexar.transport.shm.handshake import (
    KEY_BYTES,
    HandshakeRefused,
    ShmDial,
    UnverifiedPeer,
    derive_key,
    require_same_user,
)
from nexar.transport.shm.ring import RingCorrupt, WakeSocket, fence, missing_support
from nexar.transport.shm.ring_frames import SegmentGeometry, ShmSegment, exit_word, sleep_word
from nexar.transport.shm.socket_directory import (
    SCHEME,
    ShmAddress,
    SocketDirectory,
    listen_directory,
    make_socket_directory,
    parse_shm_address,
    why_not_ours,
)

if TYPE_CHECKING:
    from nexar.native import exit_watch

_log = logging.getLogger(__name__)


class DescriptorSet:
    """Descriptors behind one epoll descriptor. Any thread may call `add` and `remove`; the driver calls `dispatch`."""

    __slots__ = ("_epoll", "_handlers", "_lock")

    def __init__(self) -> None:
        self._epoll = select.epoll()  # close-on-exec
        self._handlers: dict[int, Callable[[], None]] = {}  # under the lock
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def add(self, descriptor: int, handler: Callable[[], None]) -> None:
        with self._lock:
            self._handlers[descriptor] = handler
            self._epoll.register(descriptor, select.EPOLLIN)

    def remove(self, descriptor: int) -> None:
        """Call it before closing. `dispatch` may still call the handler once. Idempotent."""
        with self._lock:
            if self._handlers.pop(descriptor, None) is not None:
                self._epoll.unregister(descriptor)

    def dispatch(self) -> bool:
        with self._lock:
            if self._epoll.closed:
                return False
            ready = [self._handlers.get(descriptor) for descriptor, _ in self._epoll.poll(0)]
        for handler in ready:
            if handler is not None:
                handler()
        return bool(ready)

    def close(self) -> None:
        with self._lock:
            self._handlers.clear()
            self._epoll.close()

    def abandon(self) -> None:
        """Unregisters nothing, because the instance belongs to the parent."""
        self._epoll.close()


HANDSHAKE_TIMEOUT: Final = 10.0
MAX_UNVERIFIED: Final = 64
_BACKLOG: Final = 256
_PAUSE: Final = 0.1  # seconds without accepting after the system refused (no descriptors left)

# called with a connection, its segment, the proven node, and the name of its process
Proven = Callable[[socket.socket, ShmSegment, int, str], None]


class ShmListener:
    """Accepts and authenticates dials. Driver only, except `address_for`: any thread."""

    def __init__(
        self, node: int, place: SocketDirectory, descriptors: DescriptorSet, acceptor: Acceptor, proven: Proven
    ) -> None:
        self._node = node
        self._place = place
        self._descriptors = descriptors
        self._acceptor = acceptor
        self._proven = proven
        self._secret = secrets.token_bytes(KEY_BYTES)
        self._candidates: dict[int, UnverifiedPeer] = {}  # by descriptor, oldest first
        self._paused_until = 0.0
        self._socket = self._bind()
        descriptors.add(self._socket.fileno(), self._accept)

    def _bind(self) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.setblocking(False)
            listening.bind(self._place.socket_path)
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
        return listening

    def address_for(self, node: int | None) -> ShmAddress:
        key = None if node is None else derive_key(self._secret, node)
        return ShmAddress(self._node, self._place.socket_path, key)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(error)
            return
        connection.setblocking(False)
        self._admit(UnverifiedPeer(connection, time.monotonic() + HANDSHAKE_TIMEOUT))

    def _pause(self, error: OSError) -> None:
        # The socket stays readable, so accepting again would spin.
        self._descriptors.remove(self._socket.fileno())
        self._paused_until = time.monotonic() + _PAUSE
        self._acceptor.candidate_refused(self.address_for(None).shown, f"cannot accept: {error}")

    def _admit(self, candidate: UnverifiedPeer) -> None:
        if len(self._candidates) >= MAX_UNVERIFIED:
            self._refuse(
                next(iter(self._candidates.values())),
                "too many connections wait to authenticate, and this one is the oldest",
            )
        descriptor = candidate.connection.fileno()
        self._candidates[descriptor] = candidate
        self._descriptors.add(descriptor, lambda: self._advance(candidate))
        try:
            require_same_user(candidate.connection)
        except HandshakeRefused as error:
            self._refuse(candidate, str(error))

    def _advance(self, candidate: UnverifiedPeer) -> None:
        if self._candidates.get(candidate.connection.fileno()) is not candidate:
            return  # refused since it became readable
        try:
            segment = candidate.advance(self._secret, self._node)
        except (HandshakeRefused, RingCorrupt, OSError) as error:
            self._refuse(candidate, str(error))
            return
        if segment is not None:
            self._release(candidate)
            self._proven(candidate.connection, segment, candidate.node, candidate.name)

    def _release(self, candidate: UnverifiedPeer) -> None:
        descriptor = candidate.connection.fileno()
        self._descriptors.remove(descriptor)
        del self._candidates[descriptor]
        candidate.drop_descriptors()

    def _refuse(self, candidate: UnverifiedPeer, reason: str) -> None:
        self._release(candidate)
        candidate.connection.close()
        self._acceptor.candidate_refused(candidate.name, reason)

    def due(self) -> float | None:
        times = [candidate.deadline for candidate in self._candidates.values()]
        if self._paused_until:
            times.append(self._paused_until)
        return min(times, default=None)

    def expire(self, now: float) -> None:
        for candidate in [each for each in self._candidates.values() if each.deadline <= now]:
            self._refuse(candidate, f"no proof within {HANDSHAKE_TIMEOUT:g} s")
        if 0 < self._paused_until <= now:
            self._paused_until = 0.0
            self._descriptors.add(self._socket.fileno(), self._accept)

    def close(self) -> None:
        self._descriptors.remove(self._socket.fileno())
        for candidate in list(self._candidates.values()):
            self._release(candidate)
            candidate.connection.close()
        self._socket.close()
        self._place.remove()

    def abandon(self) -> None:
        """Socket and directory belong to the parent."""
        for candidate in self._candidates.values():
            candidate.connection.close()
        self._socket.close()
        self._place.abandon()


# Between sleeps the descriptors are polled only every so many polls: a system call would dominate an idle poll, and
# without a sleeper they show only deaths and new dials.
_POLLS_PER_LOOK: Final = 256

# Intervals of the re-check of the rings during a sleep, first and last. The socket is the signal; a re-check finds only
# what both fences (ring.py) missed. A store leaves its core within microseconds, so the first re-check finds all there
# can be: earlier stores are visible by then, later ones see the sleep word and signal. So an idle process need wake
# only ten times a second.
_FIRST_RECHECK: Final = 0.001
_LAST_RECHECK: Final = 0.1


class ShmTransport(Transport):
    """`ring_bytes` (a power of two) is the space for frames per direction and pair; `directory` is the parent of the
    socket directory.
    """

    scheme = SCHEME

    def __init__(self, waker: Waker, node: int, *, ring_bytes: int = 1 << 20, directory: str | None = None) -> None:
        self._waker = waker
        self._node = node
        self._geometry = SegmentGeometry(ring_bytes=ring_bytes)
        self._directory = directory
        self._descriptors = DescriptorSet()
        self._exit_notices = ExitNotices(self._descriptors.add, self._descriptors.remove)
        self._lock = threading.Lock()  # guards the next four
        self._dials: set[ShmDial] = set()  # in progress
        self._carriers: set[ShmCarrier] = set()
        # carriers with a sink; replaced, never changed, so poll reads it without the lock
        self._attached: tuple[ShmCarrier, ...] = ()
        self._closed = False
        self._listener: ShmListener | None = None  # written by listen and close
        self._acceptor: Acceptor | None = None  # written by listen, before the listener exists
        self._armed = False  # the driver sleeps or is about to; written by it, read by senders
        self._sleep_number = 0  # even number of the last sleep; written by the driver
        self._recheck = _FIRST_RECHECK  # written by the driver
        self._polls = 0  # since the descriptors were polled; written by the driver
        waker.watch(self._descriptors.fileno())

    # ------------------------------------------------------------------ making carriers
    def listen(self, address: str, acceptor: Acceptor) -> str:
        self._require_support()
        if self._listener is not None or self._closed:
            raise OSError("this transport listens already, or is closed")
        place = make_socket_directory(listen_directory(address) or self._directory)
        self._acceptor = acceptor
        try:
            self._listener = ShmListener(self._node, place, self._descriptors, acceptor, self._accepted)
        except BaseException:
            place.remove()
            raise
        self.address = self._listener.address_for(None).shown
        return self.address

    def lose_at_exit(self, enabled: bool) -> None:
        self._exit_notices.enabled = enabled

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
        except HandshakeRefused as error:
            raise ConnectRefused(target.shown, str(error), verification=True) from error
        except OSError as error:
            raise ConnectRefused(target.shown, str(error)) from error
        return self._add(connection, segment, Peer(target.node, None, True, target.shown), dialed=True)

    def _dial(self, target: ShmAddress, deadline: float) -> tuple[socket.socket, ShmSegment]:
        dial = ShmDial(deadline)
        try:
            self._begin(dial)
            segment = dial.run(target, self._node, self._geometry)
        except BaseException:
            self._end(dial)
            dial.connection.close()
            raise
        self._end(dial)
        return dial.connection, segment

    def _begin(self, dial: ShmDial) -> None:
        with self._lock:
            self._dials.add(dial)
            if self._closed:
                dial.cancel()

    def _end(self, dial: ShmDial) -> None:
        with self._lock:
            self._dials.discard(dial)

    def _target(self, address: str, expected: Expected) -> ShmAddress:
        try:
            target = parse_shm_address(address)
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

    def _accepted(self, connection: socket.socket, segment: ShmSegment, node: int, process: str) -> None:
        assert self._acceptor is not None
        carrier = self._add(connection, segment, Peer(node, None, True, process), dialed=False)
        try:
            self._acceptor.carrier_accepted(carrier)
        except BaseException as error:
            carrier.fail(CarrierLost("fault", f"the acceptor raised {error!r}"))
            raise

    def _add(self, connection: socket.socket, segment: ShmSegment, peer: Peer, *, dialed: bool) -> ShmCarrier:
        wake_socket = WakeSocket(connection, segment.words, sleep_word(segment.side), sleep_word(1 - segment.side))
        carrier = ShmCarrier(self, peer, dialed, segment, wake_socket)
        with self._lock:
            closed = self._closed
            if not closed:
                self._carriers.add(carrier)
        if closed:
            carrier.abort("the transport is closed")
            raise ConnectRefused(peer.address, "this side's transport is closed")
        self._exit_notices.add(carrier, segment.words, exit_word(segment.side), exit_word(1 - segment.side))
        self._descriptors.add(wake_socket.fileno(), carrier.socket_ready)
        return carrier

    # ------------------------------------------------------------------ for carriers (any thread)
    def attached(self, carrier: ShmCarrier) -> None:
        with self._lock:
            if carrier in self._carriers and carrier not in self._attached:
                self._attached = (*self._attached, carrier)
        self.wake_driver()

    def forget(self, carrier: ShmCarrier) -> None:
        self.unwatch(carrier)
        self._exit_notices.remove(carrier)
        with self._lock:
            self._carriers.discard(carrier)
            self._attached = tuple(each for each in self._attached if each is not carrier)

    def unwatch(self, carrier: ShmCarrier) -> None:
        """Stop watching the wakeup socket: one that the peer closed stays readable forever."""
        self._descriptors.remove(carrier.wake_socket.fileno())

    def wake_driver(self) -> None:
        """Callers add work before this reads `_armed`; `prepare_sleep` sets `_armed` before it looks for work. So one
        sees the other.
        """
        if self._armed:
            self._waker.wake()

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

    def prepare_sleep(self) -> bool:
        self._armed = True
        self._sleep_number += 2
        carriers = self._attached
        for carrier in carriers:
            carrier.fall_asleep(self._sleep_number)
        fence()  # the look below must not overtake the stores above: see ring.py
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

    # ------------------------------------------------------------------ closing
    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            carriers = list(self._carriers)
            for dial in self._dials:
                dial.cancel()
        for carrier in carriers:
            carrier.abort("the transport was closed")
        listener, self._listener = self._listener, None
        self.address = None
        if listener is not None:
            listener.close()
        self._exit_notices.close()
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
        self._exit_notices.abandon()
        self._descriptors.abandon()


class ExitNotices:
    """Tells a carrier that its peer's process has ended, milliseconds before the kernel closes the peer's socket.

    Watches the peers of one transport, from the first carrier on. Any thread. Needs nexar-native and Linux 5.16.
    Without them the carriers notice the closed socket.
    """

    def __init__(self, watch: Callable[[int, Callable[[], None]], None], unwatch: Callable[[int], None]) -> None:
        """`watch` makes the driver call a function when a descriptor is readable."""
        self.enabled = False  # while not, ends are ignored, and the carriers notice the closed socket
        self._watch_descriptor = watch
        self._unwatch_descriptor = unwatch
        self._lock = threading.Lock()  # guards everything below
        self._watch: exit_watch.ExitWatch | None = None
        self._supported = True
        self._carriers: dict[int, ShmCarrier] = {}  # by key
        self._keys: dict[ShmCarrier, int] = {}

    def add(self, carrier: ShmCarrier, words: memoryview, mine: int, theirs: int) -> None:
        """`mine` and `theirs` are indices of words of the first page."""
        with self._lock:
            watch = self._begun()
            if watch is None:
                return
            try:
                key = watch.add(words, mine * words.itemsize, theirs * words.itemsize)
            except OSError as error:  # for example too many mappings
                _log.debug("the end of %s shows late: %s", carrier.peer.address, error)
                return
            if key is not None:
                self._carriers[key], self._keys[carrier] = carrier, key

    def _begun(self) -> exit_watch.ExitWatch | None:
        if self._watch is None and self._supported:
            self._supported = False
            self._watch = _new_watch()
            if self._watch is not None:
                self._watch_descriptor(self._watch.fileno(), self._deliver)
        return self._watch

    def _deliver(self) -> None:
        with self._lock:
            keys = [] if self._watch is None else self._watch.ended()
            ended = [self._carriers[key] for key in keys if key in self._carriers and self.enabled]
        for carrier in ended:
            carrier.process_ended()

    def remove(self, carrier: ShmCarrier) -> None:
        """The peer is not told of a later end of this process. Idempotent."""
        with self._lock:
            key = self._keys.pop(carrier, None)
            if key is not None and self._watch is not None:
                del self._carriers[key]
                self._watch.remove(key)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            watch, self._watch, self._supported = self._watch, None, False
            self._carriers.clear()
            self._keys.clear()
            if watch is not None:
                self._unwatch_descriptor(watch.fileno())
                watch.close()

    def abandon(self) -> None:
        """In a forked child: the words are the parent's. Takes no lock."""
        self._watch, self._supported = None, False
        self._carriers, self._keys = {}, {}


def _new_watch() -> exit_watch.ExitWatch | None:
    try:
        from nexar.native import exit_watch  # noqa: PLC0415 - optional

        return exit_watch.ExitWatch()
    except (ImportError, OSError) as error:
        _log.debug("the end of a process on this host shows when its sockets close: %s", error)
        return None
