"""What was chosen is kept for those who are behind, within bounds; what comes too early waits for its turn.

Members that die, are cut off, leave and come: the others agree, and nobody is removed on one message.
"""

from random import Random

import pytest

from nexar.cluster.decisions.membership_events import (
    ChangeRequested,
    MembershipDecided,
    MessageReceived,
    PeerLossFound,
    PeerReachable,
    ProbeFinished,
    RecoverNow,
    ResignRequested,
    SelfExpelled,
    SendMessage,
    StartProbe,
    Tick,
)
from nexar.cluster.decisions.membership_machine import KEPT, DecidedChanges, MembershipMachine, request_changes
from nexar.cluster.decisions.proposal import WILLING_DELAY
from nexar.cluster.membership import Change, Departure
from nexar.wire.control import Accept, Accepted, BallotNumber, Chosen, Prepare, Promise, Rejected, Suspect
from tests.losses import left, silent
from tests.unit.cluster.decisions.voters import SEED_NODE, Parliament, a_member, a_membership


def a_history(first: int, last: int) -> DecidedChanges:
    history = DecidedChanges()
    for epoch in range(first, last + 1):
        history.add(epoch, b"%d" % epoch)
    return history


def test_who_is_behind_is_notified_what_followed_in_order() -> None:
    assert a_history(1, 3).messages_for(9, 2) == [
        SendMessage(9, Chosen((0, 2, 0), b"2")),
        SendMessage(9, Chosen((0, 3, 0), b"3")),
    ]
    assert a_history(1, 3).messages_for(9, 4) == []
    assert a_history(5, 6).messages_for(9, 4) == [], "the next one is not known, so the others do not help"
    assert len(a_history(1, 100).messages_for(9, 1)) == 16, "the rest when it asks again"


def test_all_changes_since_an_epoch() -> None:
    assert a_history(1, 3).since(2) == [b"2", b"3"]
    assert a_history(1, 3).since(4) == []
    assert a_history(5, 6).since(4) == [], "one of them is not known"


def test_it_forgets_the_oldest() -> None:
    history = a_history(1, KEPT + 1)
    assert history.since(1) == []
    assert len(history.since(2)) == KEPT


def test_what_comes_too_early_waits_and_the_nearest_are_kept() -> None:
    history = DecidedChanges()
    for epoch in range(100, 0, -1):
        history.keep_for_later(epoch, b"%d" % epoch)
    assert history.take(1) == b"1"
    assert history.take(1) is None
    assert history.take(100) is None


def test_what_came_too_early_is_news_once() -> None:
    history = DecidedChanges()
    assert [history.keep_for_later(epoch, b"x") for epoch in (5, 5, 6)] == [True, False, True]


def test_to_ask_is_a_ballot_that_nobody_else_has() -> None:
    assert request_changes(7, 9, 3) == SendMessage(9, Prepare((0, 3, 0), BallotNumber(0, 7)))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 8])
def test_the_survivors_agree_at_once_when_one_dies(size: int) -> None:
    house = Parliament(size)
    house.kill(size)
    house.run(0.02)
    assert house.agreed() == list(range(1, size))
    assert house.member(1).membership.epoch == 2
    assert house.seed_voter.membership.epoch == 2


def test_rank_0_may_die_first_and_the_others_one_after_another() -> None:
    house = Parliament(7)
    for victim in (1, 2, 3, 4):
        house.kill(victim)
        house.run(0.3)
        assert house.agreed() == list(range(victim + 1, 8))
    assert house.member(7).membership.epoch == 5


def test_two_that_die_at_once_are_removed_by_few_changes() -> None:
    house = Parliament(7)
    house.kill(1, 2)
    house.run(0.3)
    assert house.agreed() == [3, 4, 5, 6, 7]


def test_who_dies_while_it_proposes_is_replaced() -> None:
    house = Parliament(5)
    house.kill(5)
    house.run(0.0015)  # the lowest has asked, nobody has answered
    house.kill(1)
    house.run(0.5)
    assert house.agreed() == [2, 3, 4]


@pytest.mark.parametrize("chance", range(4))
def test_slow_answers_do_not_make_proposers_outbid_one_another_for_ever(chance: int) -> None:
    """All have had their turn before the first ballot is answered."""
    house = Parliament(10, chance=chance, latency=lambda random: random.uniform(0.3, 0.6))
    house.kill(5)
    house.run(6.0)
    assert house.agreed() == [1, 2, 3, 4, 6, 7, 8, 9, 10]
    rounds = [said.message.ballot.round for _, said in house.said if isinstance(said.message, Prepare)]
    assert max(rounds) <= 3


def test_suspicions_are_not_repeated_to_ever_more_members_while_one_proposes() -> None:
    """Each message may need a new link; 21,000 were sent where answers took long."""
    house = Parliament(64, latency=lambda random: random.uniform(0.3, 0.9))
    house.kill(*range(1, 64, 4))
    house.run(6.0)
    assert house.agreed() == [node for node in range(1, 65) if node % 4 != 1]
    suspicions = [said for _, said in house.said if isinstance(said.message, Suspect)]
    assert len(suspicions) < 2 * 16 * 48 * 4  # each survivor informs the four lowest ranks of each loss


@pytest.mark.parametrize("moment", [0.0005 * each for each in range(1, 12)])
def test_a_proposer_may_die_between_any_two_messages_and_nobody_notices_it_but_the_detector(moment: float) -> None:
    house = Parliament(4)
    house.kill(4)
    house.run(moment)
    house.dead.add(1)
    house.run(0.2)
    for node in (2, 3):
        house.feed(node, PeerLossFound(1, silent()))
    house.run(3.0)
    assert house.agreed() == [2, 3]


def test_one_watcher_is_enough_the_others_look_for_themselves() -> None:
    house = Parliament(20)
    house.kill(20, seen_by=[15])
    house.run(1.0)
    assert house.agreed() == list(range(1, 20))


def test_nobody_is_removed_on_the_report_of_one_node_alone() -> None:
    house = Parliament(5)
    house.feed(1, PeerLossFound(5, silent("I just say so")))
    house.run(0.5)
    assert house.agreed() == [1, 2, 3, 4, 5]
    assert not house.adopted


def test_two_ranks_and_the_seed_go_on_when_one_dies_and_without_the_seed_there_is_no_quorum() -> None:
    house = Parliament(2)
    house.kill(2)
    house.run(0.1)
    assert house.agreed() == [1]
    house = Parliament(2)
    house.dead.add(SEED_NODE)
    house.feed_all(PeerLossFound(SEED_NODE, silent("it ended")))
    house.kill(2)
    house.run(0.5)
    (stall,) = house.stalls[1]
    assert (stall.alive, stall.needed, stall.missing_votes) == ((1,), 2, ())
    assert not house.adopted


def test_an_even_split_is_decided_by_the_side_that_has_the_seed_and_the_other_is_notified_when_it_heals() -> None:
    house = Parliament(4)
    house.split([1, 2], [3, 4, SEED_NODE])
    for here, there in ((1, 3), (1, 4), (2, 3), (2, 4)):
        house.feed(here, PeerLossFound(there, silent()))
        house.feed(there, PeerLossFound(here, silent()))
    house.feed(1, PeerLossFound(SEED_NODE, silent()))
    house.feed(2, PeerLossFound(SEED_NODE, silent()))
    house.run(2.0)
    assert house.nodes_of(3) == house.nodes_of(4) == [3, 4]
    assert {node: len(stalls) for node, stalls in house.stalls.items()} == {1: 1, 2: 1}
    house.cut.clear()
    house.run(10.0)
    assert set(house.expelled) == {1, 2}
    assert house.nodes_of(3) == [3, 4]


def test_of_three_and_two_the_three_go_on() -> None:
    house = Parliament(5)
    house.split([1, 2], [3, 4, 5, SEED_NODE])
    for here in (1, 2):
        for there in (3, 4, 5):
            house.feed(here, PeerLossFound(there, silent()))
            house.feed(there, PeerLossFound(here, silent()))
    house.run(5.0)
    assert house.nodes_of(5) == [3, 4, 5]
    assert house.nodes_of(1) == [1, 2, 3, 4, 5]
    assert set(house.stalls) == {1, 2}


def test_when_all_are_apart_nobody_goes_on() -> None:
    house = Parliament(3)
    house.split([1], [2], [3], [SEED_NODE])
    for here in (1, 2, 3):
        for there in (1, 2, 3):
            house.feed(here, PeerLossFound(there, silent()))
    house.run(5.0)
    assert not house.adopted
    assert set(house.stalls) == {1, 2, 3}


@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_of_two_that_only_cannot_reach_each_other_the_higher_rank_leaves_and_is_notified_why(size: int) -> None:
    house = Parliament(size)
    house.cut.add(frozenset((1, size)))
    house.feed(1, PeerLossFound(size, silent()))
    house.feed(size, PeerLossFound(1, silent()))
    house.run(10.0)
    assert house.agreed() == list(range(1, size))
    assert house.expelled[size].reason == f"rank {size - 1} cannot reach rank 0, which the others reach"


def test_the_higher_one_leaves_too_if_only_the_lower_one_noticed() -> None:
    house = Parliament(5)
    house.cut.add(frozenset((2, 4)))
    house.feed(2, PeerLossFound(4, silent()))
    house.run(10.0)
    assert house.agreed() == [1, 2, 3, 5]
    assert "cannot reach rank 1" in house.expelled[4].reason


def test_a_way_that_comes_back_in_time_costs_nobody_the_place() -> None:
    house = Parliament(5)
    house.cut.add(frozenset((2, 4)))
    house.feed(2, PeerLossFound(4, silent()))
    house.feed(4, PeerLossFound(2, silent()))
    house.run(0.05)
    house.cut.clear()
    house.feed(2, PeerReachable(4))
    house.feed(4, PeerReachable(2))
    house.run(10.0)
    assert house.agreed() == [1, 2, 3, 4, 5]
    assert not house.expelled


def test_a_connection_that_was_made_anew_gives_a_successor_with_the_same_members() -> None:
    house = Parliament(4)
    house.feed(2, PeerLossFound(4, silent("reset")))
    house.feed(2, PeerReachable(4, severed=True))
    house.feed(4, PeerReachable(2, severed=True))
    house.run(1.0)
    assert house.agreed() == [1, 2, 3, 4]
    assert {change.change.severed for adopts in house.adopted.values() for change in adopts} == {((2, 4),)}
    assert house.member(1).membership.epoch == 2


def test_who_resigns_is_removed_at_once_and_learns_it() -> None:
    house = Parliament(4)
    house.feed(3, ResignRequested("I am done"))
    house.run(0.05)
    assert house.agreed() == [1, 2, 4]
    assert house.expelled[3].reason == "I am done"


def test_joiners_and_leavers_that_all_agreed_on_come_and_go_in_one_change() -> None:
    house = Parliament(3)
    newcomer = a_member(9)
    house.seed_voter.admitted = frozenset({9})
    house.feed_all(ChangeRequested(joined=(newcomer,), left=(Departure(1, "it asked for it", willing=True),)))
    house.run(1.0)
    assert house.nodes_of(2) == [2, 3, 9] == house.nodes_of(3)
    assert house.expelled[1].reason == "it asked for it"
    assert house.member(2).membership.epoch == 2


def test_a_request_of_another_epoch_is_forgotten() -> None:
    house = Parliament(3)
    house.feed_all(ChangeRequested(renewed=(7,), epoch=2))
    house.run(1.0)
    assert not house.adopted


def test_a_joiner_is_accepted_only_where_it_is_known_and_one_who_learns_later_agrees_later() -> None:
    house = Parliament(3, seed=False)
    newcomer = a_member(9)
    house.feed(1, ChangeRequested(joined=(newcomer,)))
    house.run(0.5)
    assert not house.adopted
    house.feed(2, ChangeRequested(joined=(newcomer,)))
    house.run(0.5)
    assert house.nodes_of(3) == [1, 2, 3, 9]


def test_who_left_willingly_is_cleared_away_after_a_while() -> None:
    house = Parliament(4)
    house.dead.add(4)
    house.feed_all(PeerLossFound(4, left(), willing=True))
    house.run(WILLING_DELAY - 0.1)
    assert not house.adopted
    house.run(0.5)
    assert house.agreed() == [1, 2, 3]


def test_who_has_closed_goes_quietly_and_who_is_needed_does_not() -> None:
    house = Parliament(4)
    house.dead.update((3, 4))
    for node in (3, 4):
        house.feed_all(PeerLossFound(node, left(), willing=True))
    house.feed(2, PeerLossFound(4, silent("somebody needs it")))
    house.run(WILLING_DELAY + 1.0)
    assert house.agreed() == [1, 2]
    departures = {each.node: each for adopt in house.adopted[1] for each in adopt.change.left}
    assert {node: (each.willing, each.quiet) for node, each in departures.items()} == {
        3: (True, True),
        4: (True, False),
    }


def test_who_leave_one_after_another_leave_a_majority_behind_each_time() -> None:
    house = Parliament(5)
    for node in (5, 3, 4):
        house.dead.add(node)
        house.feed_all(PeerLossFound(node, left(), willing=True))
        house.run(WILLING_DELAY + 1.0)
    assert house.agreed() == [1, 2]
    house.kill(1)
    house.run(1.0)
    assert house.nodes_of(2) == [2]
    assert not house.stalls


def test_where_no_majority_is_left_who_has_closed_is_no_reason_to_say_so() -> None:
    house = Parliament(2, seed=False)
    house.dead.add(2)
    house.feed(1, PeerLossFound(2, left(), willing=True))
    house.run(60.0)
    assert not house.adopted
    assert not house.stalls


def test_under_the_manual_policy_who_has_closed_goes_and_who_is_lost_does_not() -> None:
    house = Parliament(5, active=False)
    house.dead.add(5)
    house.feed_all(PeerLossFound(5, left(), willing=True))
    house.kill(4)
    house.run(WILLING_DELAY + 1.0)
    assert house.nodes_of(1) == [1, 2, 3, 4]


def test_what_all_agreed_on_survives_that_somebody_goes_quietly() -> None:
    """A checkpoint was agreed on in the first epoch, and some learn of the second before they say so."""
    house = Parliament(4)
    newcomer = a_member(9)
    house.feed(1, ChangeRequested(renewed=(7,)))
    house.run(0.5)
    assert house.member(1).membership.epoch == 2
    for node in (1, 2, 3, 4):
        house.feed(node, ChangeRequested(joined=(newcomer,), epoch=1))
    house.run(0.5)
    assert house.nodes_of(1) == [1, 2, 3, 4, 9]
    house.feed_all(ChangeRequested(left=(Departure(4, "too late", willing=True),), epoch=1))
    house.run(1.0)
    assert house.nodes_of(1) == [1, 2, 3, 4, 9], "that world's communicator is over"


def test_something_urgent_takes_the_willing_along() -> None:
    house = Parliament(5)
    house.dead.add(4)
    house.feed_all(PeerLossFound(4, left(), willing=True))
    house.kill(5)
    house.run(0.05)
    assert house.agreed() == [1, 2, 3]
    assert house.member(1).membership.epoch == 2


def test_under_the_manual_policy_nobody_proposes_before_somebody_asks_for_it() -> None:
    house = Parliament(4, active=False)
    house.kill(4)
    house.run(20.0)
    assert not house.adopted
    assert not house.stalls
    house.feed(2, RecoverNow())
    house.run(1.0)
    assert house.agreed() == [1, 2, 3]
    house.kill(3)  # another epoch: somebody has to ask again
    house.run(20.0)
    assert house.agreed() == [1, 2, 3]


def test_a_minority_stalls_once_and_keeps_asking_rarely() -> None:
    house = Parliament(5, recovery_timeout=3.0)
    house.kill(3, 4, 5)
    house.run(0.5)
    assert {node: len(stalls) for node, stalls in house.stalls.items()} == {1: 1, 2: 1}
    assert house.stalls[1][0].alive == (1, 2)
    assert house.stalls[1][0].needed == 3
    before = len(house.said)
    house.run(30.0)
    assert before < len(house.said) < before + 200
    assert len(house.stalls[1]) == 1


def test_a_majority_that_does_not_finish_says_who_has_not_voted() -> None:
    house = Parliament(5, recovery_timeout=3.0)
    house.dead |= {3, 4}  # and nobody notices
    house.kill(5)
    house.run(4.0)
    assert set(house.stalls[1][0].missing_votes) >= {3, 4}


def test_who_missed_several_changes_receives_all_of_them_in_order() -> None:
    house = Parliament(7)
    house.split([7], [1, 2, 3, 4, 5, 6, SEED_NODE])
    for victim in (1, 2):
        house.kill(victim, seen_by=[3, 4, 5, 6])
        house.run(0.5)
    assert house.member(7).membership.epoch == 1
    house.cut.clear()
    house.feed(7, PeerLossFound(1, silent()))
    house.run(3.0)
    assert house.agreed() == [3, 4, 5, 6, 7]
    assert [adopt.change.epoch for adopt in house.adopted[7]] == [2, 3]


def test_the_seed_catches_up_after_it_was_away() -> None:
    house = Parliament(5)
    house.split([SEED_NODE], [1, 2, 3, 4, 5])
    house.kill(5)
    house.run(0.5)
    assert house.seed_voter.membership.epoch == 1
    house.cut.clear()
    house.kill(4)  # four members: its vote may be asked
    house.run(1.0)
    assert house.agreed() == [1, 2, 3]
    assert house.seed_voter.membership.epoch == house.member(1).membership.epoch == 3


def test_chosen_changes_bring_others_up_to_date() -> None:
    house = Parliament(5)
    house.kill(5)
    house.run(0.1)
    house.kill(4)
    house.run(0.1)
    assert len(house.member(1).changes_since(1)) == 2
    assert len(house.member(1).changes_since(2)) == 1
    assert house.member(1).changes_since(3) == []


def test_a_voter_that_claims_to_have_accepted_what_is_no_change_binds_nobody() -> None:
    me = MembershipMachine(2, a_membership(3), recovery_timeout=10.0, random=Random(1))
    actions = me.step(PeerLossFound(3, silent()), 0.0)
    moment = 0.0
    while not (
        asked := [
            each.message for each in actions if isinstance(each, SendMessage) and isinstance(each.message, Prepare)
        ]
    ):
        moment = me.due(moment) or moment
        actions = me.step(Tick(), moment)
    ballot = asked[0].ballot
    me.step(MessageReceived(1, Promise((0, 1, 0), ballot, BallotNumber(0, 1), b"no change")), moment)
    me.step(Tick(), moment + 0.05)
    me.step(MessageReceived(1, Accepted((0, 1, 0), ballot)), moment + 0.05)
    me.step(Tick(), moment + 0.2)
    assert me.membership.epoch == 1


@pytest.mark.parametrize(
    "value",
    [
        b"no change",
        Change(3, left=(Departure(3, "silence"),)).encode(),
        Change(2, left=tuple(Departure(node, "silence") for node in (1, 2, 3))).encode(),
        Change(2, left=(Departure(99, "silence"),)).encode(),
    ],
    ids=["garbage", "of another epoch", "that removes everybody", "that removes a stranger"],
)
def test_a_forged_chosen_is_ignored(value: bytes) -> None:
    me = MembershipMachine(1, a_membership(3), recovery_timeout=10.0, random=Random(1))
    actions = me.step(MessageReceived(2, Chosen((0, 1, 0), value)), 0.0)
    assert not any(isinstance(each, MembershipDecided | SelfExpelled) for each in actions)
    assert (me.membership.epoch, me.expelled) == (1, False)
    true = Change(2, left=(Departure(3, "silence"),))
    assert me.step(MessageReceived(2, Chosen((0, 1, 0), true.encode())), 1.0) == [MembershipDecided(true)]


def asking(me: MembershipMachine, lost: int, *voters: int) -> tuple[BallotNumber, float]:
    """Let it find this member lost, and propose its removal, for which these promise their votes if they are asked."""
    actions, moment = me.step(PeerLossFound(lost, silent()), 0.0), 0.0
    actions += me.step(Tick(), moment)
    while not (
        asked := [
            each.message
            for each in actions
            if isinstance(each, SendMessage) and isinstance(each.message, Prepare | Accept)
        ]
    ):
        moment = me.due(moment) or moment
        actions = me.step(Tick(), moment)
    ballot = asked[0].ballot
    if isinstance(asked[0], Accept):
        return ballot, moment
    said = [each for voter in voters for each in me.step(MessageReceived(voter, Promise((0, 1, 0), ballot)), moment)]
    assert any(isinstance(each, SendMessage) and isinstance(each.message, Accept) for each in said)
    return ballot, moment


@pytest.mark.parametrize("others", [(), (4,)], ids=["alone", "beside another one"])
def test_votes_that_come_after_a_suspect_was_found_again_remove_nobody(others: tuple[int, ...]) -> None:
    me = MembershipMachine(1, a_membership(5), recovery_timeout=10.0, random=Random(1))
    for other in others:
        me.step(PeerLossFound(other, silent()), 0.0)
    ballot, moment = asking(me, 5, 2, 3)
    me.step(PeerReachable(5), moment)
    for voter in (2, 3):
        actions = me.step(MessageReceived(voter, Accepted((0, 1, 0), ballot)), moment)
        assert not any(isinstance(each, MembershipDecided) for each in actions)
    assert me.membership.epoch == 1


def test_a_good_probe_of_a_disputed_suspect_clears_it() -> None:
    me = MembershipMachine(1, a_membership(5), recovery_timeout=10.0, random=Random(1))
    ballot, moment = asking(me, 5, 2, 3)
    said = [
        each
        for voter in (2, 3)
        for each in me.step(MessageReceived(voter, Rejected((0, 1, 0), ballot, None, (5,))), moment)
    ]
    assert StartProbe(5) in said
    assert 5 in me.suspects()
    me.step(ProbeFinished(5, None), moment + 0.01)
    assert me.suspects() == {}


def test_a_good_probe_of_a_suspect_that_nobody_disputes_clears_nothing() -> None:
    me = MembershipMachine(1, a_membership(5), recovery_timeout=10.0, random=Random(1))
    me.step(PeerLossFound(5, silent()), 0.0)
    me.step(ProbeFinished(5, None), 0.01)
    assert 5 in me.suspects()


def test_a_member_does_not_vote_in_a_ballot_of_the_seed() -> None:
    me = MembershipMachine(1, a_membership(4), recovery_timeout=10.0, random=Random(1))
    ballot = Prepare((0, 1, 0), BallotNumber(1, SEED_NODE))
    assert me.step(MessageReceived(SEED_NODE, ballot), 0.0) == []
    (answer,) = me.step(MessageReceived(2, Prepare((0, 1, 0), BallotNumber(1, 2))), 0.0)
    assert answer == SendMessage(2, Promise((0, 1, 0), BallotNumber(1, 2)))
