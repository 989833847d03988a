"""The membership machine of one node: from suspicions and requests to the next epoch. Pure.

    PeerLossFound, Suspect + ProbeFinished ─→ suspicions ─┐
    PeerReachable(severed) ─────────────────→ severed ────┼─→ draft ─ my turn ─→ Agreement(0, epoch, 0) ─ chosen ─┐
    ChangeRequested, ResignRequested ───────→ pending ────┘    others' ballots ─ ChangeVoter ─┘                   │
                                                                         MembershipDecided | SelfExpelled ←───────┘

Invariants:
- A node enters an epoch only if a majority of the voters of the previous one chose it.
- No single node's suspicion removes a member: it is a reason to propose, and each voter checks for itself.
- If two members only cannot reach each other, the others reject both removals. Then the higher rank resigns, so that
  all remaining members reach one another.
- A change resets all state except suspicions of remaining nodes with their disputes, broken connections, and what was
  agreed on the world's communicator if that continues.
- A member that closed is removed quietly: no call is interrupted.
- Messages may be duplicated. A node that is behind is sent the decided changes.
- All deadlines of a slow node extend by its own delay (`OwnDelayChanged`).
- An event costs O(1) in the size of the world, except proposing and adopting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from nexar.cluster.decisions.membership_events import (
    ChangeRequested,
    Loss,
    MembershipAction,
    MembershipDecided,
    MembershipInput,
    MembershipMessage,
    MessageReceived,
    OwnDelayChanged,
    PeerLossFound,
    PeerReachable,
    ProbeFinished,
    RecoverNow,
    ResignRequested,
    SelfExpelled,
    SendMessage,
    Tick,
)
from nexar.cluster.decisions.paxos import LONGEST_PAUSE, Agreement, Electorate, VoteDecision
from nexar.cluster.decisions.proposal import ChangeVoter, DisputeResolver, PendingChanges, ProposalTurn, read_change
from nexar.cluster.decisions.suspicion import ProbeResults, StallTimer, SuspicionBroadcast, Suspicions
from nexar.cluster.membership import Change, Membership
from nexar.errors import InternalError
from nexar.types import NodeId, Rank
from nexar.wire.control import Accept, Accepted, BallotNumber, Chosen, Prepare, Promise, Rejected, Suspect

if TYPE_CHECKING:
    from random import Random

PaxosMessage: TypeAlias = Prepare | Promise | Accept | Accepted | Rejected | Chosen

KEPT: Final = 1024  # Changes kept. A node further behind gets no answer; it cannot be a member.
_AHEAD: Final = 64
MAX_ANSWER: Final = 16  # changes in one answer


class DecidedChanges:
    """Decided changes for nodes that are behind, and early ones, by the epoch each follows."""

    def __init__(self) -> None:
        self._chosen: dict[int, bytes] = {}  # in order of epoch
        self._ahead: dict[int, bytes] = {}

    def add(self, epoch: int, value: bytes) -> None:
        self._chosen[epoch] = value
        if len(self._chosen) > KEPT:
            del self._chosen[next(iter(self._chosen))]

    def messages_for(self, node: NodeId, epoch: int) -> list[SendMessage]:
        """Empty if the change after `epoch` is unknown: later ones do not help."""
        if epoch not in self._chosen:
            return []
        near = range(epoch, epoch + MAX_ANSWER)
        return [SendMessage(node, Chosen((0, each, 0), self._chosen[each])) for each in near if each in self._chosen]

    def since(self, epoch: int) -> list[bytes]:
        """Changes after `epoch`, in order; empty if the first is unknown."""
        if epoch not in self._chosen:
            return []
        return [value for made_in, value in self._chosen.items() if made_in >= epoch]

    def keep_for_later(self, epoch: int, value: bytes) -> bool:
        """Returns whether it is new."""
        # The furthest are dropped: others send them again. Only a new one is worth a question for those before it, or
        # each answer would cause as many questions as it has messages.
        is_new = epoch not in self._ahead
        self._ahead[epoch] = value
        if len(self._ahead) > _AHEAD:
            del self._ahead[max(self._ahead)]
        return is_new

    def take(self, epoch: int) -> bytes | None:
        return self._ahead.pop(epoch, None)

    def answer(self, me: NodeId, sender: NodeId, message: PaxosMessage, epoch: int) -> list[SendMessage] | None:
        """A node behind is sent the decided changes, a node ahead is asked for them. None if the message is about this
        epoch.
        """
        communicator, about, sequence = message.instance
        if communicator or sequence:
            return []
        if about < epoch:
            return self.messages_for(sender, about) if isinstance(message, Prepare | Accept) else []
        if about == epoch:
            return None
        if isinstance(message, Chosen) and not self.keep_for_later(about, message.value):
            return []
        return [request_changes(me, sender, epoch)]


def request_changes(me: NodeId, node: NodeId, epoch: int) -> SendMessage:
    """Ask a node that is ahead: it answers a ballot with the chosen value. Round 0 hinders no proposer but
    its owner, which then begins round 1.
    """
    return SendMessage(node, Prepare((0, epoch, 0), BallotNumber(0, me)))


_STALLED_PAUSE: Final = 5.0


class MembershipMachine:
    """`step` is the only input; the owner steps Tick when `due`."""

    def __init__(
        self,
        me: NodeId,
        membership: Membership,
        *,
        recovery_timeout: float,
        probe_timeout: float = 1.0,
        longest_probe: float | None = None,
        active: bool = True,
        random: Random,
        apply: Callable[[Change, Membership], Membership] = Change.apply,
    ) -> None:
        """`active`: propose to remove lost members without RecoverNow. A probe usually ends after `probe_timeout`,
        always after `longest_probe`. `apply` lets machines share memberships.
        """
        self.me = me
        # The last chosen membership excludes this node. It then only answers nodes that are behind.
        self.expelled = False
        self._active = active
        self._recovery_timeout = recovery_timeout
        self._probe_timeout = probe_timeout
        self._longest_probe = probe_timeout if longest_probe is None else longest_probe
        self._own_delay = 0.0
        self._random = random
        self._apply = apply
        self._decided = DecidedChanges()
        self._due: float | None = None
        self._due_is_old = True  # owners ask more often than the state changes
        self._probe_results = ProbeResults(self._longest_probe, self._delay)
        self._world_since = membership.epoch  # epoch of the last change that ended the world's communicator
        self._enter(membership, Suspicions(me, membership), PendingChanges(me, membership))

    def _enter(self, membership: Membership, suspicions: Suspicions, pending: PendingChanges) -> None:
        # Set up the state of a new epoch.
        rank = membership.rank_of(self.me)
        if rank is None:
            raise InternalError("a node cannot decide about a membership that it is not in")
        self.membership = membership
        self._rank: Rank = rank
        self._electorate = Electorate(membership)
        self._suspicions = suspicions
        self._pending_changes = pending
        self._agreement: Agreement | None = None
        self._change_voter = ChangeVoter(
            self.me,
            membership,
            self._probe_results,
            is_gone=self._is_gone,
            is_expected=self._pending_changes.expects,
            own_delay=self._delay,
        )
        self._proposal_turn = ProposalTurn(rank, membership, suspicions, pending, self._delay)
        self._draft: Change | None = None
        self._draft_is_old = True
        self._recovering = False
        self._dispute_resolver = DisputeResolver(
            rank,
            membership,
            suspicions,
            pending,
            self._probe_results,
            probe_timeout=self._probe_timeout,
            longest_probe=self._longest_probe,
            own_delay=self._delay,
        )
        self._broadcast = SuspicionBroadcast(self.me, membership, suspicions, self._delay)
        self._stall_timer = StallTimer(
            self.me,
            self._electorate,
            suspicions,
            recovery_timeout=self._recovery_timeout,
            probe_timeout=self._probe_timeout,
            own_delay=self._delay,
        )
        self._probe_results.clear()

    def suspects(self) -> Mapping[NodeId, str]:
        return {node: each.loss.cause for node, each in self._suspicions.items()}

    def missing(self) -> list[NodeId]:
        asked = [] if self._agreement is None else self._agreement.missing()
        return sorted({*asked, *self._suspicions})

    def changes_since(self, epoch: int) -> list[bytes]:
        return self._decided.since(epoch)

    def due(self, now: float) -> float | None:
        if self._due_is_old:
            self._due, self._due_is_old = self._find_due(now), False
        return None if self._due is None else max(now, self._due)

    def _find_due(self, now: float) -> float | None:
        if self.expelled:
            return None
        agreement = self._agreement
        moments = [self._suspicions.disputed_until, self._broadcast.again, self._stall_timer.due]
        if agreement is not None:
            moments.append(agreement.due(now))
        if agreement is None or not agreement.proposing:
            moments.append(self._turn())
        known = [moment for moment in moments if moment is not None]
        return min(known) if known else None

    # ------------------------------------------------------------ events

    def step(self, event: MembershipInput, now: float) -> list[MembershipAction]:
        """Returns the actions, in order. No other method changes the state."""
        self._due_is_old = True
        return self._answer_expelled(event) if self.expelled else self._handle(event, now)

    def _handle(self, event: MembershipInput, now: float) -> list[MembershipAction]:
        actions = self._apply_event(event, now)
        actions += self._advance(now)
        if self.expelled:
            return actions
        actions += self._broadcast.messages(now, repeat=self._may_remove_lost)
        actions += self._stall(now)
        actions += self._probe_results.drain()
        return actions

    def _apply_event(self, event: MembershipInput, now: float) -> list[MembershipAction]:  # noqa: PLR0911 - one line for each event
        match event:
            case MessageReceived(sender, message):
                return self._handle_message(sender, message, now)
            case PeerLossFound(node, loss, willing):
                return self._suspect(node, loss, now, willing=willing)
            case PeerReachable(node, severed):
                return self._reached(node, now, severed=severed)
            case ProbeFinished(node, loss):
                return self._probe_finished(node, loss, now)
            case ChangeRequested():
                return self._want(event, now)
            case ResignRequested(cause):
                self._pending_changes.resign(cause)
                return self._changed()
            case RecoverNow():
                self._recovering = True
                self._suspicions.make_urgent(now)
                return self._changed()
            case OwnDelayChanged(seconds):
                self._own_delay = seconds
                self._set_pause()
                return []
            case Tick():
                return self._tick(now)

    def _delay(self) -> float:
        return self._own_delay

    def _set_pause(self) -> None:
        # Repeat rarely where answers take long. After a stall continue slowly: the network may heal.
        if self._agreement is not None:
            longest = _STALLED_PAUSE if self._stall_timer.reported else LONGEST_PAUSE
            self._agreement.longest_pause = longest + self._own_delay

    def _changed(self) -> list[MembershipAction]:
        self._draft_is_old = True
        return []

    def _tick(self, now: float) -> list[MembershipAction]:
        if self._suspicions.end_disputes(now):
            self._changed()
        messages = self._propose(now)  # first, or a pause would end with an outdated value
        return messages if self._agreement is None else [*messages, *self._agreement.tick(now)]

    def _want(self, wanted: ChangeRequested, now: float) -> list[MembershipAction]:
        oldest = self.membership.epoch if wanted.renewed else self._world_since
        if wanted.epoch and not oldest <= wanted.epoch <= self.membership.epoch:
            return []
        self._pending_changes.want(wanted, now)
        self._changed()
        return self._recheck(now)

    # ------------------------------------------------------------ suspicion

    @property
    def is_leaving(self) -> bool:
        """The members agreed that this node leaves."""
        return self._pending_changes.releases(self.me)

    def _is_gone(self, node: NodeId) -> bool:
        return node in self._suspicions or self._pending_changes.releases(node)

    def _suspect(
        self, node: NodeId, loss: Loss, now: float, *, willing: bool = False, known_elsewhere: bool = False
    ) -> list[MembershipAction]:
        # `known_elsewhere`: others know it, so it need not be sent at once.
        seed = self.membership.seed
        is_known = self.membership.rank_of(node) is not None or (seed is not None and seed.node == node)
        if node == self.me or not is_known:
            return []
        if self._suspicions.add(node, loss, now, willing=willing):
            self._changed()
            if not (willing or known_elsewhere):
                self._broadcast.add(node)
        return self._recheck(now)

    def _reached(self, node: NodeId, now: float, *, severed: bool) -> list[MembershipAction]:
        self._probe_results.clear_miss(node)
        self._drop_suspicion(node)
        if severed and node != self.me and self.membership.rank_of(node) is not None:
            self._pending_changes.sever(node, now)
            self._changed()
        return []

    def _drop_suspicion(self, node: NodeId) -> None:
        # Drop a suspicion and withdraw our ballot that removes the node; no voter need have accepted it.
        if not self._suspicions.drop(node):
            return
        self._changed()
        if self._pending_changes.resigned_over == node:
            self._pending_changes.stay()
        if self._agreement is not None:
            self._agreement.withdraw()

    def _probe_finished(self, node: NodeId, loss: Loss | None, now: float) -> list[MembershipAction]:
        self._probe_results.record(node, now, reached=loss is None)
        if loss is not None:
            self._suspicions.probe_missed(node)
            return self._suspect(node, loss, now, known_elsewhere=True)
        disputed = node in self._suspicions and self._suspicions[node].disputes
        if disputed:
            self._drop_suspicion(node)
        return self._recheck(now)

    def _recheck(self, now: float) -> list[MembershipAction]:
        if self._agreement is None:
            return []
        return list(self._agreement.recheck(lambda accept: self._check(accept, now)))

    def _check(self, accept: Accept, now: float) -> VoteDecision:
        return self._change_voter.check(accept, now)

    def _handle_message(self, sender: NodeId, message: MembershipMessage, now: float) -> list[MembershipAction]:
        if isinstance(message, Suspect):
            return self._handle_suspect(sender, message, now)
        answer = self._decided.answer(self.me, sender, message, self.membership.epoch)
        return self._handle_paxos(sender, message, now) if answer is None else [*answer]

    def _answer_expelled(self, event: MembershipInput) -> list[MembershipAction]:
        # An expelled node only sends the decided changes.
        match event:
            case MessageReceived(sender, Prepare((0, epoch, 0)) | Accept((0, epoch, 0)) | Suspect(epoch)):
                return [*self._decided.messages_for(sender, epoch)]
        return []

    def _handle_paxos(self, sender: NodeId, message: MembershipMessage, now: float) -> list[MembershipAction]:
        if not self._is_sound(message):
            return []
        if isinstance(message, Prepare | Accept):
            self._proposal_turn.saw_proposal(sender, now)
            self._broadcast.saw_proposal(now)
        messages = list(self._instance().receive(sender, message, now, lambda accept: self._check(accept, now)))
        if isinstance(message, Rejected) and self._dispute_resolver.handle_rejection(self._instance(), now):
            self._changed()
        return [*messages]

    def _is_sound(self, message: MembershipMessage) -> bool:
        # Whether the value of the message is a change of this membership. A faulty voter must not bind an honest
        # proposer to a value that no node can adopt.
        match message:
            case Chosen() | Promise(accepted=BallotNumber()):
                return read_change(message.value, self.membership) is not None
        return True

    def _handle_suspect(self, sender: NodeId, message: Suspect, now: float) -> list[MembershipAction]:
        # A node cannot reach another. If the suspect is this node, probe the sender; otherwise probe the suspect and
        # inform it.
        if message.epoch < self.membership.epoch:
            return [*self._decided.messages_for(sender, message.epoch)]
        if message.epoch > self.membership.epoch:
            return [request_changes(self.me, sender, self.membership.epoch)]
        other = message.by if message.node == self.me else message.node
        ranks = self.membership.rank_of(message.node), self.membership.rank_of(message.by)
        if None in ranks or self._is_gone(other) or other == self.me:
            return []
        self._probe_results.ask(other, now)
        return [] if message.node == self.me else [*self._broadcast.forward(message)]

    # ------------------------------------------------------------ proposing

    @property
    def _may_remove_lost(self) -> bool:
        return self._active or self._recovering

    def _instance(self) -> Agreement:
        if self._agreement is None:
            instance = (0, self.membership.epoch, 0)
            seed = self.membership.seed
            learners = () if seed is None or self._electorate.seed_voter else (seed.node,)
            self._agreement = Agreement(
                instance,
                self.me,
                self._electorate,
                random=self._random,
                learners=learners,
                ignored_proposer=self._electorate.seed_voter,
                owns_round_0=self._rank == 0,  # all agree who that is, and a node that restarts is another node
            )
            self._set_pause()
        return self._agreement

    def _turn(self) -> float | None:
        # When this node proposes; None if it has no reason to.
        if self._draft is None and not self._draft_is_old:
            return None
        return self._proposal_turn.due(may_remove_lost=self._may_remove_lost)

    def _advance(self, now: float) -> list[MembershipAction]:
        # Propose if it is this node's turn, and enter each epoch that is chosen.
        actions: list[MembershipAction] = []
        while not self.expelled:
            actions += self._propose(now)
            chosen = self._agreement.chosen if self._agreement else None
            if chosen is None:
                break
            actions += self._adopt(chosen, now)
        return actions

    def _propose(self, now: float) -> list[MembershipAction]:
        agreement, turn = self._agreement, self._turn()
        if agreement is not None and agreement.chosen is not None:
            return []
        in_ballot = agreement is not None and agreement.ballot is not None
        if turn is None or (now < turn and not in_ballot):
            # A ballot that was outbid is not repeated before the turn: two proposers that answer slowly would outbid
            # each other again and again.
            if agreement is not None and agreement.proposing:
                agreement.withdraw()
            return []
        if self._draft_is_old:
            self._draft, self._draft_is_old = (
                self._pending_changes.draft(self._suspicions, may_remove_lost=self._may_remove_lost),
                False,
            )
        if self._draft is None:
            return []
        return list(self._instance().propose(self._draft.encode(), now, self._reserve()))

    def _reserve(self) -> tuple[NodeId, ...]:
        # The seed need not vote if enough members can: it is another process, and its answers take longer.
        seed = self._electorate.seed_voter
        is_enough = self._suspicions.reachable_members >= self._electorate.needed
        return () if seed is None or not is_enough else (seed,)

    # ------------------------------------------------------------ what was chosen

    def _adopt(self, value: bytes, now: float) -> list[MembershipAction]:
        before, change = self.membership, Change.decode(value)
        self._decided.add(before.epoch, value)
        mine = next((each for each in change.left if each.node == self.me), None)
        if mine is not None:
            self.expelled = True
            return [SelfExpelled(change.epoch, mine.cause, mine.willing)]
        after = self._apply(change, before)
        if change.concerns_world:
            self._world_since = after.epoch
        self._enter(
            after, self._suspicions.carried(self.me, after, now), self._pending_changes.carried(change, after, now)
        )
        ahead = self._decided.take(after.epoch)
        if ahead is not None and read_change(ahead, after) is not None:
            self._instance().receive(self.me, Chosen((0, after.epoch, 0), ahead), now)
        return [MembershipDecided(change)]

    # ------------------------------------------------------------ time is over

    def _stall(self, now: float) -> list[MembershipAction]:
        self._stall_timer.update(
            now, must_decide=self._proposal_turn.must_decide(may_remove_lost=self._may_remove_lost)
        )
        reports = self._stall_timer.report(self._agreement, now)
        if reports:
            self._instance()
            self._set_pause()
        return [*reports]
