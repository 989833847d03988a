"""Which nodes may have a link with this node, and which of two concurrent dials becomes the link. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, TypeVar

from nexar.cluster.membership import Change, Member, Membership
from nexar.types import NodeId, Rank
from nexar.wire.control import Introduce, Introduced

NO_RANK: Final[Rank] = -1  # rank of a node that holds none yet
_MAX_FORMER: Final = 4096


@dataclass(frozen=True, slots=True)
class FormerPeer:
    """A former member, and why it is refused."""

    epoch: int  # of the first membership without it
    reason: str


@dataclass(frozen=True, slots=True)
class PeerDirectory:
    """Members and joiners that may have a link with this node. Immutable.

    Invariant: two nodes at the same epoch must agree on their ranks, or one of them lies. At different epochs nothing
    is compared: the generation fences every frame.
    """

    me: NodeId
    membership: Membership
    joiners: Mapping[NodeId, Member] = field(default_factory=lambda: MappingProxyType({}))
    former: Mapping[NodeId, FormerPeer] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def rank(self) -> Rank:
        rank = self.membership.rank_of(self.me)
        return NO_RANK if rank is None else rank

    def find(self, node: NodeId) -> Member | None:
        rank = self.membership.rank_of(node)
        return self.joiners.get(node) if rank is None else self.membership.members[rank]

    def rank_of(self, node: NodeId) -> Rank:
        rank = self.membership.rank_of(node)
        return NO_RANK if rank is None else rank

    def is_on_same_host(self, node: NodeId) -> bool:
        mine, other = self.find(self.me), self.find(node)
        return mine is not None and other is not None and mine.host == other.host

    def introduction(self) -> Introduce:
        return Introduce(rank=self.rank, epoch=self.membership.epoch)

    def why_not_accepted(self, node: NodeId, claim: Introduce | Introduced) -> str | None:
        rank, epoch = self.rank_of(node), self.membership.epoch
        if self.find(node) is None:
            return f"it has no place in the membership of epoch {epoch}"
        if claim.epoch != epoch or claim.rank == rank:
            return None
        return f"it claims rank {claim.rank} at epoch {claim.epoch}, the membership gives it rank {rank}"

    # -- changes -----------------------------------------------------------------------------------------

    def moved_to(self, membership: Membership, change: Change | None = None) -> PeerDirectory:
        """`change` gives the reasons of departures."""
        joiners = {node: joiner for node, joiner in self.joiners.items() if membership.rank_of(node) is None}
        former = {**self.former}
        if change is not None:
            former |= {departure.node: FormerPeer(change.epoch, departure.cause) for departure in change.left}
        while len(former) > _MAX_FORMER:
            del former[next(iter(former))]
        return replace(self, membership=membership, joiners=MappingProxyType(joiners), former=MappingProxyType(former))

    def with_joiners(self, joiners: Iterable[Member]) -> PeerDirectory:
        found = {joiner.node: joiner for joiner in joiners if self.membership.rank_of(joiner.node) is None}
        return replace(self, joiners=MappingProxyType(found))


Dialer = TypeVar("Dialer")
_PEER_HAS_DEAD_CONNECTION: Final = "it keeps a connection that this side has lost"


class LinkTurn(Enum):
    """What a thread that wants the link does."""

    OPEN = "open"  # use it
    WAIT = "wait"  # a dial is running
    DIAL = "dial"  # and call `dialed` when it ends


class DialDecision(Enum):
    """Answer to a dial of the peer."""

    WELCOME = "welcome"
    HOLD = "hold"  # no answer yet
    SUPERSEDED = "superseded"  # our own dial won


class DialReply(NamedTuple, Generic[Dialer]):
    """Answer for one dial."""

    dialer: Dialer
    outcome: DialDecision


class Pairing(Generic[Dialer]):
    """The one connection between this node and a peer. `Dialer` identifies a connection of the peer.

    Invariant: of two concurrent dials, the one of the lower node stays.
    - A node that has an open connection, or welcomed the peer's dial, does not dial.
    - The lower node holds an introduction while its own dial runs. If that opens, the peer's dial is superseded,
      otherwise welcomed.
    - The higher node welcomes at once, even while it dials.
    - A node with an open connection answers "superseded": the dialer has welcomed our dial and will soon learn so.
    """

    # Neither side makes a link of two connections, and both make it of the same one. If a connection breaks before it
    # is the link, the next request starts again. Connections are not ordered: an abandoned dial may arrive after its
    # successor. So all dials of a peer are welcome until it continues on one; it continues on one only.

    def __init__(self, *, lower: bool) -> None:
        self._lower = lower
        self.open = False  # for good: later failures are the link's concern
        self.cause: str | None = None  # why our last dial failed
        self.failures = 0  # failed dials of ours
        self._dialing = False
        self._welcomed: list[Dialer] = []  # few: the acceptor keeps few connections per peer
        self._held: list[Dialer] = []

    @property
    def pending(self) -> bool:
        return not self.open and (self._dialing or bool(self._welcomed))

    @property
    def waiting(self) -> list[Dialer]:
        """Dials that may become the link or need an answer."""
        return [*self._welcomed, *self._held]

    def want(self) -> LinkTurn:
        if self.open:
            return LinkTurn.OPEN
        if self.pending:
            return LinkTurn.WAIT
        self._dialing = True
        return LinkTurn.DIAL

    def dialed(self, *, opened: bool, cause: str | None = None) -> list[DialReply[Dialer]]:
        """Returns answers to held dials. Neither `opened` nor `cause`: the peer's own dial won."""
        self._dialing = False
        self.open = self.open or opened
        if cause is None and not self.open and not self._welcomed:
            cause = _PEER_HAS_DEAD_CONNECTION  # or the next dial would get the same answer, endlessly
        if cause is not None:
            self.failures += 1
            self.cause = cause
        held, self._held = self._held, []
        return [DialReply(dialer, self._decide(dialer)) for dialer in held]

    def introduced(self, dialer: Dialer) -> DialDecision:
        if self._dialing and self._lower and not self.open:
            self._held.append(dialer)
            return DialDecision.HOLD
        return self._decide(dialer)

    def welcomes(self, dialer: Dialer) -> bool:
        return dialer in self._welcomed and not self.open

    def confirmed(self, dialer: Dialer) -> None:
        self.ended(dialer)
        self.open = True

    def ended(self, dialer: Dialer) -> None:
        for dials in (self._welcomed, self._held):
            if dialer in dials:
                dials.remove(dialer)

    def _decide(self, dialer: Dialer) -> DialDecision:
        if self.open:
            return DialDecision.SUPERSEDED
        self._welcomed.append(dialer)
        return DialDecision.WELCOME
