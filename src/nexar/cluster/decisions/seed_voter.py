"""The seed as a voter on memberships. Pure.

The seed never proposes. It votes if the number of members is even. It checks changes as a member does (`ChangeVoter`)
and suspects no node without a probe. It forwards every chosen change: it may reach members that the proposer does not.

The seed probes a member over its session. A member whose session broke counts as gone. A member that has not yet
returned to a restarted seed has as long as an answer may take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from nexar.cluster.decisions.admission_checks import JoinConnectionState
from nexar.cluster.decisions.admission_events import NotifyConnections, PersistVote
from nexar.cluster.decisions.membership_events import (
    Loss,
    LossKind,
    MembershipAction,
    MembershipDecided,
    MembershipInput,
    MembershipMessage,
    MessageReceived,
    ProbeFinished,
    SendMessage,
    StartProbe,
    Tick,
)
from nexar.cluster.decisions.membership_machine import DecidedChanges
from nexar.cluster.decisions.paxos import Agreement, Electorate, Vote, VoteDecision
from nexar.cluster.decisions.proposal import ChangeVoter, read_change
from nexar.cluster.decisions.suspicion import ProbeResults
from nexar.cluster.membership import Change, Membership
from nexar.errors import InternalError
from nexar.types import NodeId, format_seconds
from nexar.wire import join
from nexar.wire.control import MAX_MESSAGE_BYTES, Accept, Chosen, Suspect, encode
from nexar.wire.join import MAX_PAXOS_BYTES, LivenessQuery


class SeedVoter:
    """Acceptor and learner. Persist `vote` before performing the actions of a step."""

    def __init__(
        self,
        membership: Membership,
        *,
        vote: Vote | None = None,
        may_vote: bool = True,
        probe_timeout: float = 1.0,
    ) -> None:
        """A `vote` of another epoch is ignored. `may_vote`: False if a restarted seed may have lost its vote."""
        if membership.seed is None:
            raise InternalError("a membership without a seed has no seed voter")
        self.me: NodeId = membership.seed.node
        self.admitted: frozenset[NodeId] = frozenset()  # nodes that may join; set by admission
        self._may_vote = may_vote
        self._decided = DecidedChanges()
        self._probe_results = ProbeResults(probe_timeout)
        self._enter(membership, vote)

    def _enter(self, membership: Membership, vote: Vote | None = None) -> None:
        self.membership = membership  # the newest known
        instance = (0, membership.epoch, 0)
        kept = vote if vote is not None and vote.instance == instance else None
        self._agreement = Agreement(instance, self.me, Electorate(membership), vote=kept, may_vote=self._may_vote)
        self._change_voter = ChangeVoter(
            self.me,
            membership,
            self._probe_results,
            is_gone=lambda _: False,
            is_expected=lambda joiner: joiner.node in self.admitted,
        )
        self._probe_results.clear()

    @property
    def vote(self) -> Vote:
        return self._agreement.vote

    def due(self, now: float) -> float | None:
        """None: proposers repeat their messages."""
        return None

    def step(self, event: MembershipInput, now: float) -> list[MembershipAction]:
        actions: list[MembershipAction] = []
        match event:
            case MessageReceived(sender, message):
                actions += self._handle_message(sender, message, now)
            case ProbeFinished(node, loss):
                self._probe_results.record(node, now, reached=loss is None)
                actions += self._agreement.recheck(lambda accept: self._check(accept, now))
        while self._agreement.chosen is not None:
            actions += self._adopt(self._agreement.chosen, now)
        return [*actions, *self._probe_results.drain()]

    def _check(self, accept: Accept, now: float) -> VoteDecision:
        return self._change_voter.check(accept, now)

    def _handle_message(self, sender: NodeId, message: MembershipMessage, now: float) -> list[MembershipAction]:
        if isinstance(message, Suspect):
            return [*self._decided.messages_for(sender, message.epoch)]
        answer = self._decided.answer(self.me, sender, message, self.membership.epoch)
        if answer is not None:
            return [*answer]
        if isinstance(message, Chosen) and read_change(message.value, self.membership) is None:
            return []
        return [*self._agreement.receive(sender, message, now, lambda accept: self._check(accept, now))]

    def _adopt(self, value: bytes, now: float) -> list[MembershipAction]:
        before, change = self.membership, Change.decode(value)
        self._decided.add(before.epoch, value)
        self._enter(change.apply(before))
        chosen = Chosen((0, before.epoch, 0), value)
        ahead = self._decided.take(change.epoch)
        if ahead is not None and read_change(ahead, self.membership) is not None:
            self._agreement.receive(self.me, Chosen((0, change.epoch, 0), ahead), now)
        return [MembershipDecided(change), *(SendMessage(member.node, chosen) for member in before.members)]


_NO_SESSION: Final = Loss(LossKind.SEED_CONNECTION_BROKEN, "it has no connection to the seed")
PROBE_TIMEOUT: Final = 1.0  # seconds for a member to answer a liveness query

# Perform in order. A Change was chosen: the membership moves on.
VoteAction: TypeAlias = PersistVote | NotifyConnections | Change


@dataclass(frozen=True, slots=True)
class _SeedProbe:
    number: int
    deadline: float


class SeedVoteService:
    """The seed's voter on the members' sessions."""

    def __init__(
        self,
        seed_voter: SeedVoter,
        sessions: Mapping[NodeId, JoinConnectionState],
        is_awaited: Callable[[NodeId], bool],
    ) -> None:
        """`is_awaited`: the member may still return to a restarted seed."""
        self._seed_voter = seed_voter
        self._sessions = sessions
        self._is_awaited = is_awaited
        self._persisted = seed_voter.vote
        self._probes: dict[NodeId, _SeedProbe] = {}
        self._number = 0

    def message_received(self, sender: NodeId, message: MembershipMessage, now: float) -> list[VoteAction]:
        return self._step([MessageReceived(sender, message)], now)

    def answered(self, node: NodeId, number: int, now: float) -> list[VoteAction]:
        probe = self._probes.get(node)
        return self._settle(node, None, now) if probe is not None and probe.number == number else []

    def lost(self, node: NodeId, loss: Loss, now: float) -> list[VoteAction]:
        return self._settle(node, loss, now) if node in self._probes else []

    def returned(self, node: NodeId) -> list[VoteAction]:
        """A pending query is repeated on the new session."""
        return [self._ask(node, self._probes[node].number)] if node in self._probes else []

    def tick(self, now: float) -> list[VoteAction]:
        expired = [node for node, probe in self._probes.items() if probe.deadline <= now]
        silence = Loss(LossKind.NO_ANSWER, f"it did not answer the seed within {format_seconds(PROBE_TIMEOUT)}")
        settled = [action for node in expired for action in self._settle(node, silence, now)]
        return settled + self._step([Tick()], now)

    def due(self, now: float) -> float | None:
        times = [probe.deadline for probe in self._probes.values()]
        seed_voter = self._seed_voter.due(now)
        return min(times if seed_voter is None else [*times, seed_voter], default=None)

    def _settle(self, node: NodeId, loss: Loss | None, now: float) -> list[VoteAction]:
        del self._probes[node]
        return self._step([ProbeFinished(node, loss)], now)

    def _step(self, events: list[MembershipInput], now: float) -> list[VoteAction]:
        done: list[VoteAction] = []
        while events:
            actions = self._seed_voter.step(events.pop(0), now)
            vote = self._seed_voter.vote
            if vote.promised is not None and vote != self._persisted:
                done.append(PersistVote(vote))
            self._persisted = vote
            for action in actions:
                if isinstance(action, StartProbe):
                    self._probe(action.node, now, events, done)
                elif isinstance(action, MembershipDecided):
                    done.append(action.change)
            done += self._notifications(action for action in actions if isinstance(action, SendMessage))
        return done

    def _probe(self, node: NodeId, now: float, events: list[MembershipInput], done: list[VoteAction]) -> None:
        if node in self._probes:
            return
        if node not in self._sessions and not self._is_awaited(node):
            events.append(ProbeFinished(node, _NO_SESSION))
            return
        self._number += 1
        self._probes[node] = _SeedProbe(self._number, now + PROBE_TIMEOUT)
        if node in self._sessions:
            done.append(self._ask(node, self._number))

    def _ask(self, node: NodeId, number: int) -> NotifyConnections:
        return NotifyConnections(LivenessQuery(number), (self._sessions[node].connection,))

    def _notifications(self, messages: Iterable[SendMessage]) -> list[VoteAction]:
        # Combine equal messages into one for all receivers. Members without a session get it from the others.
        listeners: dict[int, tuple[MembershipMessage, list[int]]] = {}
        for send in messages:
            if send.node in self._sessions:
                _, connections = listeners.setdefault(id(send.message), (send.message, []))
                connections.append(self._sessions[send.node].connection)
        return [note for message, to in listeners.values() if (note := _notification(message, to)) is not None]


def _notification(message: MembershipMessage, connections: list[int]) -> NotifyConnections | None:
    # None for a message too long for this connection: members exchange it among themselves.
    body = encode(message)
    return (
        NotifyConnections(join.SeedPaxosMessage(body), tuple(connections))
        if len(body) <= min(MAX_PAXOS_BYTES, MAX_MESSAGE_BYTES)
        else None
    )
