"""What one node wants to be different in the next membership, and the change that says so. Pure.

A draft takes in all that is known when it is made: one change instead of several.
"""

from __future__ import annotations

from typing import Final

from nexar.cluster.change import Change, Departure
from nexar.cluster.decisions.succession_events import Wanted
from nexar.cluster.decisions.suspicions import Suspicions
from nexar.cluster.membership import Member, Membership
from nexar.types import NodeId
from nexar.wire.messages import MAX_CAUSE_CHARACTERS

_CAUSES_CHARACTERS: Final = 100_000
"""All causes of a change together, about: a message has its limit."""
_SHORTEST_CAUSE: Final = 80


class Wishes:
    """Of one node, in one epoch."""

    def __init__(self, me: NodeId, membership: Membership) -> None:
        """None so far."""
        self._me = me
        self._membership = membership
        self._joined: dict[NodeId, Member] = {}
        self._left: dict[NodeId, Departure] = {}
        self._renewed: set[int] = set()
        self.severed: set[tuple[NodeId, NodeId]] = set()
        self.wanted_since: float | None = None
        """When the members agreed on something."""
        self.severed_since: float | None = None
        self.resigned: str | None = None
        """Why this node wants to be removed."""
        self.resigned_over: NodeId | None = None
        """Whom it cannot reach, if that is why."""

    def want(self, wanted: Wanted, now: float) -> None:
        """The members have agreed on this. What is so already is not wanted."""
        membership = self._membership
        self._joined |= {each.node: each for each in wanted.joined if membership.pin(each.node) is None}
        self._left |= {each.node: each for each in wanted.left if membership.rank_of(each.node) is not None}
        self._renewed.update(wanted.renewed)
        if self.wanted_since is None and (self._joined or self._left or self._renewed):
            self.wanted_since = now

    def sever(self, node: NodeId, now: float) -> None:
        """The connection to this node broke, and there is another one."""
        self.severed.add((min(self._me, node), max(self._me, node)))
        if self.severed_since is None:
            self.severed_since = now

    def resign(self, cause: str, over: NodeId | None = None) -> None:
        """This node wants to be removed."""
        self.resigned, self.resigned_over = cause, over

    def stay(self) -> None:
        """It does not any more."""
        self.resigned = self.resigned_over = None

    def carried(self, change: Change, membership: Membership, now: float) -> Wishes:
        """What is left of them after a change to this membership.

        What was agreed on the world's communicator is over with that: where the change leaves it alone, its members go
        on waiting for what they agreed on. A connection that broke stays so if the change did not say it: communicators
        that the change left alone may wait for what was lost on it. Who wants a renewal has to look whether it still
        needs it.
        """
        kept = Wishes(self._me, membership)
        if not change.ends_world:
            kept.want(Wanted(joined=tuple(self._joined.values()), left=tuple(self._left.values())), now)
        for pair in self.severed.difference(change.severed):
            if all(membership.rank_of(node) is not None for node in pair):
                kept.severed.add(pair)
                kept.severed_since = now
        if self.resigned is not None and self.resigned_over is None:
            kept.resign(self.resigned)
        return kept

    def expects(self, member: Member) -> bool:
        """Whether it was agreed that this one may join."""
        return self._joined.get(member.node) == member

    def releases(self, node: NodeId) -> bool:
        """Whether it was agreed that this one may leave."""
        return node in self._left

    def draft(self, suspicions: Suspicions, *, acting: bool = True) -> Change | None:
        """The change to propose; None: nothing is to change, or nobody would be left. `acting`: who is lost is a reason
        for it; else that only goes along with what was agreed on.

        Who resigns proposes only that: about the rest the others think differently.
        """
        if self.resigned is not None:
            mine = Departure(self._me, self.resigned[-MAX_CAUSE_CHARACTERS:], willing=True)
            return self._checked((mine,), (), (), ())
        lost = acting or self.wanted_since is not None
        left = self._departures(suspicions, lost=lost)
        gone = {departure.node for departure in left}
        severed = tuple(sorted(pair for pair in self.severed if lost and gone.isdisjoint(pair)))
        return self._checked(left, tuple(self._joined.values()), severed, tuple(sorted(self._renewed)))

    def _departures(self, suspicions: Suspicions, *, lost: bool) -> tuple[Departure, ...]:
        nodes = suspicions.removable(lost=lost)
        limit = min(MAX_CAUSE_CHARACTERS, max(_SHORTEST_CAUSE, _CAUSES_CHARACTERS // max(1, len(nodes))))
        gone = (self._departure(node, suspicions, limit) for node in nodes)
        return (*gone, *(each for node, each in self._left.items() if node not in suspicions))

    def _departure(self, node: NodeId, suspicions: Suspicions, limit: int) -> Departure:
        """Quietly, unless all have agreed on it: then they wait for what comes after."""
        known = suspicions[node]
        return Departure(
            node, known.cause[-limit:], known.willing, suspicions.is_quiet(node) and node not in self._left
        )

    def _checked(
        self,
        left: tuple[Departure, ...],
        joined: tuple[Member, ...],
        severed: tuple[tuple[NodeId, NodeId], ...],
        renewed: tuple[int, ...],
    ) -> Change | None:
        nobody_left = len(left) >= self._membership.size and not joined
        if nobody_left or not (left or joined or severed or renewed):
            return None
        return Change(self._membership.epoch + 1, left, joined, severed, renewed)
