"""Connections that have not authenticated yet: how many there may be, for how long, and which one gives way. Pure.

Laws:
- At most `capacity` connections are pending, each until its deadline.
- While there is room, everybody gets a place: a host with many ranks needs one for each of them.
- When there is none, the source with the most pending connections gives one up, a random one that is past its grace
  period. A source that holds more than the newcomer's gets no grace. Otherwise the newcomer is refused.

So no source can displace a smaller one: a node with an address of its own keeps its places for as long as its handshake
takes, however many connections others open. Sources that are equal displace each other only after the grace period,
which is long enough for a handshake over a slow path. The choice is random: nobody can arrange to outlast others.

`quic/src/handshakes.rs` states the same rule for QUIC handshakes.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple, TypeAlias

from nexar.errors import UsageError
from nexar.transport.address import parse_address

GRACE: Final = 1.0
"""Seconds that a connection keeps its place among equals: several round trips of a slow path."""
_LEAST_SHARE: Final = 2
"""Sources with no more connections than this count as equal: one dial over TLS is two connections."""
_PREFIX: Final = 64
"""Bits of an IPv6 address that name the network. Whoever has one address of it usually has all of them."""
_LARGEST_HEAP: Final = 4
"""Deadlines kept, as a multiple of the connections that have one."""

Choose: TypeAlias = Callable[[Sequence[int]], int]
"""Picks one of several connections, at random outside of tests."""


class Source(NamedTuple):
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
    source: Source
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

    def enter(self, connection: int, source: Source, now: float) -> Placement:
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

    def _who_gives_way(self, newcomer: Source, now: float) -> int | None:
        counts = Counter(each.source for each in self._pending.values())
        counts[newcomer] += 1
        weights = self._weights(counts)
        heaviest = max(weights.values())
        return self._pick(weights, heaviest, now, spare_fresh=weights[newcomer] == heaviest)

    def _pick(
        self, weights: dict[Source, tuple[int, int]], heaviest: tuple[int, int], now: float, *, spare_fresh: bool
    ) -> int | None:
        crowd = [number for number, each in self._pending.items() if weights[each.source] == heaviest]
        past = [number for number in crowd if now - self._pending[number].since >= self._grace]
        candidates = past if past or spare_fresh else crowd
        return self._choose(candidates) if candidates else None

    @staticmethod
    def _weights(counts: Counter[Source]) -> dict[Source, tuple[int, int]]:
        """Connections of each source's network, then of its address: the larger gives way first."""
        networks: Counter[str] = Counter()
        for source, count in counts.items():
            networks[source.network] += count
        return {
            source: (max(networks[source.network], _LEAST_SHARE), max(count, _LEAST_SHARE))
            for source, count in counts.items()
        }


def source_of(address: str) -> Source:
    """Of the text of a peer's address. What is not host and port is a source by its whole text."""
    try:
        host, _ = parse_address(address)
        numeric = ipaddress.ip_address(host)
    except (UsageError, ValueError):
        return Source(address, address)
    if isinstance(numeric, ipaddress.IPv4Address):
        return Source(host, host)
    mapped = numeric.ipv4_mapped
    if mapped is not None:
        return Source(str(mapped), str(mapped))
    network = int(numeric) >> (numeric.max_prefixlen - _PREFIX)
    return Source(f"{network:x}", host)
