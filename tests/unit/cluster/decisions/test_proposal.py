"""Others reach whom this node does not: it looks again, lets it rest, and in the end the higher rank goes.

A voter agrees to remove who is gone or wants to go, looks for everybody else, and yields to what may be chosen.

The lowest that lives goes first, the others follow; nobody is kept waiting by the dead.

What a node wants to be different becomes one change.
"""

from random import Random

import pytest

from nexar.cluster.decisions.membership_events import ChangeRequested, StartProbe
from nexar.cluster.decisions.paxos import LATER, OK, Agreement, Electorate, VoteAnswer, VoteDecision
from nexar.cluster.decisions.proposal import (
    ACCEPT_INHERITED_AFTER,
    TURN_STAGGER,
    WILLING_DELAY,
    ChangeVoter,
    DisputeResolver,
    PendingChanges,
    ProposalTurn,
    read_change,
    stagger,
)
from nexar.cluster.decisions.suspicion import ProbeResults, Suspicions
from nexar.cluster.membership import Change, Departure
from nexar.wire.control import MAX_CAUSE_CHARACTERS, MAX_MESSAGE_BYTES, Accept, BallotNumber, Promise, Rejected
from tests.losses import ended, left, silent
from tests.unit.cluster.decisions.voters import SEED_NODE, a_member, a_membership

FIVE = a_membership(5)
HERE = (0, 1, 0)


class Scene:
    """A node that proposes to remove others."""

    def __init__(self, me: int, *suspects: int) -> None:
        self.me = me
        self.suspicions = Suspicions(me, FIVE)
        self.requests = PendingChanges(me, FIVE)
        self.probe_results = ProbeResults(1.0)
        for node in suspects:
            self.suspicions.add(node, silent(), 0.0)
        self.disputes = DisputeResolver(
            me - 1, FIVE, self.suspicions, self.requests, self.probe_results, probe_timeout=1.0
        )
        self.agreement = Agreement(HERE, me, Electorate(FIVE), random=Random(1))
        self.round = 0

    def refuse(self, now: float, *voters: int, reached: int) -> bool:
        """A ballot that these refuse. Whether it ended."""
        self.agreement.propose(b"remove", now)
        self.round += 1
        number = BallotNumber(self.round, self.me)
        for voter in range(1, 6):
            self.agreement.receive(voter, Promise(HERE, number), now)
        ended = False
        for voter in voters:
            self.agreement.receive(voter, Rejected(HERE, number, None, (reached,)), now)
            ended = self.disputes.handle_rejection(self.agreement, now)
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
    assert scene.probe_results.drain() == [StartProbe(5)]
    assert scene.requests.resigned is None


def test_the_higher_rank_resigns_when_the_others_insist() -> None:
    scene = Scene(5, 2)
    scene.refuse(0.0, 1, 3, reached=2)
    assert scene.requests.resigned is None
    scene.suspicions.end_disputes(1.2)
    scene.refuse(1.2, 1, 3, reached=2)
    assert scene.requests.resigned == "rank 4 cannot reach rank 1, which the others reach"
    assert scene.requests.resigned_over == 2


def test_the_lower_rank_waits_ever_longer() -> None:
    scene = Scene(2, 5)
    rests = []
    for moment in (0.0, 100.0, 200.0, 300.0):
        scene.suspicions.end_disputes(moment)
        scene.refuse(moment, 1, 3, reached=5)
        assert scene.suspicions.disputed_until is not None
        rests.append(round(scene.suspicions.disputed_until - moment, 1))
    assert rests == [1.2, 2.4, 4.8, 5.0]
    assert scene.requests.resigned is None


def test_a_refusal_without_a_name_pauses_the_ballot() -> None:
    scene = Scene(1, 5)
    scene.refuse(0.0, 2, 3, reached=4)
    assert scene.suspicions.urgent == (5,)
    assert scene.agreement.due(0.0) == 0.5


def test_a_dispute_lasts_until_a_long_probe_has_a_result() -> None:
    scene = Scene(1, 5)
    scene.disputes = DisputeResolver(
        0, FIVE, scene.suspicions, scene.requests, scene.probe_results, probe_timeout=1.0, longest_probe=10.0
    )
    scene.refuse(0.0, 2, 3, reached=5)
    assert scene.suspicions.disputed_until == 12.0
    scene.suspicions.probe_missed(5)
    assert scene.suspicions.disputed_until == 1.2


def test_a_node_that_runs_slowly_disputes_longer() -> None:
    scene = Scene(1, 5)
    scene.disputes = DisputeResolver(
        0, FIVE, scene.suspicions, scene.requests, scene.probe_results, probe_timeout=1.0, own_delay=lambda: 6.0
    )
    scene.refuse(0.0, 2, 3, reached=5)
    scene.suspicions.probe_missed(5)
    assert scene.suspicions.disputed_until == 7.2


def test_a_process_that_still_answers_while_it_ends_is_no_dispute() -> None:
    scene = Scene(1)
    scene.suspicions.add(5, ended(), 0.0)
    for now, pause in ((0.01, 0.02), (0.5, 0.5)):
        scene.refuse(now, 2, 3, reached=5)
        assert scene.suspicions.urgent == (5,)
        assert scene.agreement.due(now) == pytest.approx(now + pause)
        scene.agreement.tick(now + pause)
    scene.refuse(1.2, 2, 3, reached=5)
    assert scene.suspicions.disputed_until is not None, "it does not end"


def test_the_next_epoch_gives_a_process_no_more_time_to_end() -> None:
    scene = Scene(1)
    scene.suspicions.add(5, ended(), 0.0)
    carried = scene.suspicions.carried(1, FIVE, 1.0)
    assert (carried[5].since, carried[5].first_since) == (1.0, 0.0)


FOUR = a_membership(4)
REMOVE_4 = Change(2, left=(Departure(4, "silence"),))


class Bench:
    """One judge, node 2 of four."""

    def __init__(self) -> None:
        self.probe_results = ProbeResults(1.0)
        self.gone: set[int] = set()
        self.welcome: set[int] = set()
        self.judging = ChangeVoter(
            2,
            FOUR,
            self.probe_results,
            is_gone=self.gone.__contains__,
            is_expected=lambda member: member.node in self.welcome,
        )

    def judge(
        self, change: Change, now: float = 0.0, *, ballot: int = 1, by: int = 1, inherited: bool = False
    ) -> VoteDecision:
        return self.judging.check(Accept((0, 1, 0), BallotNumber(ballot, by), change.encode(), inherited), now)


def test_who_is_gone_here_may_be_removed_without_a_look() -> None:
    bench = Bench()
    bench.gone.add(4)
    assert bench.judge(REMOVE_4) is OK
    assert bench.probe_results.drain() == []


def test_anybody_else_is_looked_for_first() -> None:
    bench = Bench()
    assert bench.judge(REMOVE_4) is LATER
    assert bench.judge(REMOVE_4) is LATER
    assert bench.probe_results.drain() == [StartProbe(4)]
    bench.probe_results.record(4, 1.0, reached=False)
    assert bench.judge(REMOVE_4, 1.0) is OK


def test_who_is_reached_is_not_removed_and_named() -> None:
    bench = Bench()
    bench.judge(REMOVE_4)
    bench.probe_results.record(4, 0.1, reached=True)
    assert bench.judge(REMOVE_4, 0.1) == VoteDecision(VoteAnswer.NO, (4,))
    bench.probe_results.drain()
    assert bench.judge(REMOVE_4, 0.2, ballot=2) is LATER, "another ballot: it may have died since"
    assert bench.probe_results.drain() == [StartProbe(4)]


def test_whom_it_reached_long_ago_it_looks_for_again() -> None:
    bench = Bench()
    bench.judge(REMOVE_4)
    bench.probe_results.record(4, 0.1, reached=True)
    assert bench.judge(REMOVE_4, 1.9) == VoteDecision(VoteAnswer.NO, (4,))
    assert bench.judge(REMOVE_4, 2.0) is LATER


def test_who_wants_to_go_may_and_who_removes_itself_too() -> None:
    bench = Bench()
    assert bench.judge(Change(2, left=(Departure(4, "bye", willing=True),))) is OK
    assert bench.judge(REMOVE_4, by=4) is OK


def test_nobody_agrees_to_its_own_removal() -> None:
    assert Bench().judge(Change(2, left=(Departure(2, "silence"),))) == VoteDecision(VoteAnswer.NO, (2,))


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
        assert Bench().judge(change) == VoteDecision(VoteAnswer.NO)
        assert read_change(change.encode(), FOUR) is None
    assert read_change(Change(2, joined=(a_member(3),)).encode(), FOUR) is None
    assert read_change(Random(1).randbytes(40), FOUR) is None
    assert read_change(b"", FOUR) is None
    assert read_change(Change(2, joined=(a_member(9),), left=everybody).encode(), FOUR) is not None


def test_to_what_was_inherited_it_yields_after_a_while() -> None:
    bench = Bench()
    bench.judge(REMOVE_4, inherited=True)
    bench.probe_results.record(4, 0.1, reached=True)
    assert bench.judge(REMOVE_4, 0.1, inherited=True) == VoteDecision(VoteAnswer.NO, (4,))
    assert bench.judge(REMOVE_4, ACCEPT_INHERITED_AFTER, ballot=5) is LATER, "one's own wish is not inherited"
    assert bench.judge(REMOVE_4, ACCEPT_INHERITED_AFTER, ballot=6, inherited=True) is OK


def test_the_timeout_of_one_change_is_not_the_timeout_of_another() -> None:
    bench = Bench()
    bench.judge(REMOVE_4, inherited=True)
    other = Change(2, left=(Departure(3, "silence"),))
    assert bench.judge(other, ACCEPT_INHERITED_AFTER, inherited=True) is LATER
    assert bench.judge(REMOVE_4, ACCEPT_INHERITED_AFTER, inherited=True) is OK, "nor does the other end it"


def test_the_seed_is_never_removed() -> None:
    assert read_change(Change(2, left=(Departure(SEED_NODE, ""),)).encode(), FOUR) is None


class ProposerScene:
    def __init__(self, rank: int) -> None:
        self.suspicions = Suspicions(rank + 1, FIVE)
        self.requests = PendingChanges(rank + 1, FIVE)
        self.turns = ProposalTurn(rank, FIVE, self.suspicions, self.requests)

    def mine(self, *, may_remove_lost: bool = True) -> float | None:
        return self.turns.due(may_remove_lost=may_remove_lost)


def test_without_a_reason_it_is_nobodys_turn() -> None:
    proposer = ProposerScene(0)
    assert proposer.mine() is None
    assert not proposer.turns.must_decide(may_remove_lost=True)


@pytest.mark.parametrize(("rank", "position"), [(0, 0), (1, 1), (3, 3)])
def test_each_waits_for_those_before_it(rank: int, position: int) -> None:
    proposer = ProposerScene(rank)
    proposer.suspicions.add(5, silent(), 1.0)
    assert proposer.mine() == pytest.approx(1.0 + TURN_STAGGER * position)
    assert proposer.mine(may_remove_lost=False) is None
    assert proposer.turns.must_decide(may_remove_lost=True)
    assert not proposer.turns.must_decide(may_remove_lost=False)


def test_nobody_waits_for_the_dead() -> None:
    proposer = ProposerScene(2)
    for node in (1, 2):
        proposer.suspicions.add(node, silent(), 1.0)
    assert proposer.mine() == 1.0


def test_the_removal_of_a_member_that_left_is_not_urgent() -> None:
    proposer = ProposerScene(0)
    proposer.suspicions.add(5, left(), 1.0, willing=True)
    assert proposer.mine() == 1.0 + WILLING_DELAY
    assert proposer.mine(may_remove_lost=False) == 1.0 + WILLING_DELAY, "it disturbs nobody, whatever the policy is"
    assert not proposer.turns.must_decide(may_remove_lost=True)


def test_where_the_votes_of_those_who_left_are_missing_nobody_proposes_to_go_on_without_them() -> None:
    proposer = ProposerScene(0)
    for node in (3, 4, 5):
        proposer.suspicions.add(node, left(), 1.0, willing=True)
    assert proposer.mine() is None
    proposer.suspicions.drop(3)
    assert proposer.mine() == 1.0 + WILLING_DELAY


def test_what_all_agreed_on_does_not_depend_on_the_policy() -> None:
    proposer = ProposerScene(0)
    proposer.requests.want(ChangeRequested(renewed=(7,)), 1.0)
    assert proposer.mine(may_remove_lost=False) == 1.0
    assert proposer.turns.must_decide(may_remove_lost=False)


@pytest.mark.parametrize(("rank", "other", "wait"), [(3, 5, 0.0), (4, 4, TURN_STAGGER)])
def test_of_a_pair_the_lower_goes_first_whatever_its_rank(rank: int, other: int, wait: float) -> None:
    proposer = ProposerScene(rank)
    proposer.requests.sever(other, 1.0)
    assert proposer.mine() == pytest.approx(1.0 + wait)


def test_who_resigns_waits_for_nobody() -> None:
    proposer = ProposerScene(4)
    proposer.requests.resign("done")
    proposer.turns.saw_proposal(1, 1.0)
    assert proposer.mine(may_remove_lost=False) == float("-inf")
    assert proposer.turns.must_decide(may_remove_lost=False)


def test_a_lower_rank_that_proposes_is_let_unless_it_dies() -> None:
    proposer = ProposerScene(1)
    proposer.suspicions.add(5, silent(), 1.0)
    proposer.turns.saw_proposal(3, 1.05)
    assert proposer.mine() == pytest.approx(1.1), "a higher rank is not waited for"
    proposer.turns.saw_proposal(1, 1.05)
    turn = proposer.mine()
    assert turn is not None
    assert turn > 2.0
    proposer.suspicions.add(1, silent("its process ended"), 1.1)
    assert proposer.mine() == 1.0


def test_in_a_crowd_they_follow_faster() -> None:
    assert stagger(10) == pytest.approx(1.0)
    assert stagger(4000) < 60.0


def some() -> tuple[PendingChanges, Suspicions]:
    return PendingChanges(2, FOUR), Suspicions(2, FOUR)


def test_without_a_request_there_is_nothing_to_propose() -> None:
    requests, suspicions = some()
    assert requests.draft(suspicions) is None


def test_a_draft_takes_in_all_that_is_known() -> None:
    requests, suspicions = some()
    suspicions.add(4, silent(), 1.0)
    bye = Departure(1, "bye", willing=True)
    requests.want(ChangeRequested(joined=(a_member(9),), left=(bye,), renewed=(7, 5)), 1.0)
    requests.sever(3, 1.0)
    assert requests.draft(suspicions) == Change(
        2, left=(Departure(4, "silence"), bye), joined=(a_member(9),), severed=((2, 3),), renewed=(5, 7)
    )
    assert requests.expects(a_member(9))
    assert not requests.expects(a_member(8))
    assert requests.releases(1)


def test_who_has_closed_goes_quietly_unless_it_is_needed_or_all_have_agreed_on_it() -> None:
    requests, suspicions = some()
    for node in (1, 3, 4):
        suspicions.add(node, left(), 1.0, willing=True)
    suspicions.add(3, silent("needed"), 2.0)
    requests.want(ChangeRequested(left=(Departure(4, "it asked for it", willing=True),)), 2.0)
    draft = requests.draft(suspicions)
    assert draft is not None
    assert [(each.node, each.willing, each.quiet) for each in draft.left] == [
        (1, True, True),
        (3, True, False),
        (4, True, False),
    ]


def test_where_losses_are_no_reason_only_who_has_closed_goes() -> None:
    requests, suspicions = some()
    suspicions.add(3, silent(), 1.0)
    requests.severed.add((1, 2))
    assert requests.draft(suspicions, may_remove_lost=False) is None
    suspicions.add(4, left(), 1.0, willing=True)
    draft = requests.draft(suspicions, may_remove_lost=False)
    assert draft is not None
    assert ([each.node for each in draft.left], draft.severed) == ([4], ())
    requests.want(ChangeRequested(renewed=(7,)), 2.0)
    draft = requests.draft(suspicions, may_remove_lost=False)
    assert draft is not None
    assert [each.node for each in draft.left] == [3, 4], "it goes along with what was agreed on"
    assert draft.severed == ((1, 2),)


def test_what_was_agreed_on_outlives_a_change_that_leaves_the_world_alone() -> None:
    requests, _ = some()
    requests.want(ChangeRequested(joined=(a_member(9),), left=(Departure(1, "bye", willing=True),), renewed=(7,)), 1.0)
    quiet = Change(2, left=(Departure(4, "bye", willing=True, quiet=True),), renewed=(5,))
    kept = requests.carried(quiet, quiet.apply(FOUR), 2.0)
    assert kept.draft(Suspicions(2, quiet.apply(FOUR))) == Change(
        3, left=(Departure(1, "bye", willing=True),), joined=(a_member(9),)
    )
    loud = Change(2, left=(Departure(4, "killed"),))
    assert requests.carried(loud, loud.apply(FOUR), 2.0).wanted_since is None


def test_what_is_so_already_is_not_wanted() -> None:
    requests, suspicions = some()
    requests.want(ChangeRequested(joined=(a_member(3),), left=(Departure(9, ""),)), 1.0)
    assert requests.wanted_since is None
    assert requests.draft(suspicions) is None


def test_a_pair_of_which_one_goes_is_not_severed() -> None:
    requests, suspicions = some()
    requests.sever(4, 1.0)
    suspicions.add(4, silent(), 1.0)
    draft = requests.draft(suspicions)
    assert draft is not None
    assert draft.severed == ()


def test_who_is_suspected_and_released_leaves_once() -> None:
    requests, suspicions = some()
    suspicions.add(4, silent(), 1.0)
    requests.want(ChangeRequested(left=(Departure(4, "bye", willing=True),)), 1.0)
    draft = requests.draft(suspicions)
    assert draft is not None
    assert [departure.node for departure in draft.left] == [4]


def test_who_resigns_proposes_only_that() -> None:
    requests, suspicions = some()
    suspicions.add(4, silent(), 1.0)
    requests.resign("done")
    assert requests.draft(suspicions) == Change(2, left=(Departure(2, "done", willing=True),))
    requests.stay()
    assert requests.resigned is None


def test_the_last_one_cannot_be_removed() -> None:
    requests = PendingChanges(1, a_membership(1))
    requests.resign("done")
    assert requests.draft(Suspicions(1, a_membership(1))) is None


def test_however_many_left_with_long_stories_the_change_fits_into_a_message() -> None:
    many = a_membership(2001)
    suspicions = Suspicions(1, many)
    for node in range(2, 1001):
        suspicions.add(node, silent("x" * 10_000), 1.0)
    draft = PendingChanges(1, many).draft(suspicions)
    assert draft is not None
    assert len(draft.encode()) < MAX_MESSAGE_BYTES / 2
    few = Suspicions(1, many)
    few.add(2, silent("x" * 10_000), 1.0)
    draft = PendingChanges(1, many).draft(few)
    assert draft is not None
    assert len(draft.left[0].cause) == MAX_CAUSE_CHARACTERS


def test_after_a_change_what_was_agreed_is_over_and_what_broke_is_not() -> None:
    requests, _ = some()
    requests.want(ChangeRequested(renewed=(7,)), 1.0)
    requests.sever(1, 1.0)
    requests.sever(3, 1.0)
    requests.sever(4, 1.0)
    requests.resign("done")
    change = Change(2, left=(Departure(4, ""),), severed=((1, 2),))
    kept = requests.carried(change, change.apply(FOUR), 5.0)
    assert kept.severed == {(2, 3)}
    assert (kept.severed_since, kept.wanted_since, kept.resigned) == (5.0, None, "done")
    requests.resign("I cannot reach it", over=3)
    assert requests.carried(change, change.apply(FOUR), 5.0).resigned is None
