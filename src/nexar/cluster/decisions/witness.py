"""The seed's mind about who comes next. Pure.

It proposes nothing and belongs to no membership. When the members are even in number it has a vote, so that one half of
them and the seed are a majority; it judges like a member (`judging`), and suspects nobody without looking. It follows
what was chosen, and passes it on: it may reach members that the proposer does not.
"""

from __future__ import annotations

from nexar.cluster.change import Change
from nexar.cluster.decisions.agreement import Agreement
from nexar.cluster.decisions.electorate import Electorate
from nexar.cluster.decisions.history import History
from nexar.cluster.decisions.judging import Judging, read_change
from nexar.cluster.decisions.probing import Probing
from nexar.cluster.decisions.succession_events import Action, Adopt, Event, Heard, Probed, Say, Word
from nexar.cluster.decisions.vote import Judgement, Vote
from nexar.cluster.membership import Membership
from nexar.errors import InternalError
from nexar.types import NodeId
from nexar.wire.messages import Accept, Chosen, Suspect


class Witness:
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
        self._history = History()
        self._probing = Probing(probe_timeout)
        self._enter(membership, vote)

    def _enter(self, membership: Membership, vote: Vote | None = None) -> None:
        self.membership = membership
        """The newest that it knows."""
        instance = (0, membership.epoch, 0)
        kept = vote if vote is not None and vote.instance == instance else None
        self._agreement = Agreement(instance, self.me, Electorate(membership), vote=kept, may_vote=self._may_vote)
        self._judging = Judging(
            self.me,
            membership,
            self._probing,
            is_gone=lambda _: False,
            is_welcome=lambda one: one.node in self.admitted,
        )
        self._probing.forget()

    @property
    def vote(self) -> Vote:
        """What it promised and accepted in this epoch."""
        return self._agreement.vote

    def changes_since(self, epoch: int) -> list[bytes]:
        """What was chosen since: brings who is in `epoch` here, if that is known."""
        return self._history.since(epoch)

    def due(self, now: float) -> float | None:
        """It does nothing by itself: whoever wants something asks again."""
        return None

    def step(self, event: Event, now: float) -> list[Action]:
        """Take note of an event; what to do about it, in this order. Heard and Probed mean something to it."""
        actions: list[Action] = []
        match event:
            case Heard(sender, word):
                actions += self._heard(sender, word, now)
            case Probed(node, cause):
                self._probing.told(node, now, reached=cause is None)
                actions += self._agreement.rejudge(lambda accept: self._judge(accept, now))
        while self._agreement.chosen is not None:
            actions += self._adopt(self._agreement.chosen, now)
        return [*actions, *self._probing.drain()]

    def _judge(self, accept: Accept, now: float) -> Judgement:
        return self._judging.judge(accept, now)

    def _heard(self, sender: NodeId, word: Word, now: float) -> list[Action]:
        if isinstance(word, Suspect):
            return [*self._history.tell(sender, word.epoch)]
        answer = self._history.answer(self.me, sender, word, self.membership.epoch)
        if answer is not None:
            return [*answer]
        if isinstance(word, Chosen) and read_change(word.value, self.membership) is None:
            return []
        return [*self._agreement.hear(sender, word, now, lambda accept: self._judge(accept, now))]

    def _adopt(self, value: bytes, now: float) -> list[Action]:
        before, change = self.membership, Change.decode(value)
        self._history.add(before.epoch, value)
        self._enter(change.apply(before))
        chosen = Chosen((0, before.epoch, 0), value)
        ahead = self._history.take(change.epoch)
        if ahead is not None and read_change(ahead, self.membership) is not None:
            self._agreement.hear(self.me, Chosen((0, change.epoch, 0), ahead), now)
        return [Adopt(change), *(Say(member.node, chosen) for member in before.members)]
