"""Others reach whom this node does not: it looks again, lets it rest, and in the end the higher rank goes."""

from random import Random

from nexar.cluster.decisions.agreement import Agreement
from nexar.cluster.decisions.disputes import Disputes
from nexar.cluster.decisions.electorate import Electorate
from nexar.cluster.decisions.probing import Probing
from nexar.cluster.decisions.succession_events import Probe
from nexar.cluster.decisions.suspicions import Suspicions
from nexar.cluster.decisions.wishes import Wishes
from nexar.wire.messages import Number, Promise, Rejected
from tests.unit.cluster.decisions.parliament import a_membership

FIVE = a_membership(5)
HERE = (0, 1, 0)


class Scene:
    """A node that proposes to remove others."""

    def __init__(self, me: int, *suspects: int) -> None:
        self.me = me
        self.suspicions = Suspicions(me, FIVE)
        self.wishes = Wishes(me, FIVE)
        self.probing = Probing(1.0)
        for node in suspects:
            self.suspicions.add(node, "silence", 0.0)
        self.disputes = Disputes(me - 1, FIVE, self.suspicions, self.wishes, self.probing, probe_timeout=1.0)
        self.agreement = Agreement(HERE, me, Electorate(FIVE), random=Random(1))
        self.round = 0

    def refuse(self, now: float, *voters: int, reached: int) -> bool:
        """A ballot that these refuse. Whether it ended."""
        self.agreement.propose(b"remove", now)
        self.round += 1
        number = Number(self.round, self.me)
        for voter in range(1, 6):
            self.agreement.hear(voter, Promise(HERE, number), now)
        ended = False
        for voter in voters:
            self.agreement.hear(voter, Rejected(HERE, number, None, (reached,)), now)
            ended = self.disputes.look(self.agreement, now)
        return ended


def test_few_who_refuse_do_not_end_a_ballot() -> None:
    scene = Scene(1, 5)
    assert not scene.refuse(0.0, 2, reached=5)
    assert scene.suspicions.urgent == (5,)


def test_when_no_majority_is_left_the_suspicion_rests_and_the_node_looks_again() -> None:
    scene = Scene(1, 5)
    assert scene.refuse(0.0, 2, 3, reached=5), "of five, two refuse and one is not reached"
    assert scene.suspicions.urgent == ()
    assert scene.suspicions.disputed_until == 1.2
    assert scene.probing.drain() == [Probe(5)]
    assert scene.wishes.resigned is None


def test_the_higher_rank_resigns_when_the_others_insist() -> None:
    scene = Scene(5, 2)
    scene.refuse(0.0, 1, 3, reached=2)
    assert scene.wishes.resigned is None
    scene.suspicions.wake(1.2)
    scene.refuse(1.2, 1, 3, reached=2)
    assert scene.wishes.resigned == "rank 4 cannot reach rank 1, which the others reach"
    assert scene.wishes.resigned_over == 2


def test_the_lower_rank_waits_ever_longer() -> None:
    scene = Scene(2, 5)
    rests = []
    for moment in (0.0, 100.0, 200.0, 300.0):
        scene.suspicions.wake(moment)
        scene.refuse(moment, 1, 3, reached=5)
        assert scene.suspicions.disputed_until is not None
        rests.append(round(scene.suspicions.disputed_until - moment, 1))
    assert rests == [1.2, 2.4, 4.8, 5.0]
    assert scene.wishes.resigned is None


def test_a_refusal_without_a_name_pauses_the_ballot() -> None:
    scene = Scene(1, 5)
    scene.refuse(0.0, 2, 3, reached=4)
    assert scene.suspicions.urgent == (5,)
    assert scene.agreement.due(0.0) == 0.5


def test_a_dispute_lasts_until_a_long_probe_has_a_result() -> None:
    scene = Scene(1, 5)
    scene.disputes = Disputes(
        0, FIVE, scene.suspicions, scene.wishes, scene.probing, probe_timeout=1.0, longest_probe=10.0
    )
    scene.refuse(0.0, 2, 3, reached=5)
    assert scene.suspicions.disputed_until == 12.0
    scene.suspicions.looked(5)
    assert scene.suspicions.disputed_until == 1.2


def test_a_node_that_runs_slowly_disputes_longer() -> None:
    scene = Scene(1, 5)
    scene.disputes = Disputes(
        0, FIVE, scene.suspicions, scene.wishes, scene.probing, probe_timeout=1.0, own_delay=lambda: 6.0
    )
    scene.refuse(0.0, 2, 3, reached=5)
    scene.suspicions.looked(5)
    assert scene.suspicions.disputed_until == 7.2
