"""When it is a node's turn to propose. Pure.

All who know a reason could propose at once; their ballots would disturb one another. So the lowest rank that is not
suspected goes first, the others follow in order, should nothing come of it. Who hears a lower one propose lets it. That
is courtesy: safety never depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nexar.cluster.decisions.suspicions import Suspicions
from nexar.cluster.decisions.wishes import Wishes
from nexar.cluster.membership import Membership
from nexar.types import NodeId, Rank

STAGGER: Final = 0.1
"""Seconds between the turns of two ranks."""
WILLING_DELAY: Final = 0.5
"""Seconds before the votes move on without who has closed: those who close together leave nothing to decide."""
_CROWD: Final = 10  # ranks; those behind follow one another faster
_CROWD_STAGGER: Final = 0.01
_COURTESY: Final = 1.0  # longer than a proposer waits before it repeats its words


def stagger(position: int) -> float:
    """How long who is at this position waits for those before it."""
    return STAGGER * min(position, _CROWD) + _CROWD_STAGGER * max(0, position - _CROWD)


class Turns:
    """Of one node, in one epoch."""

    def __init__(
        self,
        my_rank: Rank,
        membership: Membership,
        suspicions: Suspicions,
        wishes: Wishes,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """What is suspected and wished is looked up each time. `own_delay`: a node that runs slowly leaves those before
        it so many seconds more, or ballots that take long would disturb one another.
        """
        self._own_delay = own_delay
        self._my_rank = my_rank
        self._membership = membership
        self._suspicions = suspicions
        self._wishes = wishes
        self._rival: NodeId | None = None  # the lower rank that was last heard proposing
        self._heard = 0.0

    def heard(self, node: NodeId, now: float) -> None:
        """Somebody proposes."""
        rank = self._membership.rank_of(node)
        if rank is not None and rank < self._my_rank and node not in self._suspicions:
            self._rival, self._heard = node, now

    def mine(self, *, acting: bool) -> float | None:
        """When this node proposes what it knows; None: it has no reason to. `acting`: what is lost is one. Who has
        closed always is, for it disturbs nobody; but not where that could not be chosen.
        """
        if self._wishes.resigned is not None:
            return float("-inf")
        position = self._my_rank - self._suspicions.lower
        wait = self._wait(position)
        reasons = [(self._wishes.wanted_since, wait)]
        if self._suspicions.leave_majority:
            reasons.append((self._suspicions.willing_since, WILLING_DELAY + wait))
        if acting:
            reasons.append((self._suspicions.urgent_since, wait))
            reasons.append((self._wishes.severed_since, self._wait(self._place_in_pair())))
        turns = [since + wait for since, wait in reasons if since is not None]
        return max(min(turns), self._courtesy(position)) if turns else None

    def _wait(self, position: int) -> float:
        """How long who is at this position waits for those before it, if this node runs slowly, too."""
        return stagger(position) + (self._own_delay() if position else 0.0)

    def is_pressing(self, *, acting: bool) -> bool:
        """Whether something has to be decided, whosever turn it is. Not because of who has closed: nobody waits for
        that.
        """
        if self._wishes.wanted_since is not None or (self._wishes.resigned is not None and self._membership.size > 1):
            return True
        lost = self._suspicions.urgent_since is not None or self._suspicions.disputed_until is not None
        return acting and (lost or self._wishes.severed_since is not None)

    def _courtesy(self, position: int) -> float:
        """How long to leave the word to a lower rank. Not to one that is lost: it will not finish."""
        if self._rival is None or self._rival in self._suspicions:
            return float("-inf")
        return self._heard + _COURTESY + stagger(position) + self._own_delay()

    def _place_in_pair(self) -> int:
        """Only the two of a pair know that their connection broke: the lower one goes first."""
        ranks = (self._membership.rank_of(node) for pair in self._wishes.severed for node in pair)
        return int(any(rank is not None and rank < self._my_rank for rank in ranks))
