"""What one node proposes, when, and how it votes on the proposals of others. Pure.

- `PendingChanges`: a draft contains all that is known, so that one change suffices.
- `ProposalTurn`: concurrent ballots disturb one another, so the lowest rank that is not suspected proposes first and
  the others follow in order. Safety never depends on that.
- `ChangeVoter`: a voter accepts the removal of a node that it knows is gone or that agreed to leave. It probes any
  other node and rejects the change if it reaches that node. It accepts joiners once it was informed of them. An
  inherited change may already be chosen, so a voter accepts it after ACCEPT_INHERITED_AFTER seconds.
- `DisputeResolver`: others reach a node that this node wants to remove. It probes again, over relays too, while the
  suspicion is suspended, so that undisputed changes can be decided. If the others still reach the node and the probe
  fails again, the higher rank of the two resigns; both know which one that is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nexar.cluster.decisions.membership_events import ChangeRequested
from nexar.cluster.decisions.paxos import LATER, OK, Agreement, Ballot, Electorate, VoteAnswer, VoteDecision
from nexar.cluster.decisions.suspicion import ProbeResults, Suspicions
from nexar.cluster.membership import Change, Departure, Member, Membership, MembershipError, pin_of
from nexar.types import NodeId, Rank
from nexar.wire.control import MAX_CAUSE_CHARACTERS, Accept, BallotNumber

# Approximate limit for all causes of one change together: messages are limited in size.
_CAUSES_CHARACTERS: Final = 100_000
_SHORTEST_CAUSE: Final = 80


class PendingChanges:
    """What one node wants to change in one epoch."""

    def __init__(self, me: NodeId, membership: Membership) -> None:
        self._me = me
        self._membership = membership
        self._joined: dict[NodeId, Member] = {}
        self._left: dict[NodeId, Departure] = {}
        self._renewed: set[int] = set()
        self.severed: set[tuple[NodeId, NodeId]] = set()
        self.wanted_since: float | None = None  # when the members agreed on something
        self.severed_since: float | None = None
        self.resigned: str | None = None  # why this node wants to be removed
        self.resigned_over: NodeId | None = None  # the node it cannot reach, if that is the cause

    def want(self, wanted: ChangeRequested, now: float) -> None:
        membership = self._membership
        self._joined |= {each.node: each for each in wanted.joined if pin_of(membership, each.node) is None}
        self._left |= {each.node: each for each in wanted.left if membership.rank_of(each.node) is not None}
        self._renewed.update(wanted.renewed)
        if self.wanted_since is None and (self._joined or self._left or self._renewed):
            self.wanted_since = now

    def sever(self, node: NodeId, now: float) -> None:
        """The connection to this node broke and was replaced."""
        self.severed.add((min(self._me, node), max(self._me, node)))
        if self.severed_since is None:
            self.severed_since = now

    def resign(self, cause: str, over: NodeId | None = None) -> None:
        self.resigned, self.resigned_over = cause, over

    def stay(self) -> None:
        self.resigned = self.resigned_over = None

    def carried(self, change: Change, membership: Membership, now: float) -> PendingChanges:
        """Drops renewals: their requester must check whether they are still needed."""
        kept = PendingChanges(self._me, membership)
        # Joins and leaves agreed on the world's communicator end with it; if it continues, its members still wait.
        if not change.concerns_world:
            kept.want(ChangeRequested(joined=tuple(self._joined.values()), left=tuple(self._left.values())), now)
        # Communicators that the change left alone may wait for frames lost on a connection that it did not list.
        for pair in self.severed.difference(change.severed):
            if all(membership.rank_of(node) is not None for node in pair):
                kept.severed.add(pair)
                kept.severed_since = now
        if self.resigned is not None and self.resigned_over is None:
            kept.resign(self.resigned)
        return kept

    def expects(self, member: Member) -> bool:
        return self._joined.get(member.node) == member

    def releases(self, node: NodeId) -> bool:
        return node in self._left

    def draft(self, suspicions: Suspicions, *, may_remove_lost: bool = True) -> Change | None:
        """None if nothing changes or no member would remain. Without `may_remove_lost`, lost members are removed only
        together with a change that was agreed on. A node that resigns proposes nothing else: the others disagree with
        it about the rest.
        """
        if self.resigned is not None:
            mine = Departure(self._me, self.resigned[-MAX_CAUSE_CHARACTERS:], willing=True)
            return self._checked((mine,), (), (), ())
        lost = may_remove_lost or self.wanted_since is not None
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
        # The departure is quiet unless all members agreed on it: then they wait for the next epoch.
        known = suspicions[node]
        return Departure(
            node, known.loss.cause[-limit:], known.willing, suspicions.is_quiet(node) and node not in self._left
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


TURN_STAGGER: Final = 0.1  # seconds between the turns of two ranks
# Seconds before the others remove a member that closed. If all close together there is nothing to decide.
WILLING_DELAY: Final = 0.5
_LARGE_WORLD: Final = 10  # ranks; above it turns follow one another faster
_LARGE_WORLD_STAGGER: Final = 0.01
_YIELD_TO_LOWER_RANK: Final = 1.0  # seconds after a lower rank's last proposal; longer than a proposer's retry interval


def stagger(position: int) -> float:
    """Seconds to wait for the nodes before this position."""
    if position <= _LARGE_WORLD:
        return TURN_STAGGER * position
    return TURN_STAGGER * _LARGE_WORLD + _LARGE_WORLD_STAGGER * (position - _LARGE_WORLD)


class ProposalTurn:
    """When one node proposes in one epoch."""

    def __init__(
        self,
        my_rank: Rank,
        membership: Membership,
        suspicions: Suspicions,
        pending: PendingChanges,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._own_delay = own_delay
        self._my_rank = my_rank
        self._membership = membership
        self._suspicions = suspicions
        self._pending_changes = pending
        self._lower_proposer: NodeId | None = None  # the lower rank that proposed last
        self._lower_proposer_seen = 0.0

    def saw_proposal(self, node: NodeId, now: float) -> None:
        rank = self._membership.rank_of(node)
        if rank is not None and rank < self._my_rank and node not in self._suspicions:
            self._lower_proposer, self._lower_proposer_seen = node, now

    def due(self, *, may_remove_lost: bool) -> float | None:
        """None without a reason. A loss is a reason if `may_remove_lost`, a closed member if the remaining voters are a
        majority.
        """
        if self._pending_changes.resigned is not None:
            return float("-inf")
        suspicions, pending = self._suspicions, self._pending_changes
        wanted, willing = pending.wanted_since, suspicions.willing_since
        urgent, severed = (suspicions.urgent_since, pending.severed_since) if may_remove_lost else (None, None)
        if wanted is None and willing is None and urgent is None and severed is None:
            return None  # the usual case, asked after every event
        position = self._my_rank - suspicions.lower_rank_count
        wait = self._wait(position)
        turns: list[float] = []
        if wanted is not None:
            turns.append(wanted + wait)
        if urgent is not None:
            turns.append(urgent + wait)
        if willing is not None and suspicions.leave_majority:
            turns.append(willing + WILLING_DELAY + wait)
        if severed is not None:
            turns.append(severed + self._wait(self._position_in_severed_pair()))
        return max(min(turns), self._yield_until(position)) if turns else None

    def _wait(self, position: int) -> float:
        # Seconds to wait for those before this position, extended by this node's own delay.
        return stagger(position) + (self._own_delay() if position else 0.0)

    def must_decide(self, *, may_remove_lost: bool) -> bool:
        """Nobody waits for the removal of a member that closed."""
        if self._pending_changes.wanted_since is not None or (
            self._pending_changes.resigned is not None and self._membership.size > 1
        ):
            return True
        lost = self._suspicions.urgent_since is not None or self._suspicions.disputed_until is not None
        return may_remove_lost and (lost or self._pending_changes.severed_since is not None)

    def _yield_until(self, position: int) -> float:
        # Until when to leave proposing to a lower rank. A lost one is ignored: it will not finish.
        if self._lower_proposer is None or self._lower_proposer in self._suspicions:
            return float("-inf")
        return self._lower_proposer_seen + _YIELD_TO_LOWER_RANK + stagger(position) + self._own_delay()

    def _position_in_severed_pair(self) -> int:
        # Only the two ends know that their connection broke: the lower rank proposes first.
        ranks = (self._membership.rank_of(node) for pair in self._pending_changes.severed for node in pair)
        return int(any(rank is not None and rank < self._my_rank for rank in ranks))


ACCEPT_INHERITED_AFTER: Final = 3.0  # seconds after which a voter accepts an inherited change in any case

_MAX_INHERITED: Final = 8  # inherited changes; more than one is rare
_RESULT_LIFETIME: Final = 2.0  # seconds that probe results count if the same ballot asks again


def read_change(value: bytes, membership: Membership) -> Change | None:
    """None if it is no change of this membership. Cheap unless a node joins."""
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
    """How one node votes in one epoch."""

    def __init__(
        self,
        me: NodeId,
        membership: Membership,
        probe_results: ProbeResults,
        *,
        is_gone: Callable[[NodeId], bool],
        is_expected: Callable[[Member], bool],
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`is_gone`: known to be lost or leaving. `is_expected`: known as a joiner."""
        self._own_delay = own_delay
        self._me = me
        self._membership = membership
        self._probe_results = probe_results
        self._is_gone = is_gone
        self._is_expected = is_expected
        self._ballot: tuple[BallotNumber, float] | None = None  # the newest ballot checked, and since when
        self._inherited: dict[bytes, float] = {}  # by when each was first proposed here; the newest few

    def check(self, accept: Accept, now: float) -> VoteDecision:
        """Requests the probes that it needs."""
        change = read_change(accept.value, self._membership)
        if change is None:
            return VoteDecision(VoteAnswer.NO)
        if accept.inherited and self._waited_long_enough(accept.value, now):
            return OK
        return self._check_change(change, accept.ballot.node, self._first_asked(accept.ballot, now), now)

    def _check_change(self, change: Change, proposer: NodeId, since: float, now: float) -> VoteDecision:
        unwilling = [each.node for each in change.left if not each.willing and each.node != proposer]
        doubtful = [node for node in unwilling if not self._is_unreachable(node, since)]
        reached = tuple(node for node in doubtful if self._reaches(node, since))
        if reached:
            return VoteDecision(VoteAnswer.NO, reached)
        for node in doubtful:
            self._probe_results.ask(node, now)
        return LATER if doubtful or not all(map(self._is_expected, change.joined)) else OK

    def _is_unreachable(self, node: NodeId, since: float) -> bool:
        return node != self._me and (self._is_gone(node) or self._probe_results.missed_since(node, since))

    def _reaches(self, node: NodeId, since: float) -> bool:
        return node == self._me or self._probe_results.reached_since(node, since)

    def _first_asked(self, ballot: BallotNumber, now: float) -> float:
        # A node reached before this ballot, or long ago, may have died since.
        if self._ballot is None or self._ballot[0] != ballot or now >= self._ballot[1] + _RESULT_LIFETIME:
            self._ballot = (ballot, now)
        return self._ballot[1]

    def _waited_long_enough(self, value: bytes, now: float) -> bool:
        if value not in self._inherited and len(self._inherited) == _MAX_INHERITED:
            del self._inherited[next(iter(self._inherited))]
        return now >= self._inherited.setdefault(value, now) + ACCEPT_INHERITED_AFTER + self._own_delay()


_MAX_DISPUTES: Final = 2  # disputes before the higher rank resigns: the node may have died while the others probed it
_LONGEST_SUSPENSION: Final = 5.0  # seconds that a disputed suspicion is suspended
_MARGIN: Final = 1.2  # of the probe timeout: the result arrives before the dispute ends
_REFUSED_PAUSE: Final = 0.5  # seconds before retrying a ballot that was rejected for another reason
_ENDING_PAUSE: Final = 0.02  # at least, before retrying a ballot about a node that still answers while it ends


class DisputeResolver:
    """Handles rejected removals of one node in one epoch."""

    def __init__(
        self,
        my_rank: Rank,
        membership: Membership,
        suspicions: Suspicions,
        pending: PendingChanges,
        probe_results: ProbeResults,
        *,
        probe_timeout: float,
        longest_probe: float | None = None,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """A probe usually ends after `probe_timeout`, always after `longest_probe`; `own_delay` extends both."""
        self._longest_probe = probe_timeout if longest_probe is None else longest_probe
        self._own_delay = own_delay
        self._my_rank = my_rank
        self._membership = membership
        self._electorate = Electorate(membership)
        self._suspicions = suspicions
        self._pending_changes = pending
        self._probe_results = probe_results
        self._probe_timeout = probe_timeout

    def handle_rejection(self, agreement: Agreement, now: float) -> bool:
        """Whether the ballot could no longer win and was ended."""
        ballot = agreement.ballot
        if ballot is None or not self._cannot_win(ballot, agreement.needed):
            return False
        reached = sorted(node for node in ballot.reached() if node in self._suspicions)
        disputed = [node for node in reached if not self._may_be_ending(node, now)]
        for node in disputed:
            self._dispute(node, now)
        if ballot.inherited or not reached:
            pause = _REFUSED_PAUSE
        elif disputed:
            pause = 0.0  # the next ballot leaves them out
        else:
            pause = max(_ENDING_PAUSE, *(now - self._suspicions[node].first_since for node in reached))
        agreement.retry_after(now, pause)
        return True

    def _may_be_ending(self, node: NodeId, now: float) -> bool:
        # A process whose end is certain may answer others until it has ended. That is no dispute, unless it lasts
        # longer than an answer may take.
        known = self._suspicions[node]
        limit = _MARGIN * self._probe_timeout + self._own_delay()
        return known.loss.is_conclusive and not known.disputes and now < known.first_since + limit

    def _cannot_win(self, ballot: Ballot, needed: int) -> bool:
        # Whether no majority can accept any longer, not counting voters that this node cannot reach.
        refused = ballot.rejected
        silent = sum(node in self._electorate and node not in refused for node in self._suspicions) if refused else 0
        return bool(refused) and len(self._electorate) - len(refused) - silent < needed

    def _dispute(self, node: NodeId, now: float) -> None:
        self._probe_results.ask(node, now)
        suspension = _MARGIN * self._probe_timeout * 2 ** self._suspicions[node].disputes
        delay = self._own_delay()
        until = now + min(_LONGEST_SUSPENSION, suspension) + delay
        latest = max(until, now + _MARGIN * (self._longest_probe + delay))
        disputes = self._suspicions.dispute(node, until, latest=latest)
        rank = self._membership.rank_of(node)
        if rank is not None and disputes >= _MAX_DISPUTES and self._my_rank > rank:
            self._pending_changes.resign(f"rank {self._my_rank} cannot reach rank {rank}, which the others reach", node)
