"""A voter agrees to remove who is gone or wants to go, looks for everybody else, and yields to what may be chosen."""

from random import Random

from nexar.cluster.change import Change, Departure
from nexar.cluster.decisions.judging import PATIENCE, Judging, read_change
from nexar.cluster.decisions.probing import Probing
from nexar.cluster.decisions.succession_events import Probe
from nexar.cluster.decisions.vote import LATER, OK, Judgement, Verdict
from nexar.wire.messages import Accept, Number
from tests.unit.cluster.decisions.parliament import SEED, a_member, a_membership

FOUR = a_membership(4)
REMOVE_4 = Change(2, left=(Departure(4, "silence"),))


class Bench:
    """One judge, node 2 of four."""

    def __init__(self) -> None:
        self.probing = Probing(1.0)
        self.gone: set[int] = set()
        self.welcome: set[int] = set()
        self.judging = Judging(
            2,
            FOUR,
            self.probing,
            is_gone=self.gone.__contains__,
            is_welcome=lambda member: member.node in self.welcome,
        )

    def judge(
        self, change: Change, now: float = 0.0, *, ballot: int = 1, by: int = 1, inherited: bool = False
    ) -> Judgement:
        return self.judging.judge(Accept((0, 1, 0), Number(ballot, by), change.encode(), inherited), now)


def test_who_is_gone_here_may_be_removed_without_a_look() -> None:
    bench = Bench()
    bench.gone.add(4)
    assert bench.judge(REMOVE_4) is OK
    assert bench.probing.drain() == []


def test_anybody_else_is_looked_for_first() -> None:
    bench = Bench()
    assert bench.judge(REMOVE_4) is LATER
    assert bench.judge(REMOVE_4) is LATER
    assert bench.probing.drain() == [Probe(4)]
    bench.probing.told(4, 1.0, reached=False)
    assert bench.judge(REMOVE_4, 1.0) is OK


def test_who_is_reached_is_not_removed_and_named() -> None:
    bench = Bench()
    bench.judge(REMOVE_4)
    bench.probing.told(4, 0.1, reached=True)
    assert bench.judge(REMOVE_4, 0.1) == Judgement(Verdict.NO, (4,))
    bench.probing.drain()
    assert bench.judge(REMOVE_4, 0.2, ballot=2) is LATER, "another ballot: it may have died since"
    assert bench.probing.drain() == [Probe(4)]


def test_whom_it_reached_long_ago_it_looks_for_again() -> None:
    bench = Bench()
    bench.judge(REMOVE_4)
    bench.probing.told(4, 0.1, reached=True)
    assert bench.judge(REMOVE_4, 1.9) == Judgement(Verdict.NO, (4,))
    assert bench.judge(REMOVE_4, 2.0) is LATER


def test_who_wants_to_go_may_and_who_removes_itself_too() -> None:
    bench = Bench()
    assert bench.judge(Change(2, left=(Departure(4, "bye", willing=True),))) is OK
    assert bench.judge(REMOVE_4, by=4) is OK


def test_nobody_agrees_to_its_own_removal() -> None:
    assert Bench().judge(Change(2, left=(Departure(2, "silence"),))) == Judgement(Verdict.NO, (2,))


def test_newcomers_are_welcome_where_they_are_known() -> None:
    bench = Bench()
    joins = Change(2, joined=(a_member(9),))
    assert bench.judge(joins) is LATER
    bench.welcome.add(9)
    assert bench.judge(joins) is OK


def test_what_changes_no_member_harms_nobody() -> None:
    assert Bench().judge(Change(2, severed=((1, 3),), renewed=(7,))) is OK


def test_what_is_no_change_of_this_membership_is_refused() -> None:
    everybody = tuple(Departure(node, "") for node in range(1, 5))
    for change in (Change(3, renewed=(1,)), Change(2, left=(Departure(9, ""),)), Change(2, left=everybody)):
        assert Bench().judge(change) == Judgement(Verdict.NO)
        assert read_change(change.encode(), FOUR) is None
    assert read_change(Change(2, joined=(a_member(3),)).encode(), FOUR) is None
    assert read_change(Random(1).randbytes(40), FOUR) is None
    assert read_change(b"", FOUR) is None
    assert read_change(Change(2, joined=(a_member(9),), left=everybody).encode(), FOUR) is not None


def test_to_what_was_inherited_it_yields_after_a_while() -> None:
    bench = Bench()
    bench.judge(REMOVE_4, inherited=True)
    bench.probing.told(4, 0.1, reached=True)
    assert bench.judge(REMOVE_4, 0.1, inherited=True) == Judgement(Verdict.NO, (4,))
    assert bench.judge(REMOVE_4, PATIENCE, ballot=5) is LATER, "one's own wish is not inherited"
    assert bench.judge(REMOVE_4, PATIENCE, ballot=6, inherited=True) is OK


def test_the_patience_with_one_change_is_not_the_patience_with_another() -> None:
    bench = Bench()
    bench.judge(REMOVE_4, inherited=True)
    other = Change(2, left=(Departure(3, "silence"),))
    assert bench.judge(other, PATIENCE, inherited=True) is LATER
    assert bench.judge(REMOVE_4, PATIENCE, inherited=True) is OK, "nor does the other end it"


def test_the_seed_is_never_removed() -> None:
    assert read_change(Change(2, left=(Departure(SEED, ""),)).encode(), FOUR) is None
