"""Limits for unauthenticated peers: allowed frames and number of connections. Also advice for rejected certificates.

The header is checked before memory is committed for the body, so an unverified peer gets the memory of one small
message.

Rules for connections that have not authenticated yet (the same as in `native/src/quic/handshakes.rs`):
- At most `capacity` are pending, each until its deadline. While there is room, every connection is admitted: a host
  with many ranks needs one for each.
- When full, the source with the most pending connections loses a random one that is past its grace period. A source
  with more connections than the new one's has no grace period. Otherwise the new connection is refused.

So no source can displace a smaller one. Equal sources displace each other only after the grace period, which covers a
handshake over a slow path. A random choice cannot be anticipated.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple, TypeAlias

from nexar.errors import UsageError
from nexar.security.certificates import Credentials
from nexar.transport.address import parse_address
from nexar.transport.base import Expected
from nexar.types import UNKNOWN_NODE, format_node
from nexar.wire.frame import Bytes, Frame, FrameError, FrameKind, Lane, decode

UNVERIFIED_BYTES: Final = 4 << 10  # largest body; fits a hello, a proof, a signing request with some addresses
_ALLOWED: Final = "a control message from a peer that is not authenticated"


def decode_unverified(buffer: Bytes, offset: int = 0) -> Frame:
    """Like wire.frame.decode; raises FrameError for all but small control messages and FINISH."""
    frame = decode(buffer, offset)
    if frame.kind not in (FrameKind.CONTROL, FrameKind.FINISH):
        raise FrameError("kind", frame.kind, _ALLOWED)
    if frame.lane != Lane.CONTROL:
        raise FrameError("lane", frame.lane, _ALLOWED)
    if frame.body > UNVERIFIED_BYTES:
        raise FrameError("body", frame.body, f"at most {UNVERIFIED_BYTES} bytes in {_ALLOWED}")
    return frame


def certificate_advice(expected: Expected, ours: Credentials | None) -> str:
    """Return the expected peer, the certificate shown, and the remedy."""
    shown = None if expected.anonymous else ours
    return f"expected {_describe_expected(expected, ours)}, showed {_describe_shown(shown)}; {_remedy(expected)}"


def _describe_expected(expected: Expected, ours: Credentials | None) -> str:
    if expected.node == UNKNOWN_NODE:
        return "the seed with the key in the ticket" if expected.fingerprint else "a seed"
    cluster = "" if ours is None else f" of cluster {ours.cluster!r}"
    return f"node {format_node(expected.node)}{cluster}"


def _describe_shown(shown: Credentials | None) -> str:
    return "no certificate" if shown is None else f"node {format_node(shown.node)} of cluster {shown.cluster!r}"


def _remedy(expected: Expected) -> str:
    if expected.node == UNKNOWN_NODE:
        return "another seed may run at that address: use the ticket, or the token, of the one that runs now"
    return "both must belong to one cluster and be who the membership says: check what runs at that address"


GRACE: Final = 1.0  # seconds for which equal sources cannot displace a connection: several round trips of a slow path
_MIN_SHARE: Final = 2  # sources with at most this many connections count as equal: one TLS dial makes two
_PREFIX: Final = 64  # bits of the network part of an IPv6 address; one party usually owns the whole network
_LARGEST_HEAP: Final = 4  # bound on the deadline heap, as a multiple of the capacity

Choose: TypeAlias = Callable[[Sequence[int]], int]  # picks a connection; random outside tests


class ConnectionSource(NamedTuple):
    """The origin of a connection."""

    network: str  # an IPv4 address or an IPv6 network: what one party usually owns
    address: str


class Placement(NamedTuple):
    """The result of `PendingConnections.enter`."""

    admitted: bool
    displaced: int | None = None  # the connection removed to make room


@dataclass(slots=True)
class _Pending:
    source: ConnectionSource
    since: float
    deadline: float


class PendingConnections:
    """The pending connections of a listener, by number. The owner's thread or lock guards every method."""

    def __init__(self, capacity: int, timeout: float, choose: Choose, *, grace: float = GRACE) -> None:
        self._capacity = capacity
        self._timeout = timeout
        self._choose = choose
        self._grace = grace
        self._pending: dict[int, _Pending] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap; entries that differ from `_pending` are stale

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, connection: int) -> bool:
        return connection in self._pending

    def enter(self, connection: int, source: ConnectionSource, now: float) -> Placement:
        displaced = None
        if len(self._pending) >= self._capacity:
            displaced = self._choose_displaced(source, now)
            if displaced is None:
                return Placement(False)
            self.leave(displaced)
        self._pending[connection] = _Pending(source, now, now)
        self.set_deadline(connection, now + self._timeout)
        return Placement(True, displaced)

    def set_deadline(self, connection: int, deadline: float) -> None:
        """No effect if the connection is not pending."""
        pending = self._pending.get(connection)
        if pending is None:
            return
        pending.deadline = deadline
        heappush(self._deadlines, (deadline, connection))
        if len(self._deadlines) > _LARGEST_HEAP * max(self._capacity, 1):
            self._deadlines = [(each.deadline, number) for number, each in self._pending.items()]
            heapify(self._deadlines)

    def shorten(self, connection: int, deadline: float) -> None:
        """Like `set_deadline`, but never extends the deadline."""
        pending = self._pending.get(connection)
        if pending is not None and deadline < pending.deadline:
            self.set_deadline(connection, deadline)

    def leave(self, connection: int) -> None:
        """No effect if the connection is not pending."""
        self._pending.pop(connection, None)

    def displace_one(self, now: float) -> int | None:
        """Remove and return one connection because a resource is short; None if none is pending."""
        if not self._pending:
            return None
        weights = self._weights(Counter(each.source for each in self._pending.values()))
        heaviest = max(weights.values())
        chosen = self._pick(weights, heaviest, now, spare_fresh=False)
        if chosen is not None:
            self.leave(chosen)
        return chosen

    def expired(self, now: float) -> list[int]:
        """Remove and return the connections past their deadline, earliest first."""
        gone = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            connection = heappop(self._deadlines)[1]
            self.leave(connection)
            gone.append(connection)
        return gone

    @property
    def next_deadline(self) -> float | None:
        heap = self._deadlines
        while heap:
            deadline, connection = heap[0]
            pending = self._pending.get(connection)
            if pending is not None and pending.deadline == deadline:
                return deadline
            heappop(heap)
        return None

    def _choose_displaced(self, newcomer: ConnectionSource, now: float) -> int | None:
        counts = Counter(each.source for each in self._pending.values())
        counts[newcomer] += 1
        weights = self._weights(counts)
        heaviest = max(weights.values())
        return self._pick(weights, heaviest, now, spare_fresh=weights[newcomer] == heaviest)

    def _pick(
        self,
        weights: dict[ConnectionSource, tuple[int, int]],
        heaviest: tuple[int, int],
        now: float,
        *,
        spare_fresh: bool,
    ) -> int | None:
        heaviest_connections = [number for number, each in self._pending.items() if weights[each.source] == heaviest]
        past = [number for number in heaviest_connections if now - self._pending[number].since >= self._grace]
        candidates = past if past or spare_fresh else heaviest_connections
        return self._choose(candidates) if candidates else None

    @staticmethod
    def _weights(counts: Counter[ConnectionSource]) -> dict[ConnectionSource, tuple[int, int]]:
        """Return (connections of the network, of the address) by source; the source with the larger pair loses one
        first.
        """
        networks: Counter[str] = Counter()
        for source, count in counts.items():
            networks[source.network] += count
        return {
            source: (max(networks[source.network], _MIN_SHARE), max(count, _MIN_SHARE))
            for source, count in counts.items()
        }


def source_of(address: str) -> ConnectionSource:
    """Return the source; text that is not host:port is its own source."""
    try:
        host, _ = parse_address(address)
        numeric = ipaddress.ip_address(host)
    except (UsageError, ValueError):
        return ConnectionSource(address, address)
    if isinstance(numeric, ipaddress.IPv4Address):
        return ConnectionSource(host, host)
    mapped = numeric.ipv4_mapped
    if mapped is not None:
        return ConnectionSource(str(mapped), str(mapped))
    network = int(numeric) >> (numeric.max_prefixlen - _PREFIX)
    return ConnectionSource(f"{network:x}", host)
