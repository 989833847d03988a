"""Checks of a join request. Pure.

All admitted candidates have equal settings and every two share a transport, so a candidate is compared with few.
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
    """One connection at the seed. Written by admission."""

    connection: int
    address: str
    hello: Hello | None = None
    fingerprint: bytes = b""  # of its key; empty until it has proven the secret
    watches: bool = False  # it has proven the secret as an observer, which needs no key

    @property
    def node(self) -> NodeId | None:
        return self.hello.node if self.hello else None


_VARIABLES: Final = {setting.name: setting.variable for setting in settings()}


class Incompatible(Refusal):
    """A candidate cannot be in this cluster."""

    code = "incompatible"


@dataclass(frozen=True, slots=True)
class ClockLimits:
    """Allowed clock differences in seconds, from the validity of certificates."""

    behind: float = 600.0  # certificates are valid from this long before they are issued
    ahead: float = 600.0

    def check(self, who: str, theirs: float, ours: float) -> None:
        """Raises Incompatible. `theirs` is 0 if unknown."""
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
    """Settings and transports of the admitted candidates."""

    def __init__(self, clocks: ClockLimits | None = None) -> None:
        self._clocks = clocks or ClockLimits()
        self._names: dict[NodeId, str] = {}  # names for messages
        self._settings: dict[NodeId, Mapping[str, str]] = {}  # candidates that sent settings; the first is compared
        self._offers: dict[frozenset[str], dict[NodeId, None]] = {}

    def check(self, member: Member, asked: JoinRequest, clock: float, address: str) -> None:
        """Raises Incompatible. `clock`: the seed's."""
        who = candidate_name(asked.rank, member.node, address)
        self._clocks.check(who, asked.clock, clock)
        self._check_settings(who, asked.settings)
        self._check_transports(who, offered_schemes(member))

    def add(self, member: Member, asked: JoinRequest, address: str) -> None:
        node = member.node
        self._names[node] = candidate_name(asked.rank, node, address)
        if asked.settings:
            self._settings[node] = asked.settings
        if offered_schemes(member):
            self._offers.setdefault(offered_schemes(member), {})[node] = None

    def remove(self, node: NodeId) -> None:
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
    """Transports over which others can dial this member."""
    return frozenset(scheme for scheme, addresses in member.addresses.items() if addresses)


def candidate_name(rank: Rank | None, node: NodeId, address: str) -> str:
    """For messages."""
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
    """Limits on pending connections, joiners and clocks."""

    max_pending: int = 256
    auth_timeout: float = 10.0
    # Picks the pending connection to drop. The seed picks at random, so that nobody can arrange to outlast others.
    choose: Choose = _first
    elastic: bool = False  # joiners are allowed after the cluster has formed
    most: int = 0  # members and waiting joiners together; 0: no limit
    clocks: ClockLimits = field(default_factory=ClockLimits)

    own_delay: Callable[[], float] = lambda: 0.0  # seconds by which the seed runs late now (`OwnDelay`)

    @property
    def proof_timeout(self) -> float:
        return self.auth_timeout / _PROOF_SHARE


WRONG_SECRET: Final = "the ticket or token does not match this cluster"
MAX_OBSERVERS: Final = 64  # at once: each costs the seed a connection

JoinRole: TypeAlias = Literal["candidate", "launcher", "onlooker"]


class Observers:
    """Connected observers."""

    def __init__(self) -> None:
        self._connections: set[int] = set()

    def enter(self, joiner: JoinConnectionState) -> None:
        """Raises Refusal above MAX_OBSERVERS."""
        if len(self._connections) >= MAX_OBSERVERS:
            raise Refusal(
                f"{MAX_OBSERVERS} observers are connected already; try again when one of them has left", code="full"
            )
        self._connections.add(joiner.connection)

    def leave(self, joiner: JoinConnectionState) -> None:
        self._connections.discard(joiner.connection)


def check_hello(joiner: JoinConnectionState, hello: Hello) -> None:
    """Records it. Raises Refusal for a second one, an unknown role or no node id."""
    if joiner.hello is not None:
        raise Refusal("it sent its hello twice")
    if hello.role not in ("candidate", "launcher", "onlooker"):
        raise Refusal(f"a {hello.role} cannot join; a candidate or a launcher can")
    if hello.node == UNKNOWN_NODE:
        raise Refusal("its hello names no node")
    joiner.hello = hello


def requested_member(joiner: JoinConnectionState, hello: Hello, asked: JoinRequest) -> Member:
    """Raises Refusal for an advertised address that nobody can dial."""
    try:
        check_advertised(asked.addresses)
    except UsageError as error:
        raise Refusal(f"nobody can dial it (check its NEXAR_ADVERTISE): {error}") from None
    addresses = add_seen_address(asked.addresses, joiner.address)
    return Member(hello.node, asked.host, joiner.fingerprint, addresses, hello.capabilities, asked.launcher)


def authenticate(
    joiner: JoinConnectionState, role: JoinRole, event: JoinRequested | RanksRequested | BoardRequested
) -> Hello:
    """Record that the connection has proven `role`. Raises Refusal."""
    if joiner.hello is None:
        raise Refusal("it asked to join before it sent its hello")
    if joiner.fingerprint or joiner.watches:
        raise Refusal("it asked to join twice")
    if joiner.hello.role != role:
        raise Refusal(f"its hello says {joiner.hello.role}, but its request is for the role {role}")
    if not event.proof_ok:
        raise Refusal(WRONG_SECRET, code="wrong_secret")
    if isinstance(event, BoardRequested):
        joiner.watches = True
        return joiner.hello
    if len(event.fingerprint) != FINGERPRINT_BYTES:
        raise InternalError(f"a join request with a fingerprint of {len(event.fingerprint)} bytes passed the checks")
    joiner.fingerprint = event.fingerprint
    return joiner.hello
