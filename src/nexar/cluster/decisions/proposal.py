"""What one node wants to be different in the next membership, and the change that says so. Pure.

A draft takes in all that is known when it is made: one change instead of several.

When it is a node's turn to propose. Pure.

All who know a reason could propose at once; their ballots would disturb one another. So the lowest rank that is not
suspected goes first, the others follow in order, should nothing come of it. Who hears a lower one propose lets it. That
is courtesy: safety never depends on it.

Whether a voter agrees to a change. Pure.

It agrees to a removal of who is gone for it, or who wants it: that, nobody says who does not know. Anybody else it
tries to reach first, and refuses if it does. It agrees to newcomers of whom it was told; before, it waits. The rest
harms nobody.

A change that the proposer inherited may have been chosen already: nothing else can be. After some patience a voter
yields to it even so: who accepted it first had reasons, and otherwise nothing would ever be decided.

What a node makes of it that others reach whom it wants to remove. Pure.

A dispute makes it look once more, also over others. The suspicion rests meanwhile, so that what nobody disputes can be
decided. If the others insist, and it still cannot reach the other, then the way between the two is broken, and none
over others serves: the higher rank of the two goes, which both know without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nexar.cluster.decisions.membership_events import ChangeRequested
from nexar.cluster.decisions.paxos import LATER, OK, Agreement, Ballot, Electorate, VoteAnswer, VoteDecision
from nexar.cluster.decisions.suspicion import ProbeResults, Suspicions
from nexar.cluster.membership import Change, Departure, Member, Membership, MembershipError
from nexar.types import NodeId, Rank
from nexar.wire.control import MAX_CAUSE_CHARACTERS, Accept, BallotNumber

_CAUSES_CHARACTERS: Final = 100_000
"""All causes of a change together, about: a message has its limit."""
_SHORTEST_CAUSE: Final = 80


class PendingChanges:
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

    def want(self, wanted: ChangeRequested, now: float) -> None:
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

    def carried(self, change: Change, membership: Membership, now: float) -> PendingChanges:
        """What is left of them after a change to this membership.

        What was agreed on the world's communicator is over with that: where the change leaves it alone, its members go
        on waiting for what they agreed on. A connection that broke stays so if the change did not say it: communicators
        that the change left alone may wait for what was lost on it. Who wants a renewal has to look whether it still
        needs it.
        """
        kept = PendingChanges(self._me, membership)
        if not change.concerns_world:
            kept.want(ChangeRequested(joined=tuple(self._joined.values()), left=tuple(self._left.values())), now)
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


STAGGER: Final = 0.1
"""Seconds between the turns of two ranks."""
WILLING_DELAY: Final = 0.5
"""Seconds before the votes move on without who has closed: those who close together leave nothing to decide."""
_LARGE_WORLD: Final = 10  # ranks; those behind follow one another faster
_LARGE_WORLD_STAGGER: Final = 0.01
_YIELD_TIME: Final = 1.0  # longer than a proposer waits before it repeats its words


def stagger(position: int) -> float:
    """How long who is at this position waits for those before it."""
    return STAGGER * min(position, _LARGE_WORLD) + _LARGE_WORLD_STAGGER * max(0, position - _LARGE_WORLD)


class ProposalTurn:
    """Of one node, in one epoch."""

    def __init__(
        self,
        my_rank: Rank,
        membership: Membership,
        suspicions: Suspicions,
        wishes: PendingChanges,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """What is suspected and wished is looked up each time. `own_delay`: a node that runs slowly leaves those before
        it so many seconds more, or ballots that take long would disturb one another.
        """
        self._own_delay = own_delay
        self._my_rank = my_rank
        self._membership = membership
        self._suspicions = suspicions
        self._pending_changes = wishes
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
        if self._pending_changes.resigned is not None:
            return float("-inf")
        position = self._my_rank - self._suspicions.lower
        wait = self._wait(position)
        reasons = [(self._pending_changes.wanted_since, wait)]
        if self._suspicions.leave_majority:
            reasons.append((self._suspicions.willing_since, WILLING_DELAY + wait))
        if acting:
            reasons.append((self._suspicions.urgent_since, wait))
            reasons.append((self._pending_changes.severed_since, self._wait(self._place_in_pair())))
        turns = [since + wait for since, wait in reasons if since is not None]
        return max(min(turns), self._courtesy(position)) if turns else None

    def _wait(self, position: int) -> float:
        """How long who is at this position waits for those before it, if this node runs slowly, too."""
        return stagger(position) + (self._own_delay() if position else 0.0)

    def is_pressing(self, *, acting: bool) -> bool:
        """Whether something has to be decided, whosever turn it is. Not because of who has closed: nobody waits for
        that.
        """
        if self._pending_changes.wanted_since is not None or (
            self._pending_changes.resigned is not None and self._membership.size > 1
        ):
            return True
        lost = self._suspicions.urgent_since is not None or self._suspicions.disputed_until is not None
        return acting and (lost or self._pending_changes.severed_since is not None)

    def _courtesy(self, position: int) -> float:
        """How long to leave the word to a lower rank. Not to one that is lost: it will not finish."""
        if self._rival is None or self._rival in self._suspicions:
            return float("-inf")
        return self._heard + _YIELD_TIME + stagger(position) + self._own_delay()

    def _place_in_pair(self) -> int:
        """Only the two of a pair know that their connection broke: the lower one goes first."""
        ranks = (self._membership.rank_of(node) for pair in self._pending_changes.severed for node in pair)
        return int(any(rank is not None and rank < self._my_rank for rank in ranks))


YIELD_AFTER: Final = 3.0
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


class ChangeVoter:
    """The judge of one node in one epoch."""

    def __init__(
        self,
        me: NodeId,
        membership: Membership,
        probe_results: ProbeResults,
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
        self._probe_results = probe_results
        self._is_gone = is_gone
        self._is_welcome = is_welcome
        self._ballot: tuple[BallotNumber, float] | None = None  # the newest one asked about, and when
        self._inherited: dict[bytes, float] = {}  # such changes, and when each was first asked about; the newest few

    def judge(self, accept: Accept, now: float) -> VoteDecision:
        """What to answer. Tries that it takes are asked of the probing."""
        change = read_change(accept.value, self._membership)
        if change is None:
            return VoteDecision(VoteAnswer.NO)
        if accept.inherited and self._yields(accept.value, now):
            return OK
        return self._judged(change, accept.ballot.node, self._first_asked(accept.ballot, now), now)

    def _judged(self, change: Change, proposer: NodeId, since: float, now: float) -> VoteDecision:
        unwilling = [each.node for each in change.left if not each.willing and each.node != proposer]
        doubtful = [node for node in unwilling if not self._misses(node, since)]
        reached = tuple(node for node in doubtful if self._reaches(node, since))
        if reached:
            return VoteDecision(VoteAnswer.NO, reached)
        for node in doubtful:
            self._probe_results.ask(node, now)
        return LATER if doubtful or not all(map(self._is_welcome, change.joined)) else OK

    def _misses(self, node: NodeId, since: float) -> bool:
        return node != self._me and (self._is_gone(node) or self._probe_results.missed_since(node, since))

    def _reaches(self, node: NodeId, since: float) -> bool:
        return node == self._me or self._probe_results.reached_since(node, since)

    def _first_asked(self, ballot: BallotNumber, now: float) -> float:
        """What was reached before this ballot may have died since; as may what was reached long ago."""
        if self._ballot is None or self._ballot[0] != ballot or now >= self._ballot[1] + _FRESH:
            self._ballot = (ballot, now)
        return self._ballot[1]

    def _yields(self, value: bytes, now: float) -> bool:
        if value not in self._inherited and len(self._inherited) == _REMEMBERED:
            del self._inherited[next(iter(self._inherited))]
        return now >= self._inherited.setdefault(value, now) + YIELD_AFTER + self._own_delay()


_MAX_DISPUTES: Final = 2  # disputes before the higher rank resigns: the node may have died while the others looked
_LONGEST_REST: Final = 5.0  # seconds that one rests
_MARGIN: Final = 1.2  # of a probe's time: its result is there before the dispute is over
_REFUSED_PAUSE: Final = 0.5  # before a ballot that was refused for another reason is tried again


class DisputeResolver:
    """Of one node, in one epoch."""

    def __init__(
        self,
        my_rank: Rank,
        membership: Membership,
        suspicions: Suspicions,
        wishes: PendingChanges,
        probe_results: ProbeResults,
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
        self._pending_changes = wishes
        self._probe_results = probe_results
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
        self._probe_results.ask(node, now)
        rest = _MARGIN * self._probe_timeout * 2 ** self._suspicions[node].disputes
        delay = self._own_delay()
        until = now + min(_LONGEST_REST, rest) + delay
        latest = max(until, now + _MARGIN * (self._longest_probe + delay))
        disputes = self._suspicions.dispute(node, until, latest=latest)
        rank = self._membership.rank_of(node)
        if rank is not None and disputes >= _MAX_DISPUTES and self._my_rank > rank:
            self._pending_changes.resign(f"rank {self._my_rank} cannot reach rank {rank}, which the others reach", node)
