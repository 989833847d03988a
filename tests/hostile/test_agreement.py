"""Messages are lost, repeated and reordered, proposers compete and vanish: never two values, and in the end
one.
"""

from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from nexar.cluster.decisions.membership_events import SendMessage
from nexar.cluster.decisions.paxos import LATER, OK, Agreement, Vote, VoteAnswer, VoteDecision
from nexar.wire.control import Accept

INSTANCE = (0, 1, 0)
KINDS = ["deliver"] * 8 + ["lose"] * 4 + ["repeat", "propose", "tick", "tick", "tick", "restart"]
steps = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1000)), max_size=150)


@dataclass
class Bag:
    """Everybody, and the messages that are under way, in no order."""

    size: int
    moody: bool
    """Judges refuse, or take their time, as they like."""
    now: float = 0.0
    messages: list[tuple[int, SendMessage]] = field(default_factory=list)
    chosen: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.voters = frozenset(range(1, self.size + 1))
        self.nodes = {node: self._made(node) for node in self.voters}
        self.mood = Random(self.size)

    def _made(self, node: int, vote: Vote | None = None) -> Agreement:
        return Agreement(INSTANCE, node, self.voters, random=Random(node), vote=vote)

    def judge(self, _: Accept) -> VoteDecision:
        return self.mood.choice([OK, OK, LATER, VoteDecision(VoteAnswer.NO, (1,))]) if self.moody else OK

    def take(self, what: str, which: int) -> None:
        node = 1 + which % self.size
        if what in ("deliver", "repeat", "lose") and self.messages:
            place = which % len(self.messages)
            sender, say = self.messages[place]
            if what != "repeat":
                del self.messages[place]
            if what != "lose":
                self._said(say.node, self.nodes[say.node].receive(sender, say.message, self.now, self.judge))
        elif what == "propose":
            self._said(node, self.nodes[node].propose(b"value of %d" % node, self.now))
        elif what == "tick":
            self.now += 0.05 * (which % 7)
            self._said(node, self.nodes[node].tick(self.now))
            self._said(node, self.nodes[node].recheck(self.judge))
        elif what == "restart":
            self.nodes[node] = self._made(node, Vote.decode(self.nodes[node].vote.encode()))

    def _said(self, node: int, says: list[SendMessage]) -> None:
        self.messages += [(node, say) for say in says]
        self.chosen |= {each.chosen for each in self.nodes.values() if each.chosen is not None}
        assert len(self.chosen) <= 1

    def settle(self) -> None:
        """The network is good again, and who does not know it yet wants to: one after the other."""
        self.moody = False
        for turn in range(50 * self.size):
            node = 1 + turn // 50
            self.now += 1.0
            self._said(node, self.nodes[node].propose(b"value of %d" % node, self.now))
            self._said(node, self.nodes[node].tick(self.now))
            while self.messages:
                self.take("deliver", 0)


@given(st.integers(1, 7), st.booleans(), steps)
def test_one_value_is_chosen_whatever_happens_to_the_messages(
    size: int, moody: bool, story: list[tuple[str, int]]
) -> None:
    bag = Bag(size, moody)
    for what, which in story:
        bag.take(what, which)
    bag.settle()
    assert {each.chosen for each in bag.nodes.values()} == bag.chosen
    assert len(bag.chosen) == 1


@given(st.sampled_from([3, 3, 4, 5, 7]), st.booleans(), st.integers(0, 2**32))
def test_nor_does_a_long_story_end_otherwise(size: int, moody: bool, chance: int) -> None:
    """Chance alone finds more of them than the shortest one that was written by hand."""
    bag, random = Bag(size, moody), Random(chance)
    for _ in range(200):
        bag.take(random.choice(KINDS), random.randrange(1000))
    bag.settle()
    assert {each.chosen for each in bag.nodes.values()} == bag.chosen
    assert len(bag.chosen) == 1
