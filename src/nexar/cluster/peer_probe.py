"""Probes whether a member is alive.

The peer's *system* refuses TCP connections if the process has ended. Its *Python code* answers a Ping. Its *QUIC
transport* acknowledges packets even while the Python code is stuck.

An accepted connection proves no life: the system also accepts for a stopped or ending process, so a connection that is
reset at once is tried again. But such a process exists and may lack CPU, so it gets more time. Packets sent before a
death may still arrive, so they count only if more follow.
"""

from __future__ import annotations

import errno
import itertools
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from nexar.cluster.decisions.failure_detector import IF_SLOW
from nexar.cluster.decisions.membership_events import Loss, LossKind
from nexar.cluster.membership import Member
from nexar.cluster.node import Node
from nexar.errors import NexarError
from nexar.links.carrier_selection import shows_life
from nexar.transport.address import parse_address
from nexar.transport.registry import tcp_scheme
from nexar.types import NodeId, format_seconds
from nexar.wire.control import Message, Ping, Pong

if TYPE_CHECKING:
    from nexar.links.link import Link  # at run time it would load NumPy into the launcher

_MAX_TRIES: Final = 5
"""Accepted connections that end at once; an ending process does not accept more."""
_IN_PROGRESS: Final = frozenset({0, errno.EINPROGRESS, errno.EWOULDBLOCK})


class TcpProbe:
    """A TCP connection attempt in a `with` block; `selector` data are its callbacks. Blocks only to resolve names."""

    def __init__(self, address: str, selector: selectors.BaseSelector) -> None:
        self.address: Final = address
        self._selector = selector
        self._socket: socket.socket | None = None
        self._since: float | None = None  # when it was accepted
        self._tries = 0
        self.refused = False  # no process listens
        self.failed: str | None = None  # the reason; None while it may succeed

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    @property
    def accepted(self) -> bool:
        return self._since is not None

    def open_for(self, seconds: float) -> bool:
        return self._since is not None and time.monotonic() - self._since >= seconds

    def _begin(self) -> None:
        self._tries += 1
        try:
            host, port = parse_address(self.address)
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            number = self._socket.connect_ex(place)
        except OSError as error:
            self._fail(error.errno, str(error))
            return
        if number in _IN_PROGRESS:
            self._selector.register(self._socket, selectors.EVENT_WRITE, self._connected)
        else:
            self._fail(number, os.strerror(number))

    def _connected(self) -> None:
        assert self._socket is not None
        number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number == errno.ECONNRESET:
            self._ended()
        elif number:
            self._fail(number, os.strerror(number))
        else:
            self._since = time.monotonic()
            self._selector.modify(self._socket, selectors.EVENT_READ, self._ended)

    def _ended(self) -> None:
        # The peer never sends, so it has closed or reset the connection.
        self._end()
        if self._tries < _MAX_TRIES:
            self._begin()
        else:
            self._fail(None, "it accepts connections and closes them")

    def _fail(self, number: int | None, reason: str) -> None:
        self._end()
        self.refused = number == errno.ECONNREFUSED
        self.failed = reason

    def _end(self) -> None:
        if self._socket is not None:
            if self._socket.fileno() in self._selector.get_map():
                self._selector.unregister(self._socket)
            self._socket.close()
        self._socket, self._since = None, None


def nobody_listens(addresses: Sequence[str], timeout: float) -> bool:
    """Whether all addresses refuse TCP connections. False at the timeout."""
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        probes = [stack.enter_context(TcpProbe(address, selector)) for address in addresses]
        while not any(probe.accepted for probe in probes) and not all(probe.failed for probe in probes):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in selector.select(left):
                key.data()
        return all(probe.refused for probe in probes)


class PingTable:
    """Pings and their waiters. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[NodeId, Callable[[], None]]] = {}  # guarded by the lock

    def expect(self, peer: NodeId, answered: Callable[[], None]) -> int:
        """A number for a Ping. The driver calls `answered` for each Pong until `forget`; it must not block."""
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = (peer, answered)
        return number

    def forget(self, number: int) -> None:
        with self._lock:
            self._waiting.pop(number, None)

    def arrived(self, link: Link, message: Message) -> None:
        # Pongs without a waiter, or from another peer, are late or forged.
        if isinstance(message, Ping):
            _answer(link, message)
        elif isinstance(message, Pong):
            with self._lock:
                peer, answered = self._waiting.get(message.number, (None, None))
                if answered is not None and peer == link.peer:
                    answered()


def _answer(link: Link, ping: Ping) -> None:
    try:
        link.send_control(Pong(ping.number))
    except NexarError:
        return  # the link is lost; the sender notices


_COUNT_INTERVAL: Final = 0.05  # seconds between two packet counts, and between two Pings
_MIN_OPEN_SECONDS: Final = 0.02  # seconds that a connection must last; shorter ones come from a process that is ending


def probe_peer(
    node: Node,
    member: Member,
    link: Link | None,
    pings: PingTable,
    deadline: float,
    *,
    packets: bool = True,
    patience: float = 0.0,
) -> Loss | None:
    """Returns why the member is unreachable, None if it is reachable. Blocks; not in the driver.

    Returns by the deadline (time.monotonic), `patience` later for a process that exists, at once when the node closes.
    Without `packets` the Python code must answer: the caller cannot tell how long it has been stuck. Without a link an
    accepted connection suffices.
    """
    if link is not None and link.failure is not None:
        link = None
    with _PeerProbe(node, member, link, pings, packets=packets) as asked:
        return asked.run(deadline, patience)


class _PeerProbe:
    def __init__(self, node: Node, member: Member, link: Link | None, pings: PingTable, *, packets: bool) -> None:
        self._node = node
        self._packets = packets
        self._link = link
        self._pings = pings
        offered = node.dial_addresses(member)  # without addresses of this host
        tcp = tcp_scheme(offered)
        self._addresses = () if tcp is None else offered[tcp]
        self._peer = member.node
        self._begin = time.monotonic()
        self._stack = ExitStack()
        self._tcp_probes: list[TcpProbe] = []
        self._answered = False  # written by the driver
        self._number = 0
        self._received_bytes: float | None = None  # at the last count
        self._packets_came = False
        self._counted_at = self._begin

    def __enter__(self) -> Self:
        with self._stack as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._wake_sender, self._wake_receiver = socket.socketpair()
            for end in (self._wake_sender, self._wake_receiver):
                stack.enter_context(end)
                end.setblocking(False)
            self._selector.register(self._wake_receiver, selectors.EVENT_READ)
            self._number = self._pings.expect(self._peer, self._pong)
            stack.callback(self._pings.forget, self._number)
            stack.enter_context(self._node.cancel_token.waking(self._wake))
            for address in self._addresses:
                self._tcp_probes.append(stack.enter_context(TcpProbe(address, self._selector)))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # -- called by the driver, or by the thread that closes the node ---------------------------------------

    def _pong(self) -> None:
        self._answered = True
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_sender.send(b"!")
        except OSError:
            return  # already pending, or closed

    # -- the probing thread --------------------------------------------------------------------------------

    def run(self, deadline: float, patience: float) -> Loss | None:
        self._ask()
        while not self._lives():
            failure = self._certain_failure()
            now = time.monotonic()
            left = deadline + (patience if self._exists else 0.0) - now
            if failure is not None or left <= 0:
                return failure or Loss(LossKind.NO_ANSWER, self._describe_silence(now))
            self._wait(min(left, _MIN_OPEN_SECONDS if self._link is None else _COUNT_INTERVAL))
        return None

    @property
    def _exists(self) -> bool:
        return self._packets_came or any(probe.accepted for probe in self._tcp_probes)

    def _ask(self) -> None:
        if self._link is not None:
            try:
                self._link.send_control(Ping(self._number))
            except NexarError:
                self._link = None

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(64)
            else:
                key.data()

    def _lives(self) -> bool:
        if self._answered or self._node.cancel_token.is_cancelled:
            return True
        if self._link is None:
            lasting = any(probe.open_for(_MIN_OPEN_SECONDS) for probe in self._tcp_probes)
            return lasting or not self._tcp_probes
        return self._shows_life(self._link)

    def _shows_life(self, link: Link) -> bool:
        now = time.monotonic()
        if not shows_life(link.schemes) or now < self._counted_at + _COUNT_INTERVAL:
            return False
        before, self._received_bytes, self._counted_at = self._received_bytes, link.heard_bytes(), now
        self._ask()
        came = before is not None and self._received_bytes != before and link.failure is None
        self._packets_came = self._packets_came or came
        return came and self._packets

    def _certain_failure(self) -> Loss | None:
        if not self._tcp_probes or not all(probe.failed for probe in self._tcp_probes):
            return None
        where = ", ".join(self._addresses)
        if all(probe.refused for probe in self._tcp_probes):
            return Loss(LossKind.ENDED, f"its process has ended (connection refused at {where})")
        if self._link is not None:
            return None
        reasons = "; ".join(f"{probe.address}: {probe.failed}" for probe in self._tcp_probes)
        return Loss(LossKind.NO_ANSWER, f"it cannot be reached ({reasons})")

    def _describe_silence(self, now: float) -> str:
        waited = f"no answer for {format_seconds(now - self._begin)}"
        if any(probe.accepted for probe in self._tcp_probes):
            return f"{waited}, though its system accepts connections: its process is stopped or stuck{IF_SLOW}"
        return waited
