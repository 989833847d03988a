"""A suspicion is sent to a few, then to more; the suspect learns of it once.

A try says something only about the time after the question.

No majority: reported as soon as that is sure. A majority that does not finish: reported when time is over.

Whom a node cannot reach: urgent, willing, disputed; counted as they come and go.
"""

import pytest

from nexar.cluster.decisions.membership_events import Loss, LossKind, NoProgress, SendMessage, StartProbe
from nexar.cluster.decisions.paxos import Agreement, Electorate
from nexar.cluster.decisions.suspicion import ProbeResults, StallTimer, SuspicionBroadcast, Suspicions
from nexar.wire.control import BallotNumber, Promise, Suspect
from tests.losses import left, silent
from tests.unit.cluster.decisions.voters import SEED_NODE, a_membership

MANY = a_membership(40)


def of(me: int, *suspects: int) -> tuple[SuspicionBroadcast, Suspicions]:
    suspicions = Suspicions(me, MANY)
    accusations = SuspicionBroadcast(me, MANY, suspicions)
    for node in suspects:
        suspicions.add(node, silent(), 0.0)
        accusations.add(node)
    return accusations, suspicions


def test_the_lowest_few_that_are_reached_learn_of_it_first_and_once() -> None:
    accusations, _ = of(2, 30, 3)
    said = accusations.messages(0.0, repeat=False)
    assert [(say.node, say.message.node) for say in said if isinstance(say.message, Suspect)] == [
        (listener, suspect) for suspect in (30, 3) for listener in (1, 4, 5, 6)
    ]
    assert said[0].message == Suspect(1, 30, 2, "silence")
    assert accusations.messages(9.0, repeat=False) == []
    assert accusations.again is None


def test_while_nothing_comes_of_it_more_and_more_learn_of_it() -> None:
    accusations, suspicions = of(2, 30)
    received, now = [len(accusations.messages(0.0, repeat=True))], 0.0
    for _ in range(4):
        assert accusations.again is not None
        now = accusations.again
        received.append(len(accusations.messages(now, repeat=True)))
    assert received == [4, 8, 16, 32, 38]
    suspicions.drop(30)
    assert accusations.messages(now + 99.0, repeat=True) == []
    assert accusations.again is None


def test_a_suspicion_that_is_over_is_not_reported() -> None:
    accusations, suspicions = of(2, 30)
    suspicions.drop(30)
    assert accusations.messages(0.0, repeat=True) == []


def test_the_suspect_learns_of_each_complaint_once() -> None:
    accusations, _ = of(2)
    sent = Suspect(1, 30, 5, "silence")
    assert accusations.forward(sent) == [SendMessage(30, sent)]
    assert accusations.forward(sent) == []
    assert accusations.forward(Suspect(1, 30, 6, "silence")) != []


def test_what_comes_from_the_epoch_before_is_reported_anew() -> None:
    suspicions = Suspicions(2, MANY)
    suspicions.add(30, silent(), 0.0)
    assert len(SuspicionBroadcast(2, MANY, suspicions).messages(0.0, repeat=True)) == 4


def test_a_try_that_is_under_way_is_not_made_twice_unless_it_is_forgotten() -> None:
    probing = ProbeResults(1.0)
    probing.ask(5, 0.0)
    probing.ask(5, 0.5)
    assert probing.drain() == [StartProbe(5)]
    assert probing.drain() == []
    probing.ask(5, 2.0)
    assert probing.drain() == [StartProbe(5)]


def test_who_was_reached_may_have_died_since_the_try_began() -> None:
    probing = ProbeResults(1.0)
    probing.ask(5, 1.0)
    probing.record(5, 1.5, reached=True)
    assert probing.reached_since(5, 1.0)
    assert not probing.reached_since(5, 1.2)
    assert not probing.missed_since(5, 0.0)


def test_who_was_missed_had_until_the_end_to_answer() -> None:
    probing = ProbeResults(1.0)
    probing.ask(5, 1.0)
    probing.record(5, 1.5, reached=False)
    assert probing.missed_since(5, 1.5)
    assert not probing.missed_since(5, 1.6)
    assert not probing.reached_since(5, 0.0)


def test_the_last_try_counts_and_another_epoch_forgets_all() -> None:
    probing = ProbeResults(1.0)
    probing.ask(5, 1.0)
    probing.record(5, 1.5, reached=False)
    probing.ask(5, 2.0)
    probing.record(5, 2.1, reached=True)
    assert not probing.missed_since(5, 0.0)
    probing.clear()
    assert not probing.reached_since(5, 0.0)
    probing.record(6, 3.0, reached=True)
    assert not probing.reached_since(6, 0.0), "nobody asked: it is not known when that began"


def test_who_was_found_after_a_try_is_not_missed() -> None:
    probing = ProbeResults(1.0)
    probing.ask(5, 1.0)
    probing.record(5, 1.5, reached=False)
    probing.clear_miss(5)
    assert not probing.missed_since(5, 0.0)


def test_a_node_that_runs_slowly_waits_longer_before_it_tries_again() -> None:
    probing = ProbeResults(1.0, lambda: 9.0)
    probing.ask(5, 0.0)
    probing.drain()
    probing.ask(5, 19.9)
    assert probing.drain() == []
    probing.ask(5, 20.0)
    assert [each.node for each in probing.drain()] == [5]


FOUR = a_membership(4)


def some() -> tuple[StallTimer, Suspicions]:
    suspicions = Suspicions(1, FOUR)
    made = StallTimer(1, Electorate(FOUR), suspicions, recovery_timeout=30.0, probe_timeout=1.0)
    return made, suspicions


def test_while_nothing_presses_time_does_not_run() -> None:
    stalled, _ = some()
    assert stalled.due is None
    stalled.update(5.0, must_decide=True)
    stalled.update(6.0, must_decide=True)
    assert stalled.due == 35.0
    stalled.update(7.0, must_decide=False)
    assert stalled.due is None
    assert stalled.report(None, 99.0) == []


def test_when_time_is_over_it_names_who_has_not_voted() -> None:
    stalled, suspicions = some()
    suspicions.add(4, silent(), 5.0)
    stalled.update(5.0, must_decide=True)
    agreement = Agreement((0, 1, 0), 1, Electorate(FOUR))
    agreement.propose(b"v", 5.0)
    agreement.receive(2, Promise((0, 1, 0), BallotNumber(1, 1)), 5.0)
    assert stalled.report(agreement, 34.9) == []
    assert stalled.report(agreement, 35.0) == [NoProgress((1, 2, 3, SEED_NODE), 3, (3, 4, SEED_NODE))]
    assert stalled.report(agreement, 99.0) == []
    assert stalled.reported


def test_who_has_no_ballot_can_only_say_who_could_have_voted() -> None:
    stalled, _ = some()
    stalled.update(5.0, must_decide=True)
    assert stalled.report(None, 35.0) == [NoProgress((1, 2, 3, 4, SEED_NODE), 3, (2, 3, 4, SEED_NODE))]


def test_without_a_majority_it_waits_only_until_the_losses_are_sure() -> None:
    stalled, suspicions = some()
    stalled.update(5.0, must_decide=True)
    for node in (3, 4, SEED_NODE):
        suspicions.add(node, silent(), 6.0)
    assert stalled.due == 7.0
    assert stalled.report(None, 7.0) == [NoProgress((1, 2), 3, ())]


def test_those_that_left_by_their_own_will_are_named() -> None:
    stalled, suspicions = some()
    stalled.update(5.0, must_decide=True)
    for node in (3, 4):
        suspicions.add(node, left("it left"), 6.0, willing=True)
        suspicions.add(node, silent("its connection ended"), 6.0)
    suspicions.add(SEED_NODE, silent(), 6.0)
    assert stalled.report(None, 7.0) == [NoProgress((1, 2), 3, (), left=(3, 4))]


def test_a_node_that_runs_slowly_says_it_later_by_its_own_delay() -> None:
    suspicions = Suspicions(1, FOUR)
    stalled = StallTimer(
        1, Electorate(FOUR), suspicions, recovery_timeout=30.0, probe_timeout=1.0, own_delay=lambda: 8.0
    )
    stalled.update(5.0, must_decide=True)
    assert stalled.due == 43.0
    for node in (2, 3, 4):
        suspicions.add(node, silent(), 6.0)
    assert stalled.due == 15.0


def of_rank_2() -> Suspicions:
    return Suspicions(3, FOUR)


def test_a_suspicion_is_news_once() -> None:
    suspicions = of_rank_2()
    assert suspicions.add(4, silent(), 1.0)
    assert not suspicions.add(4, silent(), 2.0)
    assert (suspicions.urgent_since, suspicions.urgent, suspicions[4].loss.text) == (1.0, (4,), "silence")


def test_lower_ranks_and_votes_are_counted_as_they_come_and_go() -> None:
    suspicions = of_rank_2()
    for node in (1, 4, SEED_NODE):
        suspicions.add(node, silent(), 1.0)
    assert (suspicions.lower_rank_count, suspicions.votes, len(suspicions)) == (1, 3, 3)
    assert suspicions.drop(1)
    assert not suspicions.drop(1)
    assert (suspicions.lower_rank_count, suspicions.votes, list(suspicions)) == (0, 2, [4, SEED_NODE])


def test_the_seed_is_missed_but_never_removed() -> None:
    suspicions = of_rank_2()
    assert not suspicions.add(SEED_NODE, silent(), 1.0)
    assert suspicions.urgent_since is None
    assert suspicions.removable() == []
    assert Suspicions(1, a_membership(3)).votes == 0


def test_who_left_willingly_is_quiet_until_it_is_needed() -> None:
    suspicions = Suspicions(1, a_membership(5))
    suspicions.add(4, left(), 1.0, willing=True)
    suspicions.add(5, silent(), 1.0)
    assert [suspicions.is_quiet(node) for node in (3, 4, 5)] == [False, True, False]
    assert (suspicions.removable(), suspicions.removable(lost=False)) == ([4, 5], [4])
    assert suspicions.leave_majority
    suspicions.add(3, silent(), 1.0)
    assert not suspicions.leave_majority
    suspicions.add(4, silent("needed"), 2.0)
    assert not suspicions.is_quiet(4)


def test_who_left_willingly_is_not_urgent_until_something_makes_it_so() -> None:
    suspicions = of_rank_2()
    assert suspicions.add(4, left(), 1.0, willing=True)
    assert not suspicions.add(4, left(), 2.0, willing=True)
    assert (suspicions.urgent_since, suspicions.willing_since) == (None, 1.0)
    assert suspicions.add(4, silent("its process ended"), 3.0)
    assert (suspicions.urgent_since, suspicions.willing_since) == (3.0, None)
    assert (suspicions[4].loss.text, suspicions[4].willing) == ("bye", True)


def test_what_a_node_says_itself_is_the_better_cause() -> None:
    suspicions = of_rank_2()
    suspicions.add(4, silent("its process ended"), 1.0)
    suspicions.add(4, left("ValueError: no"), 2.0, willing=True)
    assert (suspicions[4].loss.text, suspicions.urgent_since) == ("ValueError: no", 1.0)


@pytest.mark.parametrize("kind", LossKind)
@pytest.mark.parametrize("later", LossKind)
def test_of_two_losses_the_one_of_the_higher_kind_is_kept_whatever_their_words(kind: LossKind, later: LossKind) -> None:
    suspicions = of_rank_2()
    suspicions.add(4, Loss(kind, "its process has ended"), 1.0)
    suspicions.add(4, Loss(later, "its connection to the seed broke"), 2.0)
    assert suspicions[4].loss.kind is max(kind, later, key=lambda each: each.value)
    assert len(suspicions) == 1


def test_all_can_be_hurried() -> None:
    suspicions = of_rank_2()
    suspicions.add(4, left(), 1.0, willing=True)
    suspicions.make_urgent(5.0)
    assert suspicions.urgent_since == 5.0


def test_a_dispute_lets_a_suspicion_rest_and_wakes_it_again() -> None:
    suspicions = of_rank_2()
    suspicions.add(4, silent(), 1.0)
    assert suspicions.dispute(4, until=3.0) == 1
    assert (suspicions.urgent_since, suspicions.disputed_until, suspicions.removable()) == (None, 3.0, [])
    assert not suspicions.add(4, silent(), 2.0)
    assert not suspicions.end_disputes(2.9)
    assert suspicions.end_disputes(3.0)
    assert (suspicions.urgent_since, suspicions.disputed_until) == (3.0, None)
    assert suspicions.dispute(4, until=9.0) == 2
    suspicions.drop(4)
    assert suspicions.disputed_until is None


def test_those_to_remove_are_in_order_of_rank() -> None:
    suspicions = of_rank_2()
    for node in (4, 1):
        suspicions.add(node, silent(), 1.0)
    suspicions.add(2, left(), 1.0, willing=True)
    assert suspicions.removable() == [1, 2, 4]


def test_only_members_that_remain_are_carried_on_as_new_suspicions() -> None:
    suspicions = of_rank_2()
    suspicions.add(1, silent(), 1.0)
    suspicions.add(4, silent(), 1.0)
    suspicions.add(2, left(), 1.0, willing=True)
    kept = suspicions.carried(3, a_membership(3, epoch=2), 7.0)
    assert dict(kept).keys() == {1, 2}
    assert (kept.urgent, kept.urgent_since, kept.willing_since, kept.newest) == ((1,), 7.0, 7.0, 7.0)
    assert (kept[1].disputes, kept[2].willing) == (0, True)


def test_a_dispute_goes_on_in_the_next_membership() -> None:
    suspicions = of_rank_2()
    suspicions.add(1, silent(), 1.0)
    suspicions.dispute(1, until=9.0, latest=20.0)
    kept = suspicions.carried(3, a_membership(3, epoch=2), 7.0)
    assert (kept.urgent, kept.disputed_until, kept[1].disputes) == ((), 20.0, 1)
    kept.probe_missed(1)
    assert kept.end_disputes(9.0)
    assert kept.dispute(1, until=30.0) == 2


def test_suspicions_are_sent_again_soon_also_by_a_node_that_runs_slowly() -> None:
    suspicions = Suspicions(2, MANY)
    suspicions.add(9, silent(), 0.0)
    accusations = SuspicionBroadcast(2, MANY, suspicions, lambda: 10.0)
    accusations.messages(0.0, repeat=True)
    assert accusations.again == 2.0
    accusations.saw_proposal(1.5)
    assert accusations.again == 3.5
