"""One value for one instance, chosen by a majority of its voters: single-decree Paxos, at one node. Pure.

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

from collections.abc import Callable, Collection
from typing import Final, Protocol, TypeAlias

from nexar.cluster.decisions.ballot import Ballot
from nexar.cluster.decisions.electorate import majority
from nexar.cluster.decisions.succession_events import Say, Word
from nexar.cluster.decisions.vote import Judgement, Verdict, Vote, approve
from nexar.types import NodeId
from nexar.wire.messages import Accept, Accepted, Chosen, Instance, Number, Prepare, Promise, Rejected


class Chance(Protocol):
    """What a Random does: it is given, so that a story can be told again."""

    def random(self) -> float:
        """At least 0, less than 1."""


Judge: TypeAlias = Callable[[Accept], Judgement]

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
        random: Chance | None = None,
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

    def propose(self, value: bytes, now: float) -> list[Say]:
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

    def tick(self, now: float) -> list[Say]:
        """Time has passed: what was not answered is said again, a pause ends."""
        if self.chosen is not None:
            return []
        ballot = self._ballot
        if ballot is None:
            return self._begin(now) if self._resume is not None and now >= self._resume else []
        if ballot.settle is not None and now >= ballot.settle:
            return self._ask_accept(ballot, now)
        return self._repeat(ballot, now) if now >= ballot.again else []

    def _begin(self, now: float) -> list[Say]:
        self._resume = None
        if self._wanted is None:
            return []
        if self._round >= _HIGHEST_ROUND:  # by a liar: then others may find out what was chosen, if anything
            self.give_way(now, self.longest_pause)
            return []
        self._round += 1
        retry = min(_RETRY * 2**self._failures, self.longest_pause)
        ballot = self._ballot = Ballot(Number(self._round, self._me), again=now + retry, interval=retry)
        if self._votes:
            ballot.promised(self._me, self.vote.accepted, self.vote.value)
            self.vote = self.vote.promising(ballot.number)
        said = self._to_others(Prepare(self.instance, ballot.number))
        return said + self._promises_counted(ballot, now)

    def _repeat(self, ballot: Ballot, now: float) -> list[Say]:
        if self._votes and self.vote.promised is not None and self.vote.promised != ballot.number:
            self._outbid(self.vote.promised, now)  # by a promise of our own: we cannot vote for our ballot any more
            return []
        ballot.interval = min(2 * ballot.interval, self.longest_pause)
        ballot.again = now + ballot.interval
        word: Word = Prepare(self.instance, ballot.number) if ballot.value is None else self._accept(ballot)
        return [Say(voter, word) for voter in ballot.unanswered(self.voters) if voter != self._me]

    def _promises_counted(self, ballot: Ballot, now: float) -> list[Say]:
        if ballot.value is not None or len(ballot.promises) < self.needed:
            return []
        bound = not ballot.is_free(self.needed)
        if bound and len(ballot.promises) < len(self.voters):
            ballot.settle = ballot.settle or now + _SETTLE
            return []
        return self._ask_accept(ballot, now)

    def _ask_accept(self, ballot: Ballot, now: float) -> list[Say]:
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

    def _votes_counted(self, ballot: Ballot) -> list[Say]:
        if ballot.value is None:
            return []
        may_add = self._votes and self.vote.promised == ballot.number
        if len(ballot.accepted) + may_add < self.needed:
            return []
        if len(ballot.accepted) < self.needed:
            self.vote = self.vote.accepting(ballot.number, ballot.value)
        chosen = Chosen(self.instance, ballot.value)
        self._settled(ballot.value)
        return [*self._to_others(chosen), *(Say(learner, chosen) for learner in self._learners)]

    def _to_others(self, word: Word) -> list[Say]:
        return [Say(voter, word) for voter in self.voters if voter != self._me]

    # ------------------------------------------------------------ hearing

    def hear(self, sender: NodeId, word: Word, now: float, judge: Judge = approve) -> list[Say]:
        """A word about this instance. `judge` is asked before this node accepts; LATER: no answer before `rejudge`, or
        before the word is repeated.
        """
        if isinstance(word, Chosen):
            if self.chosen is None:  # whoever says later that it was another one lies: that is nobody's end but its own
                self._settled(word.value)
            return []
        if isinstance(word, Prepare | Accept):
            return self._asked(sender, word, judge)
        if isinstance(word, Promise | Accepted | Rejected):
            return self._answered(sender, word, now)
        return []

    def rejudge(self, judge: Judge) -> list[Say]:
        """The grounds of the judge have changed: the answer to who waits for one."""
        if self._pondered is None or self.chosen is not None:
            return []
        sender, accept = self._pondered
        self._pondered = None
        return self._asked(sender, accept, judge)

    def _settled(self, value: bytes) -> None:
        self.chosen = value
        self._wanted = self._ballot = self._resume = self._pondered = None

    def _asked(self, sender: NodeId, word: Prepare | Accept, judge: Judge) -> list[Say]:
        if self.chosen is not None:
            return [Say(sender, Chosen(self.instance, self.chosen))]
        if not self._votes or sender not in self.voters or word.ballot.node != sender:
            return []
        if word.ballot.round > self._round + _FURTHEST:
            return []
        self._round = max(self._round, word.ballot.round)
        if not self.vote.allows(word.ballot):
            return [Say(sender, Rejected(self.instance, word.ballot, self.vote.promised))]
        if isinstance(word, Prepare):
            self.vote = self.vote.promising(word.ballot)
            return [Say(sender, Promise(self.instance, word.ballot, self.vote.accepted, self.vote.value))]
        return self._judged(sender, word, judge)

    def _judged(self, sender: NodeId, word: Accept, judge: Judge) -> list[Say]:
        """A value that was accepted before was judged then; and to agree with oneself cannot be wrong."""
        known = self.vote.accepted is not None and self.vote.value == word.value
        judgement = None if known else judge(word)
        if judgement is None or judgement.verdict is Verdict.OK:
            self.vote = self.vote.accepting(word.ballot, word.value)
            return [Say(sender, Accepted(self.instance, word.ballot))]
        if judgement.verdict is Verdict.LATER:
            if self._pondered is None or self._pondered[1].ballot <= word.ballot:
                self._pondered = (sender, word)
            return []
        return [Say(sender, Rejected(self.instance, word.ballot, None, judgement.reachable))]

    def _answered(self, sender: NodeId, word: Promise | Accepted | Rejected, now: float) -> list[Say]:
        ballot = self._ballot
        if ballot is None or word.ballot != ballot.number or sender not in self.voters:
            return []
        if isinstance(word, Promise):
            ballot.promised(sender, word.accepted, word.value)
            return self._promises_counted(ballot, now)
        if isinstance(word, Accepted):
            ballot.agreed(sender)
            return self._votes_counted(ballot)
        if word.promised is not None:
            self._outbid(word.promised, now)
        else:
            ballot.refused(sender, word.reachable)
        return []

    def _outbid(self, promised: Number, now: float) -> None:
        """Somebody else proposes: let it, for a while that is random and grows, or two would outbid each other."""
        if promised.round <= self._round + _FURTHEST:
            self._round = max(self._round, promised.round)
        self._failures = min(self._failures + 1, _MOST_FAILURES)
        longest = min(_OUTBID * 2**self._failures, self.longest_pause)
        self.give_way(now, longest * (1.0 if self._random is None else self._random.random()))
