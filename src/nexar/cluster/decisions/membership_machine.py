"""What was chosen: the changes behind this node, for those who are behind it, and those that came too early. Pure.

One node's mind about who comes next. Pure: events in, what to do out.

    Lost, Suspect + Probe ─→ suspected ─┐
    Found(severed) ─────────→ severed ──┼─→ draft ─ my turn ─→ Agreement(0, epoch, 0) ─ chosen ─→ Adopt | Expel
    Wanted, Resign ─────────→ wished ───┘         others' ballots ─ judged ─┘

Laws:
- Nobody goes on to an epoch that was not chosen by a majority of the voters of the one before.
- Nobody is removed on the word of one other node: each voter looks for itself (`judging`). A suspicion is a reason to
  propose, never more.
- Two that only cannot reach each other: their removals fail, the others reach both. Then the higher rank resigns, so
  that the rest has an undisturbed world again.
- After a change everything begins anew, but for suspicions of those who are still there, connections that broke, and
  what was agreed on the world's communicator if that goes on.
- Who has closed is removed soon, and quietly: votes move on without it, and whatever comes of that presses nobody.
- Everything may be told twice. Whoever is behind is told what was chosen.
- A node that runs slowly gives the others more time: all its deadlines extend by its own delay (`Delayed`).
- An event costs the same however large the world is, but for proposing, and for what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from nexar.cluster.decisions.membership_events import (
    ChangeRequested,
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
from nexar.cluster.decisions.paxos import LONGEST_PAUSE, Agreement, Electorate, RandomSource, VoteDecision
from nexar.cluster.decisions.proposal import ChangeVoter, DisputeResolver, PendingChanges, ProposalTurn, read_change
from nexar.cluster.decisions.suspicion import ProbeResults, StallTimer, SuspicionBroadcast, Suspicions
from nexar.cluster.membership import Change, Membership
from nexar.errors import InternalError
from nexar.types import NodeId, Rank
from nexar.wire.control import Accept, Accepted, BallotNumber, Chosen, Prepare, Promise, Rejected, Suspect

PaxosMessage: TypeAlias = Prepare | Promise | Accept | Accepted | Rejected | Chosen
"""A word of a ballot."""

KEPT: Final = 1024
"""Changes. Who is further behind than that is told nothing; it cannot be a member any more."""
_AHEAD: Final = 64
_TOLD: Final = 16  # changes in one answer


class DecidedChanges:
    """By the epoch that each change was made in."""

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self._chosen: dict[int, bytes] = {}  # in order of epoch
        self._ahead: dict[int, bytes] = {}

    def add(self, epoch: int, value: bytes) -> None:
        """This was chosen to follow `epoch`."""
        self._chosen[epoch] = value
        if len(self._chosen) > KEPT:
            del self._chosen[next(iter(self._chosen))]

    def tell(self, node: NodeId, epoch: int) -> list[SendMessage]:
        """Bring a node that is in `epoch` nearer; nothing if what followed is not known: the rest would not help it."""
        if epoch not in self._chosen:
            return []
        near = range(epoch, epoch + _TOLD)
        return [SendMessage(node, Chosen((0, each, 0), self._chosen[each])) for each in near if each in self._chosen]

    def since(self, epoch: int) -> list[bytes]:
        """All that brings who is in `epoch` here, in order; nothing if one of them is not known any more."""
        if epoch not in self._chosen:
            return []
        return [value for made_in, value in self._chosen.items() if made_in >= epoch]

    def keep_for_later(self, epoch: int, value: bytes) -> bool:
        """Chosen after an epoch that this node has not reached. Kept if it is near: the others come again. Whether that
        is news: only then it is worth a question, or each answer would bring as many questions as it has words.
        """
        is_new = epoch not in self._ahead
        self._ahead[epoch] = value
        if len(self._ahead) > _AHEAD:
            del self._ahead[max(self._ahead)]
        return is_new

    def take(self, epoch: int) -> bytes | None:
        """What was kept for this epoch, now that it is reached."""
        return self._ahead.pop(epoch, None)

    def answer(self, me: NodeId, sender: NodeId, message: PaxosMessage, epoch: int) -> list[SendMessage] | None:
        """What `me`, who is in `epoch`, says to a word that is not about what follows it: who is behind is told what
        was chosen, who is ahead is asked, other agreements are nobody's business here. None: it is about that.
        """
        communicator, about, sequence = message.instance
        if communicator or sequence:
            return []
        if about < epoch:
            return self.tell(sender, about) if isinstance(message, Prepare | Accept) else []
        if about == epoch:
            return None
        if isinstance(message, Chosen) and not self.keep_for_later(about, message.value):
            return []
        return [request_changes(me, sender, epoch)]


def request_changes(me: NodeId, node: NodeId, epoch: int) -> SendMessage:
    """Have a node that is ahead tell what followed `epoch`: who knows what was chosen answers a ballot with it. No
    proposer has round 0, so it stands in nobody's way.
    """
    return SendMessage(node, Prepare((0, epoch, 0), BallotNumber(0, me)))


_STALLED_PAUSE: Final = 5.0


class MembershipMachine:
    """Told of everything by `step`, and of nothing else. Who makes one calls `step(Tick())` when it is `due`."""

    def __init__(
        self,
        me: NodeId,
        membership: Membership,
        *,
        recovery_timeout: float,
        probe_timeout: float = 1.0,
        longest_probe: float | None = None,
        active: bool = True,
        random: RandomSource,
        apply: Callable[[Change, Membership], Membership] = Change.apply,
    ) -> None:
        """`me` is a member. `active`: it proposes by itself to remove who is lost; else only after Recover, and always
        what was wanted. `probe_timeout`: after which a probe usually has a result; `longest_probe`: always, by default
        the same. `apply`: for who has many machines in one process and remembers what they have in common.
        """
        self.me = me
        self.expelled = False
        """What was chosen last does not contain this node. It then answers who is behind, and nothing else."""
        self._active = active
        self._recovery_timeout = recovery_timeout
        self._probe_timeout = probe_timeout
        self._longest_probe = probe_timeout if longest_probe is None else longest_probe
        self._own_delay = 0.0
        self._random = random
        self._apply = apply
        self._decided = DecidedChanges()
        self._probe_results = ProbeResults(self._longest_probe, self._delay)
        self._world_since = membership.epoch  # the epoch of the last change that ended the world's communicator
        self._enter(membership, Suspicions(me, membership), PendingChanges(me, membership))

    def _enter(self, membership: Membership, suspicions: Suspicions, wishes: PendingChanges) -> None:
        """The state of one epoch, as it begins."""
        rank = membership.rank_of(self.me)
        if rank is None:
            raise InternalError("a node cannot decide about a membership that it is not in")
        self.membership = membership
        """Of the epoch that this node is in."""
        self._rank: Rank = rank
        self._electorate = Electorate(membership)
        self._suspicions = suspicions
        self._pending_changes = wishes
        self._agreement: Agreement | None = None
        self._change_voter = ChangeVoter(
            self.me,
            membership,
            self._probe_results,
            is_gone=self._is_gone,
            is_welcome=self._pending_changes.expects,
            own_delay=self._delay,
        )
        self._proposal_turn = ProposalTurn(rank, membership, suspicions, wishes, self._delay)
        self._draft: Change | None = None
        self._draft_is_old = True
        self._recovering = False
        self._dispute_resolver = DisputeResolver(
            rank,
            membership,
            suspicions,
            wishes,
            self._probe_results,
            probe_timeout=self._probe_timeout,
            longest_probe=self._longest_probe,
            own_delay=self._delay,
        )
        self._broadcast = SuspicionBroadcast(self.me, membership, suspicions)
        self._stall_timer = StallTimer(
            self.me,
            self._electorate,
            suspicions,
            recovery_timeout=self._recovery_timeout,
            probe_timeout=self._probe_timeout,
            own_delay=self._delay,
        )
        self._probe_results.forget()

    # ------------------------------------------------------------ what others ask

    def suspects(self) -> Mapping[NodeId, str]:
        """Whom this node cannot reach, with the cause."""
        return {node: each.cause for node, each in self._suspicions.items()}

    def missing(self) -> list[NodeId]:
        """Whose votes are needed and have not come, and whom this node cannot reach."""
        asked = [] if self._agreement is None else self._agreement.missing()
        return sorted({*asked, *self._suspicions})

    def changes_since(self, epoch: int) -> list[bytes]:
        """What was chosen since: brings who is in `epoch` here, if it is not too far behind."""
        return self._decided.since(epoch)

    def due(self, now: float) -> float | None:
        """When the next Tick is needed, not before `now`; None: not before another event."""
        if self.expelled:
            return None
        agreement = self._agreement
        proposing = agreement is not None and agreement.proposing
        moments = [
            agreement.due(now) if agreement is not None else None,
            None if proposing else self._turn(),
            self._suspicions.disputed_until,
            self._broadcast.again,
            self._stall_timer.due,
        ]
        known = [moment for moment in moments if moment is not None]
        return max(now, min(known)) if known else None

    # ------------------------------------------------------------ events

    def step(self, event: MembershipInput, now: float) -> list[MembershipAction]:
        """Take note of an event; what to do about it, in this order. The only method that changes anything."""
        return self._told_late(event) if self.expelled else self._told(event, now)

    def _told(self, event: MembershipInput, now: float) -> list[MembershipAction]:
        actions = self._take(event, now)
        actions += self._go_on(now)
        if self.expelled:
            return actions
        actions += self._broadcast.tell(now, insist=self._acting)
        actions += self._stall(now)
        return [*actions, *self._probe_results.drain()]

    def _take(self, event: MembershipInput, now: float) -> list[MembershipAction]:  # noqa: PLR0911 - one line for each event
        match event:
            case MessageReceived(sender, message):
                return self._heard(sender, message, now)
            case PeerLossFound(node, cause, willing):
                return self._suspect(node, cause, now, willing=willing)
            case PeerReachable(node, severed):
                return self._found(node, now, severed=severed)
            case ProbeFinished(node, cause):
                return self._probed(node, cause, now)
            case ChangeRequested():
                return self._want(event, now)
            case ResignRequested(cause):
                self._pending_changes.resign(cause)
                return self._changed()
            case RecoverNow():
                self._recovering = True
                self._suspicions.hurry(now)
                return self._changed()
            case OwnDelayChanged(seconds):
                self._own_delay = seconds
                self._set_rhythm()
                return []
            case Tick():
                return self._tick(now)

    def _delay(self) -> float:
        return self._own_delay

    def _set_rhythm(self) -> None:
        """Where answers take long, words are repeated rarely. After a stall the network may heal: go on asking."""
        if self._agreement is not None:
            longest = _STALLED_PAUSE if self._stall_timer.told else LONGEST_PAUSE
            self._agreement.longest_pause = longest + self._own_delay

    def _changed(self) -> list[MembershipAction]:
        self._draft_is_old = True
        return []

    def _tick(self, now: float) -> list[MembershipAction]:
        if self._suspicions.wake(now):
            self._changed()
        said = self._propose(now)  # before a pause ends with what was wanted when it began
        return said if self._agreement is None else [*said, *self._agreement.tick(now)]

    def _want(self, wanted: ChangeRequested, now: float) -> list[MembershipAction]:
        oldest = self.membership.epoch if wanted.renewed else self._world_since
        if wanted.epoch and not oldest <= wanted.epoch <= self.membership.epoch:
            return []
        self._pending_changes.want(wanted, now)
        self._changed()
        return self._rejudge(now)

    # ------------------------------------------------------------ suspicion

    def _is_gone(self, node: NodeId) -> bool:
        return node in self._suspicions or self._pending_changes.releases(node)

    def _suspect(
        self, node: NodeId, cause: str, now: float, *, willing: bool = False, told: bool = False
    ) -> list[MembershipAction]:
        """`told`: by others that know. They need not be told at once."""
        seed = self.membership.seed
        is_known = self.membership.rank_of(node) is not None or (seed is not None and seed.node == node)
        if node == self.me or not is_known:
            return []
        if self._suspicions.add(node, cause, now, willing=willing):
            self._changed()
            if not (willing or told):
                self._broadcast.add(node)
        return self._rejudge(now)

    def _found(self, node: NodeId, now: float, *, severed: bool) -> list[MembershipAction]:
        self._probe_results.found(node)
        self._cleared(node)
        if severed and node != self.me and self.membership.rank_of(node) is not None:
            self._pending_changes.sever(node, now)
            self._changed()
        return []

    def _cleared(self, node: NodeId) -> None:
        """No longer suspected: a ballot of ours that removes it is given up, nobody need have accepted it."""
        if not self._suspicions.drop(node):
            return
        self._changed()
        if self._pending_changes.resigned_over == node:
            self._pending_changes.stay()
        if self._agreement is not None:
            self._agreement.withdraw()

    def _probed(self, node: NodeId, cause: str | None, now: float) -> list[MembershipAction]:
        self._probe_results.told(node, now, reached=cause is None)
        if cause is not None:
            self._suspicions.looked(node)
            return self._suspect(node, cause, now, told=True)
        disputed = node in self._suspicions and self._suspicions[node].disputes
        if disputed:
            self._cleared(node)
        return self._rejudge(now)

    def _rejudge(self, now: float) -> list[MembershipAction]:
        if self._agreement is None:
            return []
        return list(self._agreement.rejudge(lambda accept: self._judge(accept, now)))

    def _judge(self, accept: Accept, now: float) -> VoteDecision:
        return self._change_voter.judge(accept, now)

    # ------------------------------------------------------------ hearing

    def _heard(self, sender: NodeId, message: MembershipMessage, now: float) -> list[MembershipAction]:
        if isinstance(message, Suspect):
            return self._hear_suspect(sender, message, now)
        answer = self._decided.answer(self.me, sender, message, self.membership.epoch)
        return self._hear_ballot(sender, message, now) if answer is None else [*answer]

    def _told_late(self, event: MembershipInput) -> list[MembershipAction]:
        """After the end: who still asks is told what was chosen."""
        match event:
            case MessageReceived(sender, Prepare((0, epoch, 0)) | Accept((0, epoch, 0)) | Suspect(epoch)):
                return [*self._decided.tell(sender, epoch)]
        return []

    def _hear_ballot(self, sender: NodeId, message: MembershipMessage, now: float) -> list[MembershipAction]:
        if not self._is_sound(message):
            return []
        if isinstance(message, Prepare | Accept):
            self._proposal_turn.heard(sender, now)
        said = list(self._instance().hear(sender, message, now, lambda accept: self._judge(accept, now)))
        if isinstance(message, Rejected) and self._dispute_resolver.look(self._instance(), now):
            self._changed()
        return [*said]

    def _is_sound(self, message: MembershipMessage) -> bool:
        """Whether a value that this node may come to adopt is a change of its membership. A voter that lies about what
        it accepted must not bind an honest proposer to a value that nobody can adopt.
        """
        match message:
            case Chosen() | Promise(accepted=BallotNumber()):
                return read_change(message.value, self.membership) is not None
        return True

    def _hear_suspect(self, sender: NodeId, message: Suspect, now: float) -> list[MembershipAction]:
        """Somebody cannot reach somebody. If it is me, look for who complains; else look for the suspect, and let it
        know of the complaint.
        """
        if message.epoch < self.membership.epoch:
            return [*self._decided.tell(sender, message.epoch)]
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
    def _acting(self) -> bool:
        return self._active or self._recovering

    def _instance(self) -> Agreement:
        if self._agreement is None:
            instance = (0, self.membership.epoch, 0)
            seed = self.membership.seed
            learners = () if seed is None or self._electorate.seed_voter else (seed.node,)
            self._agreement = Agreement(instance, self.me, self._electorate, random=self._random, learners=learners)
            self._set_rhythm()
        return self._agreement

    def _turn(self) -> float | None:
        """When this node proposes what it knows; None: it has no reason to."""
        if self._draft is None and not self._draft_is_old:
            return None
        return self._proposal_turn.mine(acting=self._acting)

    def _go_on(self, now: float) -> list[MembershipAction]:
        """Propose, if it is our turn; and enter the next epoch as often as something is chosen."""
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
        proposing = agreement is not None and agreement.proposing
        if turn is None or (now < turn and not proposing):
            if proposing and agreement is not None and turn is None:
                agreement.withdraw()
            return []
        if self._draft_is_old:
            self._draft, self._draft_is_old = self._pending_changes.draft(self._suspicions, acting=self._acting), False
        return [] if self._draft is None else list(self._instance().propose(self._draft.encode(), now))

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
            self._instance().hear(self.me, Chosen((0, after.epoch, 0), ahead), now)
        return [MembershipDecided(change)]

    # ------------------------------------------------------------ time is over

    def _stall(self, now: float) -> list[MembershipAction]:
        self._stall_timer.press(now, pressing=self._proposal_turn.is_pressing(acting=self._acting))
        stalls = self._stall_timer.stall(self._agreement, now)
        if stalls:
            self._instance()
            self._set_rhythm()
        return [*stalls]
