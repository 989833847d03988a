"""A connection to an address, for no other purpose than to see whether anybody listens there.

Pings that are out, and who waits for their Pongs.

Does a member live? Asked at once, wherever something hints that it does not.

Three witnesses are heard side by side. Its *system* says by refusing connections that nobody listens there any more: so
its process has ended. Its *Python code* answers a Ping on the link. Its *transport*, where that is QUIC, goes on
acknowledging although its Python code is stuck: that is life too. A connection that its system takes does not prove
life, for it does so for a stopped process as well; and for one that is just ending, so a connection that is reset at
once is tried again. But such a process is not dead: it may get too little CPU to answer, so it has more time. What was
on its way when it died may still come in: packets count only when they come again after a while.
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
from typing import Final, Self

from nexar.cluster.decisions.failure_detector import IF_SLOW
from nexar.cluster.membership import Member
from nexar.cluster.node import Node
from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.transport.address import parse_address
from nexar.types import NodeId, format_seconds
from nexar.wire.control import Message, Ping, Pong

_AGAIN: Final = 5
"""Connections that were taken and ended at once; more is no process that ends, but one that wants nobody."""
_UNDER_WAY: Final = frozenset({0, errno.EINPROGRESS, errno.EWOULDBLOCK})


class TcpProbe:
    """A `with` block, over which `selector` calls its data (a function) when there is news. Never blocks, but for the
    lookup of an address that is a name.
    """

    def __init__(self, address: str, selector: selectors.BaseSelector) -> None:
        self.address: Final = address
        self._selector = selector
        self._socket: socket.socket | None = None
        self._since: float | None = None  # when the connection was taken
        self._tries = 0
        self.refused = False
        """Nobody listens there."""
        self.failed: str | None = None
        """Why nothing came of it; None: something may, or has."""

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    @property
    def stands(self) -> bool:
        """The connection was taken."""
        return self._since is not None

    def lasts(self, seconds: float) -> bool:
        """It was taken so long ago, and has not ended."""
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
        if number in _UNDER_WAY:
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
        """Nothing is ever said to us, so it was closed or reset; what was said is of no interest."""
        self._end()
        if self._tries < _AGAIN:
            self._begin()
        else:
            self._fail(None, "it takes connections and ends them")

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
    """Whether every one of them refuses TCP connections. False where one was taken, or is silent for so long."""
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        knocks = [stack.enter_context(TcpProbe(address, selector)) for address in addresses]
        while not any(knock.stands for knock in knocks) and not all(knock.failed for knock in knocks):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in selector.select(left):
                key.data()
        return all(knock.refused for knock in knocks)


class PingTable:
    """Of one node. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[NodeId, Callable[[], None]]] = {}  # under the lock

    def expect(self, peer: NodeId, answered: Callable[[], None]) -> int:
        """The number for a Ping to that peer. `answered` is called on the driving thread for each of its Pongs, until
        it is forgotten, and must not block.
        """
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = (peer, answered)
        return number

    def forget(self, number: int) -> None:
        """Nobody waits for it any more: `answered` is not called again when this returns."""
        with self._lock:
            self._waiting.pop(number, None)

    def arrived(self, link: Link, message: Message) -> None:
        """A Ping is answered, a Pong told to who waits for it; one that nobody waits for, or of somebody else, is late
        or forged, and means nothing. Other messages are none of its business.
        """
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
        return  # the link is gone, and whoever asked hears of that


__all__ = ["ENDED", "PingTable", "probe_peer"]

ENDED: Final = "its process has ended"
"""How a cause begins after which nothing more is to be tried."""

_GLANCE: Final = 0.05
"""Seconds between two looks at the packets, and between two Pings."""
_MOMENT: Final = 0.02
"""Seconds that a connection must last to be no farewell of a process that ends."""


def probe_peer(
    node: Node,
    member: Member,
    link: Link | None,
    pings: PingTable,
    deadline: float,
    *,
    packets: bool = True,
    patience: float = 0.0,
) -> str | None:
    """Why this member cannot be reached; None: it lives, or nothing says that it does not. Returns at the deadline
    (time.monotonic) at the latest, `patience` seconds later for a process that exists (its system takes connections,
    or packets come), and at once when the node closes. Blocks; any thread but the driving one.

    `packets`: they are enough; else its Python code has to answer, for who cannot tell how long it has been stuck.
    Where there is no link to ask on, a system that takes connections is the best answer: who wants more dials.
    """
    if link is not None and link.failure is not None:
        link = None
    with _PeerProbe(node, member, link, pings, packets=packets) as asked:
        return asked.run(deadline, patience)


class _PeerProbe:
    """One question. A `with` block."""

    def __init__(self, node: Node, member: Member, link: Link | None, pings: PingTable, *, packets: bool) -> None:
        self._node = node
        self._packets = packets
        self._link = link
        self._pings = pings
        self._addresses = node.ways_to(member).get("tls", ())  # those that lead to us are left out there
        self._peer = member.node
        self._begin = time.monotonic()
        self._stack = ExitStack()
        self._tcp_probes: list[TcpProbe] = []
        self._answered = False  # written by the driving thread
        self._number = 0
        self._heard: float | None = None  # at the last glance
        self._packets_came = False
        self._glanced = self._begin

    def __enter__(self) -> Self:
        with self._stack as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._bell, self._ears = socket.socketpair()
            for end in (self._bell, self._ears):
                stack.enter_context(end)
                end.setblocking(False)
            self._selector.register(self._ears, selectors.EVENT_READ)
            self._number = self._pings.expect(self._peer, self._pong)
            stack.callback(self._pings.forget, self._number)
            stack.enter_context(self._node.cancel_token.waking(self._ring))
            for address in self._addresses:
                self._tcp_probes.append(stack.enter_context(TcpProbe(address, self._selector)))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # -- the driving thread, or who closes the node --------------------------------------------------------

    def _pong(self) -> None:
        self._answered = True
        self._ring()

    def _ring(self) -> None:
        try:
            self._bell.send(b"!")
        except OSError:
            return  # it rings already, or nobody listens any more

    # -- who asks ------------------------------------------------------------------------------------------

    def run(self, deadline: float, patience: float) -> str | None:
        """The answer."""
        self._ask()
        while not self._lives():
            cause = self._cause()
            now = time.monotonic()
            left = deadline + (patience if self._exists else 0.0) - now
            if cause is not None or left <= 0:
                return cause or self._silence(now)
            self._wait(min(left, _MOMENT if self._link is None else _GLANCE))
        return None

    @property
    def _exists(self) -> bool:
        """Whether something shows that there is a process, be it stopped, stuck or slow."""
        return self._packets_came or any(knock.stands for knock in self._tcp_probes)

    def _ask(self) -> None:
        """A link that was lost meanwhile is nobody to ask."""
        if self._link is not None:
            try:
                self._link.send_control(Ping(self._number))
            except NexarError:
                self._link = None

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.fileobj is self._ears:
                self._ears.recv(64)
            else:
                key.data()

    def _lives(self) -> bool:
        if self._answered or self._node.cancel_token.made:
            return True
        if self._link is None:
            lasting = any(knock.lasts(_MOMENT) for knock in self._tcp_probes)
            return lasting or not self._tcp_probes
        return self._shows_life(self._link)

    def _shows_life(self, link: Link) -> bool:
        """Packets that came between two glances, the first of which is behind us."""
        now = time.monotonic()
        if "quic" not in link.schemes or now < self._glanced + _GLANCE:
            return False
        before, self._heard, self._glanced = self._heard, link.heard_bytes(), now
        self._ask()
        came = before is not None and self._heard != before and link.failure is None
        self._packets_came = self._packets_came or came
        return came and self._packets

    def _cause(self) -> str | None:
        """Why it is gone, if that is certain by now."""
        if not self._tcp_probes or not all(knock.failed for knock in self._tcp_probes):
            return None
        where = ", ".join(self._addresses)
        if all(knock.refused for knock in self._tcp_probes):
            return f"{ENDED} (connection refused at {where})"
        if self._link is not None:
            return None
        reasons = "; ".join(f"{knock.address}: {knock.failed}" for knock in self._tcp_probes)
        return f"it cannot be reached ({reasons})"

    def _silence(self, now: float) -> str:
        waited = f"no answer for {format_seconds(now - self._begin)}"
        if any(knock.stands for knock in self._tcp_probes):
            return f"{waited}, though its system takes connections: its process is stopped or stuck{IF_SLOW}"
        return waited
