"""What a node makes of it that others reach whom it wants to remove. Pure.

A dispute makes it look once more, also over others. The suspicion rests meanwhile, so that what nobody disputes can be
decided. If the others insist, and it still cannot reach the other, then the way between the two is broken, and none
over others serves: the higher rank of the two goes, which both know without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nexar.cluster.decisions.agreement import Agreement
from nexar.cluster.decisions.ballot import Ballot
from nexar.cluster.decisions.electorate import Electorate
from nexar.cluster.decisions.probing import Probing
from nexar.cluster.decisions.suspicions import Suspicions
from nexar.cluster.decisions.wishes import Wishes
from nexar.cluster.membership import Membership
from nexar.types import NodeId, Rank

_PATIENCE: Final = 2  # disputes before the higher rank resigns: the node may have died while the others looked
_LONGEST: Final = 5.0  # seconds that one rests
_MARGIN: Final = 1.2  # of a probe's time: its result is there before the dispute is over
_REFUSED_PAUSE: Final = 0.5  # before a ballot that was refused for another reason is tried again


class Disputes:
    """Of one node, in one epoch."""

    def __init__(
        self,
        my_rank: Rank,
        membership: Membership,
        suspicions: Suspicions,
        wishes: Wishes,
        probing: Probing,
        *,
        probe_timeout: float,
        longest_probe: float | None = None,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """It changes the suspicions, and the wishes by a resignation. `probe_timeout`: after which a probe usually has
        a result; `longest_probe`: always. Both extend by `own_delay`.
        """
        self._longest_probe = probe_timeout if longest_probe is None else longest_probe
        self._own_delay = own_delay
        self._my_rank = my_rank
        self._membership = membership
        self._electorate = Electorate(membership)
        self._suspicions = suspicions
        self._wishes = wishes
        self._probing = probing
        self._probe_timeout = probe_timeout

    def look(self, agreement: Agreement, now: float) -> bool:
        """Somebody has refused. Whether that was one too many, and the ballot under way has ended."""
        ballot = agreement.ballot
        if ballot is None or not self._is_lost(ballot, agreement.needed):
            return False
        disputed = sorted(node for node in ballot.reached() if node in self._suspicions)
        agreement.give_way(now, 0.0 if disputed and not ballot.inherited else _REFUSED_PAUSE)
        for node in disputed:
            self._dispute(node, now)
        return True

    def _is_lost(self, ballot: Ballot, needed: int) -> bool:
        """Whether no majority can accept, without those whom we do not reach."""
        refused = ballot.rejected
        silent = sum(node in self._electorate and node not in refused for node in self._suspicions) if refused else 0
        return bool(refused) and len(self._electorate) - len(refused) - silent < needed

    def _dispute(self, node: NodeId, now: float) -> None:
        self._probing.ask(node, now)
        rest = _MARGIN * self._probe_timeout * 2 ** self._suspicions[node].disputes
        delay = self._own_delay()
        until = now + min(_LONGEST, rest) + delay
        latest = max(until, now + _MARGIN * (self._longest_probe + delay))
        disputes = self._suspicions.dispute(node, until, latest=latest)
        rank = self._membership.rank_of(node)
        if rank is not None and disputes >= _PATIENCE and self._my_rank > rank:
            self._wishes.resign(f"rank {self._my_rank} cannot reach rank {rank}, which the others reach", node)
