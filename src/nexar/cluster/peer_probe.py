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
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.decisions.failure_detector import IF_SLOW
from nexar.cluster.decisions.membership_events import Loss, LossKind
from nexar.cluster.membership import Member
from nexar.cluster.node import Node
from nexar.errors import NexarError
from nexar.links.carrier_selection import shows_life
from nexar.transport.address import parse_address
from nexar.transport.registry import tcp_scheme
from nexar.types import NodeId, format_node, format_seconds
from nexar.wire.control import Message, Ping, Pong

if TYPE_CHECKING:
    from nexar.links.link import Link  # at run time it would load NumPy into the launcher

_log = logging.getLogger(__name__)

_MAX_TRIES: Final = 5
"""Accepted connections that end at once; an ending process does not accept more."""
_IN_PROGRESS: Final = frozenset({0, errno.EINPROGRESS, errno.EWOULDBLOCK})

RunInThread: TypeAlias = Callable[[Callable[[], None]], None]
"""Runs a task that blocks."""
_AddressInfo: TypeAlias = tuple[Any, ...]  # as socket.getaddrinfo gives it


def _run_here(task: Callable[[], None]) -> None:
    task()


class TcpProbe:
    """A TCP connection attempt. Use it, and the `with` block that ends it, only in its loop."""

    def __init__(
        self,
        address: str,
        loop: ControlLoop,
        changed: Callable[[], None] = lambda: None,
        *,
        run_in_thread: RunInThread = _run_here,
    ) -> None:
        """`changed` is called after each change, except during construction. `run_in_thread` looks up names."""
        self.address: Final = address
        self._loop = loop
        self._changed = changed
        self._run_in_thread = run_in_thread
        self._socket: socket.socket | None = None
        self._since: float | None = None  # when it was accepted
        self._tries = 0
        self._closed = False
        self.refused = False  # no process listens
        self.failed: str | None = None  # the reason; None while it may succeed
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed = True
        self._end()

    @property
    def accepted(self) -> bool:
        return self._since is not None

    def open_for(self, seconds: float) -> bool:
        return self._since is not None and self._loop.now() - self._since >= seconds

    def _begin(self) -> None:
        self._tries += 1
        host, port = parse_address(self.address)
        try:
            found = _look_up(host, port, socket.AI_NUMERICHOST)
        except OSError:  # a name
            self._run_in_thread(partial(self._look_up_name, host, port))
        else:
            self._connect(found)

    def _look_up_name(self, host: str, port: int) -> None:
        """Blocks. Not in the loop, unless nothing else runs there."""
        try:
            found = _look_up(host, port)
        except OSError as error:
            self._loop.call_soon(partial(self._name_found, None, error))
        else:
            self._loop.call_soon(partial(self._name_found, found, None))

    def _name_found(self, found: _AddressInfo | None, error: OSError | None) -> None:
        if self._closed:
            return
        if found is None:
            self._fail(None if error is None else error.errno, str(error))
        else:
            self._connect(found)
        self._changed()

    def _connect(self, found: _AddressInfo) -> None:
        try:
            self._socket = socket.socket(found[0], socket.SOCK_STREAM)
            self._socket.setblocking(False)
            number = self._socket.connect_ex(found[4])
        except OSError as error:
            self._fail(error.errno, str(error))
            return
        if number in _IN_PROGRESS:
            self._loop.register(self._socket, selectors.EVENT_WRITE, self._connected)
        else:
            self._fail(number, os.strerror(number))

    def _connected(self) -> None:
        assert self._socket is not None
        number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number == errno.ECONNRESET:
            self._retry()
        elif number:
            self._fail(number, os.strerror(number))
        else:
            self._since = self._loop.now()
            self._loop.register(self._socket, selectors.EVENT_READ, self._ended)
        self._changed()

    def _ended(self) -> None:
        # The peer never sends, so it has closed or reset the connection.
        self._retry()
        self._changed()

    def _retry(self) -> None:
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
            self._loop.unregister(self._socket)
            self._socket.close()
        self._socket, self._since = None, None


def _look_up(host: str, port: int, flags: int = 0) -> _AddressInfo:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]


def nobody_listens(addresses: Sequence[str], timeout: float) -> bool:
    """Whether all addresses refuse TCP connections. False at the timeout. Blocks."""
    deadline = time.monotonic() + timeout
    with ControlLoop(threaded=False) as loop, ExitStack() as stack:
        probes = [stack.enter_context(TcpProbe(address, loop)) for address in addresses]
        while not any(probe.accepted for probe in probes) and not all(probe.failed for probe in probes):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            loop.step(left)
        return all(probe.refused for probe in probes)


def ended_on_this_host(node: Node, member: Member) -> Loss | None:
    """ENDED if the member is on this host and its system refuses connections; None: probe it. Never blocks: within one
    host the kernel answers before `connect` returns.
    """
    if member.host != node.host:
        return None
    tcp = tcp_scheme(member.addresses)
    addresses = () if tcp is None else member.addresses[tcp]  # in any order: all must refuse
    return _ended(addresses) if addresses and all(map(_is_refused, addresses)) else None


def _is_refused(address: str) -> bool:
    host, port = parse_address(address)
    try:
        found = _look_up(host, port, socket.AI_NUMERICHOST)
        with socket.socket(found[0], socket.SOCK_STREAM) as attempt:
            attempt.setblocking(False)
            number = attempt.connect_ex(found[4])
            return errno.ECONNREFUSED in (number, attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    except OSError:
        return False  # a name, or no descriptor is left


def _tcp_addresses(node: Node, member: Member) -> Sequence[str]:
    offered = node.dial_addresses(member)  # without addresses of this host
    tcp = tcp_scheme(offered)
    return () if tcp is None else offered[tcp]


def _ended(addresses: Iterable[str]) -> Loss:
    return Loss(LossKind.ENDED, f"its process has ended (connection refused at {', '.join(addresses)})")


class PingTable:
    """Pings and their waiters. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[NodeId, Callable[[], None]]] = {}  # guarded by the lock

    def expect(self, peer: NodeId, answered: Callable[[], None]) -> int:
        """Returns a number for a Ping. The driver calls `answered` for each Pong until `forget`; it must not block."""
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


_LONGEST_STEP: Final = 60.0
_COUNT_INTERVAL: Final = 0.05  # seconds between two packet counts, and between two Pings
_MIN_OPEN_SECONDS: Final = 0.02  # seconds that a connection must last; shorter ones come from a process that is ending


class PeerProbe:
    """Probes whether a member is reachable. Only in its loop."""

    def __init__(
        self,
        node: Node,
        member: Member,
        link: Link | None,
        pings: PingTable,
        *,
        deadline: float,
        finished: Callable[[Loss | None], None],
        loop: ControlLoop,
        run_in_thread: RunInThread,
        traffic_suffices: bool = True,
        patience: float = 0.0,
    ) -> None:
        """The loop calls `finished` once, later: with the reason why the member is unreachable, or None if it is
        reachable. It does so by the deadline, `patience` later for an existing process, at once when the node closes.

        `traffic_suffices`: a member whose transport sends lives. Without it the Python code must answer: the caller
        cannot tell how long it has been stuck. Without a link an accepted connection suffices. `run_in_thread` looks up
        names. Raises if the addresses are invalid.
        """
        self._node = node
        self._loop = loop
        self._finished = finished
        self._deadline, self._patience = deadline, patience
        self._traffic_suffices = traffic_suffices
        self._link = None if link is None or link.failure is not None else link
        self._peer = member.node
        self._begin = self._counted_at = loop.now()
        self._tcp_probes: list[TcpProbe] = []
        self._answered = False  # written by the driver
        self._received_bytes: float | None = None  # at the last count
        self._traffic_seen = False
        self._over = False
        self._timer = loop.call_at(None, self._on_timer)
        with ExitStack() as stack:
            stack.callback(self._timer.cancel)
            self._number = pings.expect(self._peer, self._pong)
            stack.callback(pings.forget, self._number)
            stack.enter_context(node.cancel_token.waking(self._wake))
            for address in _tcp_addresses(node, member):
                probe = TcpProbe(address, loop, self._check, run_in_thread=run_in_thread)
                self._tcp_probes.append(stack.enter_context(probe))
            self._ask()
            self._timer.wake_by(self._begin)
            self._resources = stack.pop_all()

    def close(self) -> None:
        """`finished` is not called afterwards. Idempotent."""
        self._over = True
        self._resources.close()

    # -- called by the driver, or by the thread that closes the node ---------------------------------------

    def _pong(self) -> None:
        if not self._answered:  # the queue of the loop gets one callback, however many Pongs the peer sends
            self._answered = True
            self._wake()

    def _wake(self) -> None:
        self._loop.call_soon(self._check)

    # -- the loop ------------------------------------------------------------------------------------------

    def _on_timer(self, _: float) -> None:
        self._check()

    def _check(self) -> None:
        """Finish if the result is known, else check again soon."""
        if self._over:
            return
        try:
            over, loss = self._result()
        except Exception as fault:  # noqa: BLE001 - logged; others must agree to a removal
            over, loss = True, broken_probe(self._peer, fault)
        if over:
            self.close()
            self._finished(loss)

    def _result(self) -> tuple[bool, Loss | None]:
        """Returns whether the result is known, and the loss."""
        if self._lives():
            return True, None
        now, end = self._loop.now(), self._deadline + (self._patience if self._exists else 0.0)
        failure = self._certain_failure()
        if failure is not None or now >= end:
            return True, failure or Loss(LossKind.NO_ANSWER, self._describe_silence(now))
        self._timer.move(min(end, now + (_MIN_OPEN_SECONDS if self._link is None else _COUNT_INTERVAL)))
        return False, None

    @property
    def _exists(self) -> bool:
        return self._traffic_seen or any(probe.accepted for probe in self._tcp_probes)

    def _ask(self) -> None:
        if self._link is not None:
            try:
                self._link.send_control(Ping(self._number))
            except NexarError:
                self._link = None

    def _lives(self) -> bool:
        if self._answered or self._node.cancel_token.is_cancelled:
            return True
        if self._link is None:
            lasting = any(probe.open_for(_MIN_OPEN_SECONDS) for probe in self._tcp_probes)
            return lasting or not self._tcp_probes
        return self._shows_life(self._link)

    def _shows_life(self, link: Link) -> bool:
        now = self._loop.now()
        if not shows_life(link.schemes) or now < self._counted_at + _COUNT_INTERVAL:
            return False
        before, self._received_bytes, self._counted_at = self._received_bytes, link.heard_bytes(), now
        self._ask()
        came = before is not None and self._received_bytes != before and link.failure is None
        self._traffic_seen = self._traffic_seen or came
        return came and self._traffic_suffices

    def _certain_failure(self) -> Loss | None:
        if not self._tcp_probes or not all(probe.failed for probe in self._tcp_probes):
            return None
        if all(probe.refused for probe in self._tcp_probes):
            return _ended(probe.address for probe in self._tcp_probes)
        if self._link is not None:
            return None
        reasons = "; ".join(f"{probe.address}: {probe.failed}" for probe in self._tcp_probes)
        return Loss(LossKind.NO_ANSWER, f"it cannot be reached ({reasons})")

    def _describe_silence(self, now: float) -> str:
        waited = f"no answer for {format_seconds(now - self._begin)}"
        if any(probe.accepted for probe in self._tcp_probes):
            return f"{waited}, though its system accepts connections: its process is stopped or stuck{IF_SLOW}"
        return waited


def broken_probe(node: NodeId, fault: Exception) -> Loss:
    """Log an exception of a probe. The node counts as unreachable: others must agree to a removal."""
    text = f"it cannot be probed: {type(fault).__name__}: {fault}"
    _log.error("node %s: %s", format_node(node), text, exc_info=fault)
    return Loss(LossKind.NO_ANSWER, text)


def probe_peer(
    node: Node,
    member: Member,
    link: Link | None,
    pings: PingTable,
    deadline: float,
    *,
    traffic_suffices: bool = True,
    patience: float = 0.0,
) -> Loss | None:
    """As PeerProbe, but blocks until the result is known (deadline: time.monotonic). Steps its own loop: neither for
    the driver nor for a control loop.
    """
    results: list[Loss | None] = []
    with ControlLoop(threaded=False) as loop:
        probe = PeerProbe(
            node,
            member,
            link,
            pings,
            deadline=deadline,
            finished=results.append,
            loop=loop,
            run_in_thread=_run_here,
            traffic_suffices=traffic_suffices,
            patience=patience,
        )
        try:
            while not results:
                loop.step(_LONGEST_STEP)
        finally:
            probe.close()
    return results[0]
