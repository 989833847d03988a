"""What a voter has promised and accepted in one instance: all that must outlive it. Pure.

Law: a word that follows from a vote is said only after the vote is kept. A voter that forgets its vote may not vote in
that instance again.

One attempt of a proposer to have a value chosen: who has answered what. Pure.

Two phases: until `value` is set, promises are collected; then votes.

Who votes on what comes after a membership. Pure.

The members do; the seed, too, when their number is even, so that no split of them leaves two halves of equal right.
A majority of these voters decides. No set is built: a world of thousands asks its membership.

One value for one instance, chosen by a majority of its voters: single-decree Paxos, at one node. Pure.

Safety is Paxos and nothing else: a voter answers no ballot below its promise, and a proposer that finds accepted values
among a majority of promises proposes the one of the highest ballot. So a value that a majority accepted in one ballot
is the only one that any later ballot proposes, whatever is lost, repeated or reordered, and whoever dies.

What is added serves progress only:
- If a majority of the promises at hand binds to nothing, the others do not count: any majority will do for the proof.
  A value that one voter accepted and no other agrees to does then not stand in the way of all others.
- The proposer's own vote comes last, when it completes the majority. So what is accepted anywhere, a second node has
  judged: nobody's word alone binds later ballots.
- A voter is asked for its judgement before it accepts. A value that it has accepted before is not judged again, and
  one that the proposer was bound to is marked as inherited, so that the judge may yield.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol, TypeAlias

import msgspec

from nexar.cluster.decisions.membership_events import MembershipMessage, SendMessage
from nexar.cluster.membership import Membership
from nexar.types import NodeId
from nexar.wire.control import Accept, Accepted, BallotNumber, Chosen, Instance, Prepare, Promise, Rejected


class Vote(msgspec.Struct, frozen=True, omit_defaults=True):
    """One voter's state in one instance. A change makes another vote."""

    instance: Instance
    promised: BallotNumber | None = None
    """Lower ballots are refused."""
    accepted: BallotNumber | None = None
    """The highest ballot in which it accepted something."""
    value: bytes = b""
    """What it accepted there."""

    def allows(self, ballot: BallotNumber) -> bool:
        """Whether the promise leaves room for this ballot."""
        return self.promised is None or ballot >= self.promised

    def promising(self, ballot: BallotNumber) -> Vote:
        """With a promise to ignore lower ballots."""
        return Vote(self.instance, ballot, self.accepted, self.value)

    def accepting(self, ballot: BallotNumber, value: bytes) -> Vote:
        """With this value accepted; a promise as well."""
        return Vote(self.instance, ballot, ballot, value)

    def encode(self) -> bytes:
        """Canonical bytes, for the disk."""
        return _encoder.encode(self)

    @staticmethod
    def decode(data: bytes | bytearray | memoryview) -> Vote:
        """The vote that `encode` wrote. ValueError for anything else."""
        try:
            return _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not a vote: {error}") from None


class VoteAnswer(Enum):
    """What a voter thinks of a value."""

    OK = "ok"
    LATER = "later"  # it has to look first: no answer now
    NO = "no"


@dataclass(frozen=True, slots=True)
class VoteDecision:
    """A verdict, with its grounds."""

    verdict: VoteAnswer
    reachable: tuple[NodeId, ...] = ()
    """Nodes that the value removes although the voter reaches them."""


OK: Final = VoteDecision(VoteAnswer.OK)
LATER: Final = VoteDecision(VoteAnswer.LATER)


def accept_any(_: Accept) -> VoteDecision:
    """The judge of those who agree to anything."""
    return OK


_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")
_decoder: Final = msgspec.msgpack.Decoder(Vote)

_NOTHING = BallotNumber(-1, 0)  # below every ballot


@dataclass(slots=True)
class Ballot:
    """Each answer costs the same, however many voters there are; `binding` and `unanswered` look at all."""

    number: BallotNumber
    again: float
    """When words without an answer are repeated."""
    interval: float
    value: bytes | None = None
    """What the voters are asked to accept, in the second phase."""
    inherited: bool = False
    """It was found in promises: the proposer had no choice."""
    settle: float | None = None
    """Until when promises are awaited that bind less than those at hand."""
    promises: dict[NodeId, tuple[BallotNumber, bytes]] = field(default_factory=dict)
    accepted: set[NodeId] = field(default_factory=set)
    rejected: dict[NodeId, tuple[NodeId, ...]] = field(default_factory=dict)
    """Who will not accept the value, with the nodes that it reaches."""
    _bound: int = 0  # promises with an accepted value

    def promised(self, voter: NodeId, accepted: BallotNumber | None, value: bytes) -> None:
        """A voter has promised, and tells what it accepted before. What a repetition says is the same."""
        if self.value is None and voter not in self.promises:
            self.promises[voter] = (_NOTHING if accepted is None else accepted, value)
            self._bound += accepted is not None

    def is_free(self, needed: int) -> bool:
        """Whether so many have promised that had accepted nothing."""
        return len(self.promises) - self._bound >= needed

    def binding(self, needed: int) -> bytes | None:
        """What must be proposed; None: anything may be, as a majority of the promises binds to nothing.

        Otherwise the highest ballot of all decides, so that proposers come to want the same.
        """
        return None if self.is_free(needed) else max(self.promises.values())[1]

    def ask(self, value: bytes, *, inherited: bool, again: float, interval: float) -> None:
        """The second phase begins."""
        self.value, self.inherited, self.settle = value, inherited, None
        self.again, self.interval = again, interval

    def agreed(self, voter: NodeId) -> None:
        """A voter has accepted the value."""
        if self.value is not None:
            self.accepted.add(voter)
            self.rejected.pop(voter, None)

    def refused(self, voter: NodeId, reachable: tuple[NodeId, ...]) -> None:
        """A voter does not accept the value. A word that was overtaken by its consent does not count."""
        if self.value is not None and voter not in self.accepted:
            self.rejected[voter] = reachable

    def reached(self) -> set[NodeId]:
        """The nodes that those who refused can reach."""
        return {node for reachable in self.rejected.values() for node in reachable}

    def unanswered(self, voters: Collection[NodeId]) -> list[NodeId]:
        """Who has not given what this phase asks for. Who refused may think better of it."""
        done: Collection[NodeId] = self.promises if self.value is None else self.accepted
        return [voter for voter in voters if voter not in done]


def majority(voters: Collection[NodeId]) -> int:
    """The fewest of them that are more than half."""
    return len(voters) // 2 + 1


class Electorate(Collection[NodeId]):
    """The voters of one membership, as a collection of nodes: the members in order of rank, then the witness."""

    __slots__ = ("_members", "seed_voter")

    def __init__(self, membership: Membership) -> None:
        """Of the epoch of this membership, for the change to the next."""
        self._members = membership
        seed = membership.seed
        self.seed_voter: NodeId | None = None if seed is None or membership.size % 2 else seed.node
        """The seed, if it votes."""

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and (self._members.rank_of(node) is not None or node == self.seed_voter)

    def __iter__(self) -> Iterator[NodeId]:
        for member in self._members.members:
            yield member.node
        if self.seed_voter is not None:
            yield self.seed_voter

    def __len__(self) -> int:
        return self._members.size + (self.seed_voter is not None)

    @property
    def needed(self) -> int:
        """Votes for a decision."""
        return majority(self)


class RandomSource(Protocol):
    """What a Random does: it is given, so that a story can be told again."""

    def random(self) -> float:
        """At least 0, less than 1."""


AcceptCheck: TypeAlias = Callable[[Accept], VoteDecision]

_HIGHEST_ROUND: Final = 2**64 - 1  # that a message has room for; nobody gets there who only outbids others
_FURTHEST: Final = 2**32
"""Rounds above the highest that was heard here: one that is further ahead was not reached by outbidding others. To
promise it would leave no room for anybody; to ignore it is as safe as to lose it."""
LONGEST_PAUSE: Final = 0.5
"""Seconds between words that are repeated, unless somebody wants another rhythm."""
_RETRY: Final = 0.1  # seconds until unanswered words are repeated; doubles
_SETTLE: Final = 0.03  # seconds for promises that bind less, once a majority binds
_MOST_FAILURES: Final = 16  # that are counted: by then pauses are as long as they get
_OUTBID: Final = 0.02  # of the pause after a higher ballot was met; doubles, and is drawn at random


class Agreement:
    """One instance at one node: its voter, if it has a vote, and its proposer. Told by `propose`, `hear`, `tick`."""

    def __init__(
        self,
        instance: Instance,
        me: NodeId,
        voters: Collection[NodeId],
        *,
        random: RandomSource | None = None,
        vote: Vote | None = None,
        may_vote: bool = True,
        learners: Collection[NodeId] = (),
    ) -> None:
        """`random`: for pauses; None for who never proposes. `vote`: what this node kept of this instance. `may_vote`:
        no, for one that may have forgotten its vote. `learners`: who has no vote and is told what was chosen.
        """
        self.instance = instance
        self.voters = voters
        self.needed = majority(voters)
        self.chosen: bytes | None = None
        """Once it is known, for ever."""
        self.vote = vote or Vote(instance)
        """Keep it, where it is to outlive the process, before anything is said that came with it."""
        self.longest_pause = LONGEST_PAUSE
        """Seconds between words that are repeated; longer for a rhythm that costs little."""
        self._me = me
        self._votes = may_vote and me in voters
        self._random = random
        self._learners = learners
        self._wanted: bytes | None = None
        self._ballot: Ballot | None = None
        self._resume: float | None = None  # when the next ballot begins, after one that failed
        self._failures = 0
        self._round = max((number.round for number in (self.vote.promised,) if number), default=0)
        self._pondered: tuple[NodeId, Accept] | None = None  # the highest ballot that waits for a judgement

    # ------------------------------------------------------------ what others ask

    @property
    def proposing(self) -> bool:
        """Whether this node has a ballot under way, or pauses between two."""
        return self.chosen is None and (self._ballot is not None or self._resume is not None)

    @property
    def ballot(self) -> Ballot | None:
        """What this node proposes right now."""
        return self._ballot

    def missing(self) -> list[NodeId]:
        """Voters that have not given what the ballot under way asks of them; none without a ballot."""
        return [] if self._ballot is None else self._ballot.unanswered(self.voters)

    # ------------------------------------------------------------ proposer

    def propose(self, value: bytes, now: float) -> list[SendMessage]:
        """Have this value chosen, or another: `chosen` tells. Idempotent. A later value replaces an earlier one in the
        ballots that have not named theirs.
        """
        if self.chosen is not None:
            return []
        self._wanted = value
        if self._ballot is not None or (self._resume is not None and now < self._resume):
            return []
        return self._begin(now)

    def withdraw(self) -> None:
        """Propose nothing any more. What was accepted so far may still be chosen by others."""
        self._wanted = self._ballot = self._resume = None

    def give_way(self, now: float, pause: float) -> None:
        """This ballot leads nowhere: begin another one after a pause."""
        self._ballot, self._resume = None, now + pause

    def due(self, now: float) -> float | None:
        """When the next `tick` is needed, not before `now`; None: not before something is heard."""
        if self.chosen is not None:
            return None
        moments = [self._resume] if self._ballot is None else [self._ballot.again, self._ballot.settle]
        known = [moment for moment in moments if moment is not None]
        return max(now, min(known)) if known else None

    def tick(self, now: float) -> list[SendMessage]:
        """Time has passed: what was not answered is said again, a pause ends."""
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
        if self._wanted is None:
            return []
        if self._round >= _HIGHEST_ROUND:  # by a liar: then others may find out what was chosen, if anything
            self.give_way(now, self.longest_pause)
            return []
        self._round += 1
        retry = min(_RETRY * 2**self._failures, self.longest_pause)
        ballot = self._ballot = Ballot(BallotNumber(self._round, self._me), again=now + retry, interval=retry)
        if self._votes:
            ballot.promised(self._me, self.vote.accepted, self.vote.value)
            self.vote = self.vote.promising(ballot.number)
        said = self._to_others(Prepare(self.instance, ballot.number))
        return said + self._promises_counted(ballot, now)

    def _repeat(self, ballot: Ballot, now: float) -> list[SendMessage]:
        if self._votes and self.vote.promised is not None and self.vote.promised != ballot.number:
            self._outbid(self.vote.promised, now)  # by a promise of our own: we cannot vote for our ballot any more
            return []
        ballot.interval = min(2 * ballot.interval, self.longest_pause)
        ballot.again = now + ballot.interval
        message: MembershipMessage = (
            Prepare(self.instance, ballot.number) if ballot.value is None else self._accept(ballot)
        )
        return [SendMessage(voter, message) for voter in ballot.unanswered(self.voters) if voter != self._me]

    def _promises_counted(self, ballot: Ballot, now: float) -> list[SendMessage]:
        if ballot.value is not None or len(ballot.promises) < self.needed:
            return []
        bound = not ballot.is_free(self.needed)
        if bound and len(ballot.promises) < len(self.voters):
            ballot.settle = ballot.settle or now + _SETTLE
            return []
        return self._ask_accept(ballot, now)

    def _ask_accept(self, ballot: Ballot, now: float) -> list[SendMessage]:
        """The second phase, with our value if no accepted one binds us."""
        found = ballot.binding(self.needed)
        value = self._wanted if found is None else found
        if value is None:
            self.withdraw()
            return []
        ballot.ask(value, inherited=found is not None, again=now + _RETRY, interval=_RETRY)
        return self._to_others(self._accept(ballot)) + self._votes_counted(ballot)

    def _accept(self, ballot: Ballot) -> Accept:
        return Accept(self.instance, ballot.number, ballot.value or b"", ballot.inherited)

    def _votes_counted(self, ballot: Ballot) -> list[SendMessage]:
        if ballot.value is None:
            return []
        may_add = self._votes and self.vote.promised == ballot.number
        if len(ballot.accepted) + may_add < self.needed:
            return []
        if len(ballot.accepted) < self.needed:
            self.vote = self.vote.accepting(ballot.number, ballot.value)
        chosen = Chosen(self.instance, ballot.value)
        self._settled(ballot.value)
        return [*self._to_others(chosen), *(SendMessage(learner, chosen) for learner in self._learners)]

    def _to_others(self, message: MembershipMessage) -> list[SendMessage]:
        return [SendMessage(voter, message) for voter in self.voters if voter != self._me]

    # ------------------------------------------------------------ hearing

    def hear(
        self, sender: NodeId, message: MembershipMessage, now: float, judge: AcceptCheck = accept_any
    ) -> list[SendMessage]:
        """A word about this instance. `judge` is asked before this node accepts; LATER: no answer before `rejudge`, or
        before the word is repeated.
        """
        if isinstance(message, Chosen):
            if self.chosen is None:  # whoever says later that it was another one lies: that is nobody's end but its own
                self._settled(message.value)
            return []
        if isinstance(message, Prepare | Accept):
            return self._asked(sender, message, judge)
        if isinstance(message, Promise | Accepted | Rejected):
            return self._answered(sender, message, now)
        return []

    def rejudge(self, judge: AcceptCheck) -> list[SendMessage]:
        """The grounds of the judge have changed: the answer to who waits for one."""
        if self._pondered is None or self.chosen is not None:
            return []
        sender, accept = self._pondered
        self._pondered = None
        return self._asked(sender, accept, judge)

    def _settled(self, value: bytes) -> None:
        self.chosen = value
        self._wanted = self._ballot = self._resume = self._pondered = None

    def _asked(self, sender: NodeId, message: Prepare | Accept, judge: AcceptCheck) -> list[SendMessage]:
        if self.chosen is not None:
            return [SendMessage(sender, Chosen(self.instance, self.chosen))]
        if not self._votes or sender not in self.voters or message.ballot.node != sender:
            return []
        if message.ballot.round > self._round + _FURTHEST:
            return []
        self._round = max(self._round, message.ballot.round)
        if not self.vote.allows(message.ballot):
            return [SendMessage(sender, Rejected(self.instance, message.ballot, self.vote.promised))]
        if isinstance(message, Prepare):
            self.vote = self.vote.promising(message.ballot)
            return [SendMessage(sender, Promise(self.instance, message.ballot, self.vote.accepted, self.vote.value))]
        return self._judged(sender, message, judge)

    def _judged(self, sender: NodeId, message: Accept, judge: AcceptCheck) -> list[SendMessage]:
        """A value that was accepted before was judged then; and to agree with oneself cannot be wrong."""
        known = self.vote.accepted is not None and self.vote.value == message.value
        judgement = None if known else judge(message)
        if judgement is None or judgement.verdict is VoteAnswer.OK:
            self.vote = self.vote.accepting(message.ballot, message.value)
            return [SendMessage(sender, Accepted(self.instance, message.ballot))]
        if judgement.verdict is VoteAnswer.LATER:
            if self._pondered is None or self._pondered[1].ballot <= message.ballot:
                self._pondered = (sender, message)
            return []
        return [SendMessage(sender, Rejected(self.instance, message.ballot, None, judgement.reachable))]

    def _answered(self, sender: NodeId, message: Promise | Accepted | Rejected, now: float) -> list[SendMessage]:
        ballot = self._ballot
        if ballot is None or message.ballot != ballot.number or sender not in self.voters:
            return []
        if isinstance(message, Promise):
            ballot.promised(sender, message.accepted, message.value)
            return self._promises_counted(ballot, now)
        if isinstance(message, Accepted):
            ballot.agreed(sender)
            return self._votes_counted(ballot)
        if message.promised is not None:
            self._outbid(message.promised, now)
        else:
            ballot.refused(sender, message.reachable)
        return []

    def _outbid(self, promised: BallotNumber, now: float) -> None:
        """Somebody else proposes: let it, for a while that is random and grows, or two would outbid each other."""
        if promised.round <= self._round + _FURTHEST:
            self._round = max(self._round, promised.round)
        self._failures = min(self._failures + 1, _MOST_FAILURES)
        longest = min(_OUTBID * 2**self._failures, self.longest_pause)
        self.give_way(now, longest * (1.0 if self._random is None else self._random.random()))
