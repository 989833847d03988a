"""One connection at the seed's door, as admission knows it.

Whether a candidate can work with those that joined before it: its clock, its settings, its transports. Pure.

All candidates that were let in have the same settings, and every two of them have a transport in common. So a
candidate is compared with one of them for the settings, and with one of each set of transports.

What the seed was told about its door. Pure.

From a stranger to somebody who has proven that it knows the secret. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias

from nexar.cluster.addresses import add_seen_address, check_advertised
from nexar.cluster.decisions.admission_events import BoardRequested, JoinRequested, RanksRequested
from nexar.cluster.decisions.refusals import Refusal
from nexar.cluster.membership import Member
from nexar.config import settings
from nexar.errors import InternalError, UsageError
from nexar.security.invitation import FINGERPRINT_BYTES
from nexar.transport.unverified import Choose
from nexar.types import UNKNOWN_NODE, NodeId, Rank, describe_peer, format_seconds
from nexar.wire.hello import Hello
from nexar.wire.join import JoinRequest


@dataclass(slots=True)
class JoinConnectionState:
    """From its knock to its end. Admission alone writes to it."""

    connection: int
    address: str
    hello: Hello | None = None
    fingerprint: bytes = b""
    """Of its key; empty until it has proven that it knows the secret."""
    watches: bool = False
    """It has proven that too, and wants no more than to see the board: it needs no key."""

    @property
    def node(self) -> NodeId | None:
        """Who it says it is; None before its hello."""
        return self.hello.node if self.hello else None


_VARIABLES: Final = {setting.name: setting.variable for setting in settings()}


class Incompatible(Refusal):
    """Two candidates, or a candidate and the seed, cannot be in one cluster. The text names both and the reason."""


@dataclass(frozen=True, slots=True)
class ClockLimits:
    """By how many seconds a candidate's clock may differ from the seed's: what the validity of certificates allows."""

    behind: float = 600.0
    """Certificates are valid from so long before they were issued."""
    ahead: float = 600.0

    def check(self, who: str, theirs: float, ours: float) -> None:
        """Incompatible if the clocks differ by more than is allowed. `theirs` is 0 where it was not told."""
        ahead = theirs - ours
        if not theirs or -self.behind <= ahead <= self.ahead:
            return
        side, limit = ("ahead of", self.ahead) if ahead > 0 else ("behind", self.behind)
        raise Incompatible(
            f"the clock of {who} is {format_seconds(round(abs(ahead)))} {side} the seed's",
            f"it says {_clock_text(theirs)}, the seed's says {_clock_text(ours)}, {format_seconds(limit)} are allowed",
            "set both clocks, by NTP",
        )


class Compatibility:
    """What the candidates that were let in have brought along."""

    def __init__(self, clocks: ClockLimits | None = None) -> None:
        self._clocks = clocks or ClockLimits()
        self._names: dict[NodeId, str] = {}  # how they are named in messages; the first is compared with
        self._settings: dict[NodeId, Mapping[str, str]] = {}  # of those that told any
        self._offers: dict[frozenset[str], dict[NodeId, None]] = {}

    def check(self, member: Member, asked: JoinRequest, clock: float, address: str) -> None:
        """Incompatible if this candidate cannot work with the others. `clock`: the seed's."""
        who = candidate_name(asked.rank, member.node, address)
        self._clocks.check(who, asked.clock, clock)
        self._check_settings(who, asked.settings)
        self._check_transports(who, offered_schemes(member))

    def add(self, member: Member, asked: JoinRequest, address: str) -> None:
        """This candidate was let in."""
        node = member.node
        self._names[node] = candidate_name(asked.rank, node, address)
        if asked.settings:
            self._settings[node] = asked.settings
        if offered_schemes(member):
            self._offers.setdefault(offered_schemes(member), {})[node] = None

    def remove(self, node: NodeId) -> None:
        """This candidate is gone. Idempotent."""
        self._names.pop(node, None)
        self._settings.pop(node, None)
        for schemes in [schemes for schemes, nodes in self._offers.items() if node in nodes]:
            del self._offers[schemes][node]
            if not self._offers[schemes]:
                del self._offers[schemes]

    def _check_settings(self, who: str, told: Mapping[str, str]) -> None:
        node = next(iter(self._settings), None)
        known = {} if node is None else self._settings[node]
        differing = [name for name in told if name in known and told[name] != known[name]]
        if node is not None and differing:
            other = self._names[node]
            pairs = [
                f"{_VARIABLES.get(name, name)} is {told[name]} on {who} and {known[name]} on {other}"
                for name in differing
            ]
            raise Incompatible(*pairs, "set the same value on every rank")

    def _check_transports(self, who: str, schemes: frozenset[str]) -> None:
        for other, nodes in self._offers.items():
            if schemes and not schemes & other:
                first = next(iter(nodes))
                raise Incompatible(
                    f"{self._names[first]} offers {_scheme_list(other)}, {who} offers {_scheme_list(schemes)}",
                    "they have no transport in common; set NEXAR_TRANSPORTS",
                )


def offered_schemes(member: Member) -> frozenset[str]:
    """The transports over which others can dial this member."""
    return frozenset(scheme for scheme, addresses in member.addresses.items() if addresses)


def candidate_name(rank: Rank | None, node: NodeId, address: str) -> str:
    """How a candidate is named in messages: by its rank where it has claimed one."""
    return f"rank {rank}" if rank is not None else describe_peer(None, node, address)


def _scheme_list(schemes: Iterable[str]) -> str:
    return ", ".join(sorted(schemes))


def _clock_text(clock: float) -> str:
    try:
        return datetime.fromtimestamp(clock, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{clock:.0f} s after 1970"


_PROOF_SHARE: Final = 3


def _first(connections: Sequence[int]) -> int:
    return connections[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Who may come in, besides those who form the cluster, and how many may wait at the door."""

    max_pending: int = 256
    auth_timeout: float = 10.0
    choose: Choose = _first
    """Picks the pending connection that gives way. A seed's choice is random: nobody can arrange to outlast others."""
    elastic: bool = False
    """Others may come in after it has formed."""
    most: int = 0
    """Members and those who wait to be: not more; 0: any number."""
    clocks: ClockLimits = field(default_factory=ClockLimits)
    """By how much a candidate's clock may differ from the seed's."""

    own_delay: Callable[[], float] = lambda: 0.0
    """Seconds by which the seed runs late now: see `decisions.own_delay`."""

    @property
    def proof_timeout(self) -> float:
        """Seconds from a hello to its proof: one round trip and a computation, so less than for all of it."""
        return self.auth_timeout / _PROOF_SHARE


WRONG_SECRET: Final = "the ticket or token does not open this cluster"
MAX_OBSERVERS: Final = 64
"""At once: each costs the seed a line."""

JoinRole: TypeAlias = Literal["candidate", "launcher", "onlooker"]


class Observers:
    """Those that look at the board."""

    def __init__(self) -> None:
        self._connections: set[int] = set()

    def enter(self, joiner: JoinConnectionState) -> None:
        """One more. Refusal if there are enough."""
        if len(self._connections) >= MAX_OBSERVERS:
            raise Refusal(f"{MAX_OBSERVERS} others watch already; try again when one of them has ended")
        self._connections.add(joiner.connection)

    def leave(self, joiner: JoinConnectionState) -> None:
        """Its connection has ended. Of anybody else it is no news."""
        self._connections.discard(joiner.connection)


def check_hello(joiner: JoinConnectionState, hello: Hello) -> None:
    """It says hello. Refusal for who has done so, is nobody, or can never come in."""
    if joiner.hello is not None:
        raise Refusal("it said hello twice")
    if hello.role not in ("candidate", "launcher", "onlooker"):
        raise Refusal(f"a {hello.role} cannot join; a candidate or a launcher can")
    if hello.node == UNKNOWN_NODE:
        raise Refusal("its hello names no node")
    joiner.hello = hello


def requested_member(joiner: JoinConnectionState, hello: Hello, asked: JoinRequest) -> Member:
    """The place that a candidate asks for. Refusal if it told an address that nobody can dial."""
    try:
        check_advertised(asked.addresses)
    except UsageError as error:
        raise Refusal(f"nobody can dial it (check its NEXAR_ADVERTISE): {error}") from None
    addresses = add_seen_address(asked.addresses, joiner.address)
    return Member(hello.node, asked.host, joiner.fingerprint, addresses, hello.capabilities, asked.launcher)


def authenticate(
    joiner: JoinConnectionState, role: JoinRole, event: JoinRequested | RanksRequested | BoardRequested
) -> Hello:
    """Its hello, now that it is no stranger any more. Refusal if this is not an honest `role`."""
    if joiner.hello is None:
        raise Refusal("it asked to be let in before it said hello")
    if joiner.fingerprint or joiner.watches:
        raise Refusal("it asked to be let in twice")
    if joiner.hello.role != role:
        raise Refusal(f"its hello says {joiner.hello.role}, and it asked for what is for another role: {role}")
    if not event.proof_ok:
        raise Refusal(WRONG_SECRET)
    if isinstance(event, BoardRequested):
        joiner.watches = True
        return joiner.hello
    if len(event.fingerprint) != FINGERPRINT_BYTES:
        raise InternalError(f"an application with a fingerprint of {len(event.fingerprint)} bytes was let through")
    joiner.fingerprint = event.fingerprint
    return joiner.hello
