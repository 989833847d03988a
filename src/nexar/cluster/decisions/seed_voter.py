"""The seed's mind about who comes next. Pure.

It proposes nothing and belongs to no membership. When the members are even in number it has a vote, so that one half of
them and the seed are a majority; it judges like a member (`judging`), and suspects nobody without looking. It follows
what was chosen, and passes it on: it may reach members that the proposer does not.

The seed's seat among the voters: words of members go to the witness, and what it wants is done on their lines. Pure.

Law: a vote is on the disk before it is said. So KeepVote comes before every word that follows from it.

A member is asked on its line whether it is there. One whose line has broken is not: the system tells when a process
ends. One that has not yet come back to a seed that was started again has as long as an answer may take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from nexar.cluster.decisions.admission_checks import JoinConnectionState
from nexar.cluster.decisions.admission_events import NotifyConnections, PersistVote
from nexar.cluster.decisions.membership_events import (
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
    """Told by `step`. Law: `vote` is kept before anything that a step returns is said."""

    def __init__(
        self,
        membership: Membership,
        *,
        vote: Vote | None = None,
        may_vote: bool = True,
        probe_timeout: float = 1.0,
    ) -> None:
        """The seed of this membership. `vote`: what it kept; of another epoch it means nothing any more. `may_vote`:
        no, for a seed that was started again and may have forgotten its vote: it never votes again.
        """
        if membership.seed is None:
            raise InternalError("a membership without a seed has no witness")
        self.me: NodeId = membership.seed.node
        self.admitted: frozenset[NodeId] = frozenset()
        """Who may join: told by who lets them in."""
        self._may_vote = may_vote
        self._decided = DecidedChanges()
        self._probe_results = ProbeResults(probe_timeout)
        self._enter(membership, vote)

    def _enter(self, membership: Membership, vote: Vote | None = None) -> None:
        self.membership = membership
        """The newest that it knows."""
        instance = (0, membership.epoch, 0)
        kept = vote if vote is not None and vote.instance == instance else None
        self._agreement = Agreement(instance, self.me, Electorate(membership), vote=kept, may_vote=self._may_vote)
        self._change_voter = ChangeVoter(
            self.me,
            membership,
            self._probe_results,
            is_gone=lambda _: False,
            is_welcome=lambda one: one.node in self.admitted,
        )
        self._probe_results.forget()

    @property
    def vote(self) -> Vote:
        """What it promised and accepted in this epoch."""
        return self._agreement.vote

    def changes_since(self, epoch: int) -> list[bytes]:
        """What was chosen since: brings who is in `epoch` here, if that is known."""
        return self._decided.since(epoch)

    def due(self, now: float) -> float | None:
        """It does nothing by itself: whoever wants something asks again."""
        return None

    def step(self, event: MembershipInput, now: float) -> list[MembershipAction]:
        """Take note of an event; what to do about it, in this order. Heard and Probed mean something to it."""
        actions: list[MembershipAction] = []
        match event:
            case MessageReceived(sender, message):
                actions += self._heard(sender, message, now)
            case ProbeFinished(node, cause):
                self._probe_results.told(node, now, reached=cause is None)
                actions += self._agreement.rejudge(lambda accept: self._judge(accept, now))
        while self._agreement.chosen is not None:
            actions += self._adopt(self._agreement.chosen, now)
        return [*actions, *self._probe_results.drain()]

    def _judge(self, accept: Accept, now: float) -> VoteDecision:
        return self._change_voter.judge(accept, now)

    def _heard(self, sender: NodeId, message: MembershipMessage, now: float) -> list[MembershipAction]:
        if isinstance(message, Suspect):
            return [*self._decided.tell(sender, message.epoch)]
        answer = self._decided.answer(self.me, sender, message, self.membership.epoch)
        if answer is not None:
            return [*answer]
        if isinstance(message, Chosen) and read_change(message.value, self.membership) is None:
            return []
        return [*self._agreement.hear(sender, message, now, lambda accept: self._judge(accept, now))]

    def _adopt(self, value: bytes, now: float) -> list[MembershipAction]:
        before, change = self.membership, Change.decode(value)
        self._decided.add(before.epoch, value)
        self._enter(change.apply(before))
        chosen = Chosen((0, before.epoch, 0), value)
        ahead = self._decided.take(change.epoch)
        if ahead is not None and read_change(ahead, self.membership) is not None:
            self._agreement.hear(self.me, Chosen((0, change.epoch, 0), ahead), now)
        return [MembershipDecided(change), *(SendMessage(member.node, chosen) for member in before.members)]


PROBE_TIMEOUT: Final = 1.0
"""Seconds for a member to say that it is there."""

VoteAction: TypeAlias = PersistVote | NotifyConnections | Change
"""What to do, in this order. A Change was chosen: the membership moves on."""


@dataclass(frozen=True, slots=True)
class _SeedProbe:
    number: int
    deadline: float


class SeedVoteService:
    """`lines` are the members that are connected; what it says goes to them alone."""

    def __init__(
        self, seed_voter: SeedVoter, lines: Mapping[NodeId, JoinConnectionState], is_awaited: Callable[[NodeId], bool]
    ) -> None:
        """`is_awaited`: whether a member without a line may still come back to a seed that was started again."""
        self._seed_voter = seed_voter
        self._lines = lines
        self._is_awaited = is_awaited
        self._kept = seed_voter.vote
        self._probes: dict[NodeId, _SeedProbe] = {}
        self._number = 0

    def heard(self, sender: NodeId, message: MembershipMessage, now: float) -> list[VoteAction]:
        """A member said it."""
        return self._take([MessageReceived(sender, message)], now)

    def answered(self, node: NodeId, number: int, now: float) -> list[VoteAction]:
        """A member says that it is there. What was not asked, or long ago, is ignored."""
        probe = self._probes.get(node)
        return self._settle(node, None, now) if probe is not None and probe.number == number else []

    def lost(self, node: NodeId, cause: str, now: float) -> list[VoteAction]:
        """The line of a member has broken."""
        return self._settle(node, cause, now) if node in self._probes else []

    def returned(self, node: NodeId) -> list[VoteAction]:
        """A member is back: one that was missed is asked on its new line."""
        return [self._ask(node, self._probes[node].number)] if node in self._probes else []

    def tick(self, now: float) -> list[VoteAction]:
        """Time has passed."""
        late = [node for node, probe in self._probes.items() if probe.deadline <= now]
        cause = f"it did not answer the seed within {format_seconds(PROBE_TIMEOUT)}"
        settled = [deed for node in late for deed in self._settle(node, cause, now)]
        return settled + self._take([Tick()], now)

    def due(self, now: float) -> float | None:
        """When the next tick is needed."""
        times = [probe.deadline for probe in self._probes.values()]
        seed_voter = self._seed_voter.due(now)
        return min(times if seed_voter is None else [*times, seed_voter], default=None)

    def _settle(self, node: NodeId, cause: str | None, now: float) -> list[VoteAction]:
        del self._probes[node]
        return self._take([ProbeFinished(node, cause)], now)

    def _take(self, events: list[MembershipInput], now: float) -> list[VoteAction]:
        deeds: list[VoteAction] = []
        while events:
            actions = self._seed_voter.step(events.pop(0), now)
            vote = self._seed_voter.vote
            if vote.promised is not None and vote != self._kept:
                deeds.append(PersistVote(vote))
            self._kept = vote
            for action in actions:
                if isinstance(action, StartProbe):
                    self._probe(action.node, now, events, deeds)
                elif isinstance(action, MembershipDecided):
                    deeds.append(action.change)
            deeds += self._said(action for action in actions if isinstance(action, SendMessage))
        return deeds

    def _probe(self, node: NodeId, now: float, events: list[MembershipInput], deeds: list[VoteAction]) -> None:
        if node in self._probes:
            return
        if node not in self._lines and not self._is_awaited(node):
            events.append(ProbeFinished(node, "it has no line to the seed"))
            return
        self._number += 1
        self._probes[node] = _SeedProbe(self._number, now + PROBE_TIMEOUT)
        if node in self._lines:
            deeds.append(self._ask(node, self._number))

    def _ask(self, node: NodeId, number: int) -> NotifyConnections:
        return NotifyConnections(LivenessQuery(number), (self._lines[node].connection,))

    def _said(self, says: Iterable[SendMessage]) -> list[VoteAction]:
        """A word for many is one message for many. Who has no line hears it from the others."""
        listeners: dict[int, tuple[MembershipMessage, list[int]]] = {}
        for say in says:
            if say.node in self._lines:
                _, connections = listeners.setdefault(id(say.message), (say.message, []))
                connections.append(self._lines[say.node].connection)
        return [tell for message, to in listeners.values() if (tell := _tell(message, to)) is not None]


def _tell(message: MembershipMessage, connections: list[int]) -> NotifyConnections | None:
    """None for what is too long to be said here: members carry it among themselves."""
    body = encode(message)
    return (
        NotifyConnections(join.SeedPaxosMessage(body), tuple(connections))
        if len(body) <= min(MAX_PAXOS_BYTES, MAX_MESSAGE_BYTES)
        else None
    )
