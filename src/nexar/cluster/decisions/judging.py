"""Whether a voter agrees to a change. Pure.

It agrees to a removal of who is gone for it, or who wants it: that, nobody says who does not know. Anybody else it
tries to reach first, and refuses if it does. It agrees to newcomers of whom it was told; before, it waits. The rest
harms nobody.

A change that the proposer inherited may have been chosen already: nothing else can be. After some patience a voter
yields to it even so: who accepted it first had reasons, and otherwise nothing would ever be decided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nexar.cluster.change import Change
from nexar.cluster.decisions.probing import Probing
from nexar.cluster.decisions.vote import LATER, OK, Judgement, Verdict
from nexar.cluster.membership import Member, Membership, MembershipError
from nexar.types import NodeId
from nexar.wire.messages import Accept, Number

PATIENCE: Final = 3.0
"""Seconds of asking after which a voter yields to an inherited change."""

_REMEMBERED: Final = 8  # inherited changes: two would be many
_FRESH: Final = 2.0  # seconds that what was found out for a ballot counts, if it is asked about again


def read_change(value: bytes, membership: Membership) -> Change | None:
    """The change of this membership that these bytes are; None if they are none. Cheap unless somebody joins."""
    try:
        change = Change.decode(value)
        if change.joined:
            change.apply(membership)
    except MembershipError:
        return None
    gone = change.gone
    fits = change.epoch == membership.epoch + 1 and all(membership.rank_of(node) is not None for node in gone)
    return change if fits and (change.joined or len(gone) < membership.size) else None


class Judging:
    """The judge of one node in one epoch."""

    def __init__(
        self,
        me: NodeId,
        membership: Membership,
        probing: Probing,
        *,
        is_gone: Callable[[NodeId], bool],
        is_welcome: Callable[[Member], bool],
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`is_gone`: this node knows that the other is lost or leaves. `is_welcome`: it was told that it may join.
        `own_delay`: by which its patience extends.
        """
        self._own_delay = own_delay
        self._me = me
        self._membership = membership
        self._probing = probing
        self._is_gone = is_gone
        self._is_welcome = is_welcome
        self._ballot: tuple[Number, float] | None = None  # the newest one asked about, and when
        self._inherited: dict[bytes, float] = {}  # such changes, and when each was first asked about; the newest few

    def judge(self, accept: Accept, now: float) -> Judgement:
        """What to answer. Tries that it takes are asked of the probing."""
        change = read_change(accept.value, self._membership)
        if change is None:
            return Judgement(Verdict.NO)
        if accept.inherited and self._yields(accept.value, now):
            return OK
        return self._judged(change, accept.ballot.node, self._first_asked(accept.ballot, now), now)

    def _judged(self, change: Change, proposer: NodeId, since: float, now: float) -> Judgement:
        unwilling = [each.node for each in change.left if not each.willing and each.node != proposer]
        doubtful = [node for node in unwilling if not self._misses(node, since)]
        reached = tuple(node for node in doubtful if self._reaches(node, since))
        if reached:
            return Judgement(Verdict.NO, reached)
        for node in doubtful:
            self._probing.ask(node, now)
        return LATER if doubtful or not all(map(self._is_welcome, change.joined)) else OK

    def _misses(self, node: NodeId, since: float) -> bool:
        return node != self._me and (self._is_gone(node) or self._probing.missed_since(node, since))

    def _reaches(self, node: NodeId, since: float) -> bool:
        return node == self._me or self._probing.reached_since(node, since)

    def _first_asked(self, ballot: Number, now: float) -> float:
        """What was reached before this ballot may have died since; as may what was reached long ago."""
        if self._ballot is None or self._ballot[0] != ballot or now >= self._ballot[1] + _FRESH:
            self._ballot = (ballot, now)
        return self._ballot[1]

    def _yields(self, value: bytes, now: float) -> bool:
        if value not in self._inherited and len(self._inherited) == _REMEMBERED:
            del self._inherited[next(iter(self._inherited))]
        return now >= self._inherited.setdefault(value, now) + PATIENCE + self._own_delay()
