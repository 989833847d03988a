"""Whom a node may have a link with: the members of its membership, and guests who are about to become members. Pure.

A member that waits to be let in knows the members, and is none itself: it holds no rank yet. Who was a member once and
is none any more is remembered, so that it can be told why nobody speaks to it.

Law: two nodes at the same epoch must agree on their ranks, or one of them is not who it says. At different epochs there
is nothing to compare: one of them has not heard yet, and every frame is fenced by its generation anyway.

Two members and the one connection between them, as one of the two sees it. Pure: events in, what to do out.

Both may dial at any moment, also at the same one, and answers take their time. Law: of two dials that of the lower node
stays.

- Who has opened the connection, or has welcomed the peer's dial and waits for its next word, does not dial.
- The lower node lets an introduction wait while its own dial is under way. If that one opens, the peer is told that
  its dial is superseded; if it fails, the peer's is welcomed.
- The higher node welcomes at once, also while it dials: its own introduction waits at the other side.
- Who has it open already tells the dialer that it is superseded: the dialer has welcomed us, and is about to hear so.

So no side ever makes a link of two connections, and both make a link of the same one. If a connection breaks before it
was a link, whoever wants one begins anew. Connections are not ordered among one another: a dial that was given up may
be heard of after the one that followed it. So all of a peer's dials are welcome until it goes on with one of them; it
goes on with one only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, TypeVar

from nexar.cluster.membership import Change, Member, Membership
from nexar.types import NodeId, Rank
from nexar.wire.control import Introduce, Introduced

NO_RANK: Final[Rank] = -1
"""The rank of who holds none yet."""
_MAX_FORMER: Final = 4096


@dataclass(frozen=True, slots=True)
class FormerPeer:
    """Somebody who was a member."""

    epoch: int
    """Of the first membership without it."""
    reason: str


@dataclass(frozen=True, slots=True)
class PeerDirectory:
    """Immutable: a change makes another."""

    me: NodeId
    membership: Membership
    joiners: Mapping[NodeId, Member] = field(default_factory=lambda: MappingProxyType({}))
    former: Mapping[NodeId, FormerPeer] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def rank(self) -> Rank:
        """Mine; GUEST if I hold none."""
        rank = self.membership.rank_of(self.me)
        return NO_RANK if rank is None else rank

    def find(self, node: NodeId) -> Member | None:
        """A member or a guest."""
        rank = self.membership.rank_of(node)
        return self.joiners.get(node) if rank is None else self.membership.members[rank]

    def rank_of(self, node: NodeId) -> Rank:
        """GUEST for who holds none."""
        rank = self.membership.rank_of(node)
        return NO_RANK if rank is None else rank

    def is_on_same_host(self, node: NodeId) -> bool:
        """Whether this node runs on our host."""
        mine, other = self.find(self.me), self.find(node)
        return mine is not None and other is not None and mine.host == other.host

    def introduction(self) -> Introduce:
        """Of me, to anybody."""
        return Introduce(rank=self.rank, epoch=self.membership.epoch)

    def why_not_accepted(self, node: NodeId, claim: Introduce | Introduced) -> str | None:
        """What is wrong with what this node says of itself; None: nothing."""
        rank, epoch = self.rank_of(node), self.membership.epoch
        if self.find(node) is None:
            return f"it has no place in the membership of epoch {epoch}"
        if claim.epoch != epoch or claim.rank == rank:
            return None
        return f"it claims rank {claim.rank} at epoch {claim.epoch}, the membership gives it rank {rank}"

    # -- changes -----------------------------------------------------------------------------------------

    def moved_to(self, membership: Membership, change: Change | None = None) -> PeerDirectory:
        """The next membership; who is in it is no guest any more. `change`: says why those who left are gone."""
        joiners = {node: joiner for node, joiner in self.joiners.items() if membership.rank_of(node) is None}
        former = {**self.former}
        if change is not None:
            former |= {departure.node: FormerPeer(change.epoch, departure.cause) for departure in change.left}
        while len(former) > _MAX_FORMER:
            del former[next(iter(former))]
        return replace(self, membership=membership, joiners=MappingProxyType(joiners), former=MappingProxyType(former))

    def with_guests(self, joiners: Iterable[Member]) -> PeerDirectory:
        """These, and no others, wait to be let in."""
        found = {joiner.node: joiner for joiner in joiners if self.membership.rank_of(joiner.node) is None}
        return replace(self, joiners=MappingProxyType(found))


Dialer = TypeVar("Dialer")
_GONE: Final = "it holds on to a connection that is lost on this side"


class LinkTurn(Enum):
    """What somebody does who wants the link."""

    OPEN = "open"  # use it
    WAIT = "wait"  # something is under way
    DIAL = "dial"  # and say `dialed` when it is over


class DialDecision(Enum):
    """What becomes of a dial of the peer."""

    WELCOME = "welcome"
    HOLD = "hold"  # no answer yet
    SUPERSEDED = "superseded"  # our own has won


class DialReply(NamedTuple, Generic[Dialer]):
    """Who is to be told, and what."""

    dialer: Dialer
    outcome: DialDecision


class Pairing(Generic[Dialer]):
    """One peer. `Dialer` stands for a connection on which the peer has introduced itself."""

    def __init__(self, *, lower: bool) -> None:
        """`lower`: this node has the lower id of the two."""
        self._lower = lower
        self.open = False
        """For good: what becomes of a link later is the link's business."""
        self.cause: str | None = None
        """Why our last dial failed."""
        self.failures = 0
        """How many did."""
        self._dialing = False
        self._welcomed: list[Dialer] = []  # few: who keeps connections keeps few of each peer
        self._held: list[Dialer] = []

    @property
    def pending(self) -> bool:
        """Whether something is under way that may open it."""
        return not self.open and (self._dialing or bool(self._welcomed))

    @property
    def waiting(self) -> list[Dialer]:
        """The peer's dials that may still become the link, or are still to be answered."""
        return [*self._welcomed, *self._held]

    def want(self) -> LinkTurn:
        """Somebody wants the link."""
        if self.open:
            return LinkTurn.OPEN
        if self.pending:
            return LinkTurn.WAIT
        self._dialing = True
        return LinkTurn.DIAL

    def dialed(self, *, opened: bool, cause: str | None = None) -> list[DialReply[Dialer]]:
        """Our dial is over. `cause`: it failed; neither opened nor failed: the peer says that its own has won.

        The answers are for dials of the peer that waited for this.
        """
        self._dialing = False
        self.open = self.open or opened
        if cause is None and not self.open and not self._welcomed:
            cause = _GONE  # or the next dial would be told the same, and so on
        if cause is not None:
            self.failures += 1
            self.cause = cause
        held, self._held = self._held, []
        return [DialReply(dialer, self._judge(dialer)) for dialer in held]

    def introduced(self, dialer: Dialer) -> DialDecision:
        """The peer has dialed us."""
        if self._dialing and self._lower and not self.open:
            self._held.append(dialer)
            return DialDecision.HOLD
        return self._judge(dialer)

    def welcomes(self, dialer: Dialer) -> bool:
        """Whether this connection is the link as soon as the peer says another word."""
        return dialer in self._welcomed and not self.open

    def confirmed(self, dialer: Dialer) -> None:
        """The peer went on, on a connection that is welcome: it is the link."""
        self.ended(dialer)
        self.open = True

    def ended(self, dialer: Dialer) -> None:
        """A connection of the peer came to nothing."""
        for dials in (self._welcomed, self._held):
            if dialer in dials:
                dials.remove(dialer)

    def _judge(self, dialer: Dialer) -> DialDecision:
        if self.open:
            return DialDecision.SUPERSEDED
        self._welcomed.append(dialer)
        return DialDecision.WELCOME
