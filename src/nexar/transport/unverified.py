"""What a peer may say that has not proven who it is: control messages, small ones.

The rule is applied to the header, before anything is kept for the body. So a stranger gets as much of our memory as one
small message needs, whatever it claims; and since no other kind of frame passes, it can start nothing.

What to say when a certificate was refused, theirs or ours: a TLS alert alone helps nobody.

Connections that have not authenticated yet: how many there may be, for how long, and which one gives way. Pure.

Laws:
- At most `capacity` connections are pending, each until its deadline.
- While there is room, everybody gets a place: a host with many ranks needs one for each of them.
- When there is none, the source with the most pending connections gives one up, a random one that is past its grace
  period. A source that holds more than the newcomer's gets no grace. Otherwise the newcomer is refused.

So no source can displace a smaller one: a node with an address of its own keeps its places for as long as its handshake
takes, however many connections others open. Sources that are equal displace each other only after the grace period,
which is long enough for a handshake over a slow path. The choice is random: nobody can arrange to outlast others.

`native/src/quic/handshakes.rs` states the same rule for QUIC handshakes.
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

UNVERIFIED_BYTES: Final = 4 << 10
"""The largest body: a hello, a proof, a signing request with some addresses."""
_ALLOWED: Final = "a control message from a peer that has not proven who it is"


def decode_unverified(buffer: Bytes, offset: int = 0) -> Frame:
    """As wire.frame.decode, and FrameError for all that is not a small control message, or the end (FINISH)."""
    frame = decode(buffer, offset)
    if frame.kind not in (FrameKind.CONTROL, FrameKind.FINISH):
        raise FrameError("kind", frame.kind, _ALLOWED)
    if frame.lane != Lane.CONTROL:
        raise FrameError("lane", frame.lane, _ALLOWED)
    if frame.body > UNVERIFIED_BYTES:
        raise FrameError("body", frame.body, f"at most {UNVERIFIED_BYTES} bytes in {_ALLOWED}")
    return frame


def certificate_advice(expected: Expected, ours: Credentials | None) -> str:
    """Whom the dial meant, what it showed, and what to do if the two sides do not believe each other; for brackets."""
    shown = None if expected.anonymous else ours
    return f"expected {_whom(expected, ours)}, showed {_what(shown)}; {_remedy(expected)}"


def _whom(expected: Expected, ours: Credentials | None) -> str:
    if expected.node == UNKNOWN_NODE:
        return "the seed with the key in the ticket" if expected.fingerprint else "a seed"
    cluster = "" if ours is None else f" of cluster {ours.cluster!r}"
    return f"node {format_node(expected.node)}{cluster}"


def _what(shown: Credentials | None) -> str:
    return "no certificate" if shown is None else f"node {format_node(shown.node)} of cluster {shown.cluster!r}"


def _remedy(expected: Expected) -> str:
    if expected.node == UNKNOWN_NODE:
        return "another seed may run at that address: use the ticket, or the token, of the one that runs now"
    return "both must belong to one cluster and be who the membership says: check what runs at that address"


GRACE: Final = 1.0
"""Seconds that a connection keeps its place among equals: several round trips of a slow path."""
_MIN_SHARE: Final = 2
"""Sources with no more connections than this count as equal: one dial over TLS is two connections."""
_PREFIX: Final = 64
"""Bits of an IPv6 address that name the network. Whoever has one address of it usually has all of them."""
_LARGEST_HEAP: Final = 4
"""Deadlines kept, as a multiple of the connections that have one."""

Choose: TypeAlias = Callable[[Sequence[int]], int]
"""Picks one of several connections, at random outside of tests."""


class ConnectionSource(NamedTuple):
    """Where a connection comes from."""

    network: str
    """What one party is usually given: an IPv4 address, or an IPv6 network."""
    address: str


class Placement(NamedTuple):
    """What becomes of a newcomer."""

    admitted: bool
    displaced: int | None = None
    """The connection that gave way to it. It is not pending any more."""


@dataclass(slots=True)
class _Pending:
    source: ConnectionSource
    since: float
    deadline: float


class PendingConnections:
    """A connection is a number that is in use once at a time. Every method belongs to the owner's thread or lock."""

    def __init__(self, capacity: int, timeout: float, choose: Choose, *, grace: float = GRACE) -> None:
        self._capacity = capacity
        self._timeout = timeout
        self._choose = choose
        self._grace = grace
        self._pending: dict[int, _Pending] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap; entries that do not agree with `_pending` are void

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, connection: int) -> bool:
        return connection in self._pending

    def enter(self, connection: int, source: ConnectionSource, now: float) -> Placement:
        """Take a newcomer in, or not."""
        displaced = None
        if len(self._pending) >= self._capacity:
            displaced = self._who_gives_way(source, now)
            if displaced is None:
                return Placement(False)
            self.leave(displaced)
        self._pending[connection] = _Pending(source, now, now)
        self.set_deadline(connection, now + self._timeout)
        return Placement(True, displaced)

    def set_deadline(self, connection: int, deadline: float) -> None:
        """Replace its deadline. Without effect if it is not pending."""
        pending = self._pending.get(connection)
        if pending is None:
            return
        pending.deadline = deadline
        heappush(self._deadlines, (deadline, connection))
        if len(self._deadlines) > _LARGEST_HEAP * max(self._capacity, 1):
            self._deadlines = [(each.deadline, number) for number, each in self._pending.items()]
            heapify(self._deadlines)

    def shorten(self, connection: int, deadline: float) -> None:
        """As `set_deadline`, unless its deadline is earlier."""
        pending = self._pending.get(connection)
        if pending is not None and deadline < pending.deadline:
            self.set_deadline(connection, deadline)

    def leave(self, connection: int) -> None:
        """It has authenticated, or has ended. Without effect if it is not pending."""
        self._pending.pop(connection, None)

    def give_up(self, now: float) -> int | None:
        """Free one place although nobody came: the system is short of something. None if nothing is pending."""
        if not self._pending:
            return None
        weights = self._weights(Counter(each.source for each in self._pending.values()))
        heaviest = max(weights.values())
        chosen = self._pick(weights, heaviest, now, spare_fresh=False)
        if chosen is not None:
            self.leave(chosen)
        return chosen

    def expired(self, now: float) -> list[int]:
        """Those whose deadline has passed, the earliest first. They are not pending any more."""
        gone = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            connection = heappop(self._deadlines)[1]
            self.leave(connection)
            gone.append(connection)
        return gone

    @property
    def next_deadline(self) -> float | None:
        """The earliest; None if nothing is pending."""
        heap = self._deadlines
        while heap:
            deadline, connection = heap[0]
            pending = self._pending.get(connection)
            if pending is not None and pending.deadline == deadline:
                return deadline
            heappop(heap)
        return None

    def _who_gives_way(self, newcomer: ConnectionSource, now: float) -> int | None:
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
        crowd = [number for number, each in self._pending.items() if weights[each.source] == heaviest]
        past = [number for number in crowd if now - self._pending[number].since >= self._grace]
        candidates = past if past or spare_fresh else crowd
        return self._choose(candidates) if candidates else None

    @staticmethod
    def _weights(counts: Counter[ConnectionSource]) -> dict[ConnectionSource, tuple[int, int]]:
        """Connections of each source's network, then of its address: the larger gives way first."""
        networks: Counter[str] = Counter()
        for source, count in counts.items():
            networks[source.network] += count
        return {
            source: (max(networks[source.network], _MIN_SHARE), max(count, _MIN_SHARE))
            for source, count in counts.items()
        }


def source_of(address: str) -> ConnectionSource:
    """Of the text of a peer's address. What is not host and port is a source by its whole text."""
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
