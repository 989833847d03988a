"""Single-decree Paxos at one node. Pure.

Invariants:
- A voter persists its vote before it sends any message that follows from it. If the vote may be lost, it never votes in
  that instance again.
- A voter rejects every ballot below its promise. A proposer that finds accepted values among a majority of promises
  proposes the value of the highest ballot. So once a majority accepted a value in one ballot, every later ballot
  proposes that value.
- The members vote; the seed votes too if their number is even, so that no partition has two equal halves. It never
  proposes, and voters ignore a ballot of the seed: that is as safe as losing its messages.
- Round 0 has one ballot, and one node owns it, so no lower ballot can have chosen a value: its owner asks for votes
  without asking for promises. It proposes one value in it, once.

Four additions serve progress only:
- If a majority of the promises carries no accepted value, the proposer ignores the others. So a value that one voter
  accepted does not block all others.
- The proposer votes last, when its vote completes the majority. So a second node has checked every accepted value.
- A voter checks a value before it first accepts it. The proposer marks a value it was bound to as inherited, so that
  the check may yield.
- A proposer asks the voters in reserve only if the others have not answered when it repeats its messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from nexar.cluster.decisions.membership_events import MembershipMessage, SendMessage
from nexar.cluster.membership import Membership
from nexar.types import NodeId
from nexar.wire.control import Accept, Accepted, BallotNumber, Chosen, Instance, Prepare, Promise, Rejected

if TYPE_CHECKING:
    from random import Random


class Vote(msgspec.Struct, frozen=True, omit_defaults=True):
    """One voter's state in one instance."""

    instance: Instance
    promised: BallotNumber | None = None  # Lower ballots are rejected.
    accepted: BallotNumber | None = None  # The highest ballot in which this voter accepted a value.
    value: bytes = b""  # The value accepted in that ballot.

    def allows(self, ballot: BallotNumber) -> bool:
        return self.promised is None or ballot >= self.promised

    def promising(self, ballot: BallotNumber) -> Vote:
        return Vote(self.instance, ballot, self.accepted, self.value)

    def accepting(self, ballot: BallotNumber, value: bytes) -> Vote:
        return Vote(self.instance, ballot, ballot, value)

    def encode(self) -> bytes:
        return _encoder.encode(self)

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> Vote:
        """Raises ValueError."""
        try:
            return _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not a vote: {error}") from None


class VoteAnswer(Enum):
    """A voter's answer to a proposed value."""

    OK = "ok"
    LATER = "later"  # a probe must finish first: no answer now
    NO = "no"


@dataclass(frozen=True, slots=True)
class VoteDecision:
    """An answer with its reason."""

    answer: VoteAnswer
    reachable: tuple[NodeId, ...] = ()  # Nodes that the value removes although this voter reaches them.


OK: Final = VoteDecision(VoteAnswer.OK)
LATER: Final = VoteDecision(VoteAnswer.LATER)


def accept_any(_: Accept) -> VoteDecision:
    """Accepts every value."""
    return OK


_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_decoder: Final = msgspec.msgpack.Decoder(Vote)

_NO_BALLOT = BallotNumber(-1, 0)  # below every ballot


@dataclass(slots=True)
class Ballot:
    """One attempt to have a value chosen. Without a `value` it collects promises, then votes."""

    # Recording one answer costs O(1); `binding` and `unanswered` cost O(voters).
    number: BallotNumber
    again: float  # when unanswered messages are repeated
    interval: float
    value: bytes | None = None  # what the voters are asked to accept in the second phase
    inherited: bool = False  # the value was found in promises: the proposer had no choice
    settle: float | None = None  # until when the proposer waits for promises that carry no accepted value
    promises: dict[NodeId, tuple[BallotNumber, bytes]] = field(default_factory=dict)
    accepted: set[NodeId] = field(default_factory=set)
    # voters that reject the value, with the nodes they reach
    rejected: dict[NodeId, tuple[NodeId, ...]] = field(default_factory=dict)
    _bound: int = 0  # promises that carry an accepted value

    def promised(self, voter: NodeId, accepted: BallotNumber | None, value: bytes) -> None:
        if self.value is None and voter not in self.promises:
            self.promises[voter] = (_NO_BALLOT if accepted is None else accepted, value)
            self._bound += accepted is not None

    def is_free(self, needed: int) -> bool:
        """Whether `needed` voters promised that had accepted nothing."""
        return len(self.promises) - self._bound >= needed

    def binding(self, needed: int) -> bytes | None:
        """The value of the highest ballot promised, which must be proposed; None if a majority of promises carries
        none.
        """
        return None if self.is_free(needed) else max(self.promises.values())[1]

    def ask(self, value: bytes, *, inherited: bool, again: float, interval: float) -> None:
        self.value, self.inherited, self.settle = value, inherited, None
        self.again, self.interval = again, interval

    def agreed(self, voter: NodeId) -> None:
        if self.value is not None:
            self.accepted.add(voter)
            self.rejected.pop(voter, None)

    def refused(self, voter: NodeId, reachable: tuple[NodeId, ...]) -> None:
        if self.value is not None and voter not in self.accepted:
            self.rejected[voter] = reachable

    def reached(self) -> set[NodeId]:
        return {node for reachable in self.rejected.values() for node in reachable}

    def unanswered(self, voters: Collection[NodeId]) -> list[NodeId]:
        """Includes voters that rejected: their answer may change."""
        done: Collection[NodeId] = self.promises if self.value is None else self.accepted
        return [voter for voter in voters if voter not in done]


def majority(voters: Collection[NodeId]) -> int:
    """More than half."""
    return len(voters) // 2 + 1


class Electorate(Collection[NodeId]):
    """Members by rank, then the seed if it votes. Builds no set: memberships are large."""

    __slots__ = ("_members", "_size", "needed", "seed_voter")

    def __init__(self, membership: Membership) -> None:
        self._members = membership
        seed = membership.seed
        # the seed, if it votes
        self.seed_voter: NodeId | None = None if seed is None or membership.size % 2 else seed.node
        self._size = membership.size + (self.seed_voter is not None)
        self.needed: Final = majority(self)

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and (self._members.rank_of(node) is not None or node == self.seed_voter)

    def __iter__(self) -> Iterator[NodeId]:
        for member in self._members.members:
            yield member.node
        if self.seed_voter is not None:
            yield self.seed_voter

    def __len__(self) -> int:
        return self._size


AcceptCheck: TypeAlias = Callable[[Accept], VoteDecision]

# the largest that a message can carry; proposers that only outbid each other never get there
_HIGHEST_ROUND: Final = 2**64 - 1
# A ballot more than this many rounds above the highest seen was not reached by outbidding. Promising it would leave no
# room for other proposers; ignoring it is as safe as losing it.
_MAX_ROUND_GAP: Final = 2**32
LONGEST_PAUSE: Final = 0.5  # Default for the longest pause between repetitions, in seconds.
_RETRY_INTERVAL: Final = 0.1  # seconds until unanswered messages are repeated; doubles
_SETTLE_TIME: Final = 0.03  # seconds to wait for unbound promises once a majority has promised
_MAX_FAILURES: Final = 16  # the count stops here: pauses have reached their maximum by then
_OUTBID_PAUSE: Final = 0.02  # seconds; upper bound of the random pause after a higher ballot; doubles


class Agreement:
    """One instance at one node: proposer, and acceptor if it votes."""

    def __init__(
        self,
        instance: Instance,
        me: NodeId,
        voters: Collection[NodeId],
        *,
        random: Random | None = None,
        vote: Vote | None = None,
        may_vote: bool = True,
        learners: Collection[NodeId] = (),
        ignored_proposer: NodeId | None = None,
        owns_round_0: bool = False,
    ) -> None:
        """`random`: None if this node never proposes. `vote`: the persisted one. `may_vote`: False if it may be lost.
        `learners` only learn the chosen value. `ignored_proposer`: a voter whose ballots are ignored, so that it cannot
        have a value chosen. `owns_round_0`: at most one voter, the same at all nodes, and only if its state in this
        instance cannot be lost while it lives.
        """
        self.instance = instance
        self.voters = voters
        self.needed = majority(voters)
        self.chosen: bytes | None = None  # never changes once set
        # Where it must outlive the process, persist it before sending the messages returned with it.
        self.vote = vote or Vote(instance)
        self.longest_pause = LONGEST_PAUSE  # seconds between repetitions
        self._me = me
        self._votes = may_vote and me in voters
        self._random = random
        self._learners = learners
        self._ignored_proposer = ignored_proposer
        self._value: bytes | None = None
        self._reserve: Collection[NodeId] = ()
        self._ballot: Ballot | None = None
        self._resume: float | None = None  # when the next ballot begins after a failed one
        self._failures = 0
        self._has_round_0 = owns_round_0  # and has not used it
        self._round = max((number.round for number in (self.vote.promised,) if number), default=0)
        self._unchecked: tuple[NodeId, Accept] | None = None  # the highest ballot that waits for its check

    @property
    def proposing(self) -> bool:
        """Includes the pause before the next ballot."""
        return self.chosen is None and (self._ballot is not None or self._resume is not None)

    @property
    def ballot(self) -> Ballot | None:
        return self._ballot

    def missing(self) -> list[NodeId]:
        return [] if self._ballot is None else self._ballot.unanswered(self.voters)

    # ------------------------------------------------------------ proposer

    def propose(self, value: bytes, now: float, reserve: Collection[NodeId] = ()) -> list[SendMessage]:
        """Idempotent. A later value replaces one that no ballot has proposed yet. `reserve`: voters that are asked only
        if the others are late.
        """
        if self.chosen is not None:
            return []
        self._value, self._reserve = value, reserve
        if self._ballot is not None or (self._resume is not None and now < self._resume):
            return []
        return self._begin(now)

    def withdraw(self) -> None:
        """Stop proposing. A value accepted so far may still be chosen."""
        self._value = self._ballot = self._resume = None

    def retry_after(self, now: float, pause: float) -> None:
        self._ballot, self._resume = None, now + pause

    def due(self, now: float) -> float | None:
        if self.chosen is not None:
            return None
        moments = [self._resume] if self._ballot is None else [self._ballot.again, self._ballot.settle]
        known = [moment for moment in moments if moment is not None]
        return max(now, min(known)) if known else None

    def tick(self, now: float) -> list[SendMessage]:
        if self.chosen is not None:
            return []
        ballot = self._ballot
        if ballot is None:
            return self._begin(now) if self._resume is not None and now >= self._resume else []
        if ballot.settle is not None and now >= ballot.settle:
            return self._ask_accept(ballot, now)
        return self._repeat(ballot, now) if now >= ballot.again else []

    def _begin(self, now: float) -> list[SendMessage]:
        self._resume = None
        if self._value is None:
            return []
        if self._round >= _HIGHEST_ROUND:  # Only a faulty peer causes this; others may still learn what was chosen.
            self.retry_after(now, self.longest_pause)
            return []
        if self._has_round_0 and self.vote.promised is None:
            return self._begin_round_0(now)
        self._round += 1
        retry = min(_RETRY_INTERVAL * 2**self._failures, self.longest_pause)
        ballot = self._ballot = Ballot(BallotNumber(self._round, self._me), again=now + retry, interval=retry)
        if self._votes:
            ballot.promised(self._me, self.vote.accepted, self.vote.value)
            self.vote = self.vote.promising(ballot.number)
        messages = self._to_first(Prepare(self.instance, ballot.number), ballot)
        return messages + self._count_promises(ballot, now)

    def _begin_round_0(self, now: float) -> list[SendMessage]:
        # No ballot is lower, so no value binds this one.
        assert self._value is not None
        self._has_round_0 = False
        ballot = self._ballot = Ballot(BallotNumber(0, self._me), again=0.0, interval=0.0)
        self.vote = self.vote.promising(ballot.number)
        ballot.ask(self._value, inherited=False, again=now + _RETRY_INTERVAL, interval=_RETRY_INTERVAL)
        return self._to_first(self._accept(ballot), ballot) + self._count_votes(ballot)

    def _repeat(self, ballot: Ballot, now: float) -> list[SendMessage]:
        if self._votes and self.vote.promised is not None and self.vote.promised != ballot.number:
            self._outbid(self.vote.promised, now)  # this node promised a higher ballot and cannot vote for its own
            return []
        ballot.interval = min(2 * ballot.interval, self.longest_pause)
        ballot.again = now + ballot.interval
        message: MembershipMessage = (
            Prepare(self.instance, ballot.number) if ballot.value is None else self._accept(ballot)
        )
        return [SendMessage(voter, message) for voter in ballot.unanswered(self.voters) if voter != self._me]

    def _count_promises(self, ballot: Ballot, now: float) -> list[SendMessage]:
        if ballot.value is not None or len(ballot.promises) < self.needed:
            return []
        bound = not ballot.is_free(self.needed)
        if bound and len(ballot.promises) < len(self.voters):
            ballot.settle = ballot.settle or now + _SETTLE_TIME
            return []
        return self._ask_accept(ballot, now)

    def _ask_accept(self, ballot: Ballot, now: float) -> list[SendMessage]:
        # Begin the second phase, with our value unless an accepted one binds us.
        found = ballot.binding(self.needed)
        value = self._value if found is None else found
        if value is None:
            self.withdraw()
            return []
        ballot.ask(value, inherited=found is not None, again=now + _RETRY_INTERVAL, interval=_RETRY_INTERVAL)
        return self._to_first(self._accept(ballot), ballot) + self._count_votes(ballot)

    def _accept(self, ballot: Ballot) -> Accept:
        return Accept(self.instance, ballot.number, ballot.value or b"", ballot.inherited)

    def _count_votes(self, ballot: Ballot) -> list[SendMessage]:
        if ballot.value is None:
            return []
        may_add = self._votes and self.vote.promised == ballot.number
        if len(ballot.accepted) + may_add < self.needed:
            return []
        if len(ballot.accepted) < self.needed:
            self.vote = self.vote.accepting(ballot.number, ballot.value)
        chosen = Chosen(self.instance, ballot.value)
        self._learn(ballot.value)
        return [*self._to_others(chosen), *(SendMessage(learner, chosen) for learner in self._learners)]

    def _to_first(self, message: MembershipMessage, ballot: Ballot) -> list[SendMessage]:
        # Not to voters in reserve, unless they have answered in this ballot.
        unasked = {voter for voter in self._reserve if voter not in ballot.promises}
        return [send for send in self._to_others(message) if send.node not in unasked]

    def _to_others(self, message: MembershipMessage) -> list[SendMessage]:
        return [SendMessage(voter, message) for voter in self.voters if voter != self._me]

    # ------------------------------------------------------------ messages

    def receive(
        self, sender: NodeId, message: MembershipMessage, now: float, check: AcceptCheck = accept_any
    ) -> list[SendMessage]:
        """`check` is called before this node accepts a value. After LATER the proposer is answered by `recheck`."""
        if isinstance(message, Chosen):
            # a later Chosen with another value comes from a faulty peer and changes nothing here
            if self.chosen is None:
                self._learn(message.value)
            return []
        if isinstance(message, Prepare | Accept):
            return self._handle_request(sender, message, check)
        if isinstance(message, Promise | Accepted | Rejected):
            return self._handle_reply(sender, message, now)
        return []

    def recheck(self, check: AcceptCheck) -> list[SendMessage]:
        """Repeat the check that returned LATER."""
        if self._unchecked is None or self.chosen is not None:
            return []
        sender, accept = self._unchecked
        self._unchecked = None
        return self._handle_request(sender, accept, check)

    def _learn(self, value: bytes) -> None:
        self.chosen = value
        self._value = self._ballot = self._resume = self._unchecked = None

    def _handle_request(self, sender: NodeId, message: Prepare | Accept, check: AcceptCheck) -> list[SendMessage]:
        if self.chosen is not None:
            return [SendMessage(sender, Chosen(self.instance, self.chosen))]
        if not self._votes or not self._answers_ballots_of(sender) or message.ballot.node != sender:
            return []
        if message.ballot.round > self._round + _MAX_ROUND_GAP:
            return []
        self._round = max(self._round, message.ballot.round)
        if not self.vote.allows(message.ballot):
            return [SendMessage(sender, Rejected(self.instance, message.ballot, self.vote.promised))]
        if isinstance(message, Prepare):
            self.vote = self.vote.promising(message.ballot)
            return [SendMessage(sender, Promise(self.instance, message.ballot, self.vote.accepted, self.vote.value))]
        return self._check_value(sender, message, check)

    def _answers_ballots_of(self, node: NodeId) -> bool:
        """The voter's side of who may propose: a ballot without answers fails."""
        return node in self.voters and node != self._ignored_proposer

    def _check_value(self, sender: NodeId, message: Accept, check: AcceptCheck) -> list[SendMessage]:
        # A value accepted before was checked then, and accepting it again is always safe.
        known = self.vote.accepted is not None and self.vote.value == message.value
        decision = None if known else check(message)
        if decision is None or decision.answer is VoteAnswer.OK:
            self.vote = self.vote.accepting(message.ballot, message.value)
            return [SendMessage(sender, Accepted(self.instance, message.ballot))]
        if decision.answer is VoteAnswer.LATER:
            if self._unchecked is None or self._unchecked[1].ballot <= message.ballot:
                self._unchecked = (sender, message)
            return []
        return [SendMessage(sender, Rejected(self.instance, message.ballot, None, decision.reachable))]

    def _handle_reply(self, sender: NodeId, message: Promise | Accepted | Rejected, now: float) -> list[SendMessage]:
        ballot = self._ballot
        if ballot is None or message.ballot != ballot.number or sender not in self.voters:
            return []
        if isinstance(message, Promise):
            ballot.promised(sender, message.accepted, message.value)
            return self._count_promises(ballot, now)
        if isinstance(message, Accepted):
            ballot.agreed(sender)
            return self._count_votes(ballot)
        if message.promised is not None:
            self._outbid(message.promised, now)
        else:
            ballot.refused(sender, message.reachable)
        return []

    def _outbid(self, promised: BallotNumber, now: float) -> None:
        # Pause for a random, growing time, or two proposers would outbid each other for ever.
        if promised.round <= self._round + _MAX_ROUND_GAP:
            self._round = max(self._round, promised.round)
        self._failures = min(self._failures + 1, _MAX_FAILURES)
        longest = min(_OUTBID_PAUSE * 2**self._failures, self.longest_pause)
        self.retry_after(now, longest * (1.0 if self._random is None else self._random.random()))
