"""Whether a candidate can work with those that joined before it: its clock, its settings, its transports. Pure.

All candidates that were let in have the same settings, and every two of them have a transport in common. So a
candidate is compared with one of them for the settings, and with one of each set of transports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from nexar.cluster.decisions.refusals import Refusal
from nexar.cluster.membership import Member
from nexar.config import settings
from nexar.types import NodeId, Rank, describe_peer, format_seconds
from nexar.wire.joining import Apply

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
            f"it says {_moment(theirs)}, the seed's says {_moment(ours)}, {format_seconds(limit)} are allowed",
            "set both clocks, by NTP",
        )


class Compatibility:
    """What the candidates that were let in have brought along."""

    def __init__(self, clocks: ClockLimits | None = None) -> None:
        self._clocks = clocks or ClockLimits()
        self._names: dict[NodeId, str] = {}  # how they are named in messages; the first is compared with
        self._settings: dict[NodeId, Mapping[str, str]] = {}  # of those that told any
        self._offers: dict[frozenset[str], dict[NodeId, None]] = {}

    def check(self, member: Member, asked: Apply, clock: float, address: str) -> None:
        """Incompatible if this candidate cannot work with the others. `clock`: the seed's."""
        who = name_of(asked.rank, member.node, address)
        self._clocks.check(who, asked.clock, clock)
        self._check_settings(who, asked.settings)
        self._check_transports(who, offered(member))

    def add(self, member: Member, asked: Apply, address: str) -> None:
        """This candidate was let in."""
        node = member.node
        self._names[node] = name_of(asked.rank, node, address)
        if asked.settings:
            self._settings[node] = asked.settings
        if offered(member):
            self._offers.setdefault(offered(member), {})[node] = None

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
                    f"{self._names[first]} offers {_listed(other)}, {who} offers {_listed(schemes)}",
                    "they have no transport in common; set NEXAR_TRANSPORTS",
                )


def offered(member: Member) -> frozenset[str]:
    """The transports over which others can dial this member."""
    return frozenset(scheme for scheme, addresses in member.addresses.items() if addresses)


def name_of(rank: Rank | None, node: NodeId, address: str) -> str:
    """How a candidate is named in messages: by its rank where it has claimed one."""
    return f"rank {rank}" if rank is not None else describe_peer(None, node, address)


def _listed(schemes: Iterable[str]) -> str:
    return ", ".join(sorted(schemes))


def _moment(clock: float) -> str:
    try:
        return datetime.fromtimestamp(clock, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{clock:.0f} s after 1970"
