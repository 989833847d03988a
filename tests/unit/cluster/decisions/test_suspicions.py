"""Whom a node cannot reach: urgent, willing, disputed; counted as they come and go."""

from nexar.cluster.decisions.suspicions import Suspicions
from tests.unit.cluster.decisions.parliament import SEED, a_membership

FOUR = a_membership(4)


def of_rank_2() -> Suspicions:
    return Suspicions(3, FOUR)


def test_a_suspicion_is_news_once() -> None:
    suspicions = of_rank_2()
    assert suspicions.add(4, "silence", 1.0)
    assert not suspicions.add(4, "silence", 2.0)
    assert (suspicions.urgent_since, suspicions.urgent, suspicions[4].cause) == (1.0, (4,), "silence")


def test_lower_ranks_and_votes_are_counted_as_they_come_and_go() -> None:
    suspicions = of_rank_2()
    for node in (1, 4, SEED):
        suspicions.add(node, "silence", 1.0)
    assert (suspicions.lower, suspicions.votes, len(suspicions)) == (1, 3, 3)
    assert suspicions.drop(1)
    assert not suspicions.drop(1)
    assert (suspicions.lower, suspicions.votes, list(suspicions)) == (0, 2, [4, SEED])


def test_the_seed_is_missed_but_never_removed() -> None:
    suspicions = of_rank_2()
    assert not suspicions.add(SEED, "silence", 1.0)
    assert suspicions.urgent_since is None
    assert suspicions.removable() == []
    assert Suspicions(1, a_membership(3)).votes == 0


def test_who_left_willingly_is_quiet_until_it_is_needed() -> None:
    suspicions = Suspicions(1, a_membership(5))
    suspicions.add(4, "bye", 1.0, willing=True)
    suspicions.add(5, "silence", 1.0)
    assert [suspicions.is_quiet(node) for node in (3, 4, 5)] == [False, True, False]
    assert (suspicions.removable(), suspicions.removable(lost=False)) == ([4, 5], [4])
    assert suspicions.leave_majority
    suspicions.add(3, "silence", 1.0)
    assert not suspicions.leave_majority
    suspicions.add(4, "needed", 2.0)
    assert not suspicions.is_quiet(4)


def test_who_left_willingly_is_not_urgent_until_something_makes_it_so() -> None:
    suspicions = of_rank_2()
    assert suspicions.add(4, "bye", 1.0, willing=True)
    assert not suspicions.add(4, "bye", 2.0, willing=True)
    assert (suspicions.urgent_since, suspicions.willing_since) == (None, 1.0)
    assert suspicions.add(4, "its process ended", 3.0)
    assert (suspicions.urgent_since, suspicions.willing_since) == (3.0, None)
    assert (suspicions[4].cause, suspicions[4].willing) == ("bye", True)


def test_what_a_node_says_itself_is_the_better_cause() -> None:
    suspicions = of_rank_2()
    suspicions.add(4, "its process ended", 1.0)
    suspicions.add(4, "ValueError: no", 2.0, willing=True)
    assert (suspicions[4].cause, suspicions.urgent_since) == ("ValueError: no", 1.0)


def test_all_can_be_hurried() -> None:
    suspicions = of_rank_2()
    suspicions.add(4, "bye", 1.0, willing=True)
    suspicions.hurry(5.0)
    assert suspicions.urgent_since == 5.0


def test_a_dispute_lets_a_suspicion_rest_and_wakes_it_again() -> None:
    suspicions = of_rank_2()
    suspicions.add(4, "silence", 1.0)
    assert suspicions.dispute(4, until=3.0) == 1
    assert (suspicions.urgent_since, suspicions.disputed_until, suspicions.removable()) == (None, 3.0, [])
    assert not suspicions.add(4, "silence", 2.0)
    assert not suspicions.wake(2.9)
    assert suspicions.wake(3.0)
    assert (suspicions.urgent_since, suspicions.disputed_until) == (3.0, None)
    assert suspicions.dispute(4, until=9.0) == 2
    suspicions.drop(4)
    assert suspicions.disputed_until is None


def test_those_to_remove_are_in_order_of_rank() -> None:
    suspicions = of_rank_2()
    for node in (4, 1):
        suspicions.add(node, "silence", 1.0)
    suspicions.add(2, "bye", 1.0, willing=True)
    assert suspicions.removable() == [1, 2, 4]


def test_only_who_is_still_there_is_carried_on_and_counts_as_new() -> None:
    suspicions = of_rank_2()
    suspicions.add(1, "silence", 1.0)
    suspicions.add(4, "silence", 1.0)
    suspicions.add(2, "bye", 1.0, willing=True)
    suspicions.dispute(1, until=99.0)
    kept = suspicions.carried(3, a_membership(3, epoch=2), 7.0)
    assert dict(kept).keys() == {1, 2}
    assert (kept.urgent, kept.urgent_since, kept.willing_since, kept.newest) == ((1,), 7.0, 7.0, 7.0)
    assert (kept[1].disputes, kept[2].willing) == (0, True)
