"""One instance at one node, message by message; the network of many is in tests/hostile.

A ballot counts each voter once, and finds out what must be proposed.

The members vote, and the seed with them when they are even in number.

A vote remembers promises and what was accepted, in memory and on a disk.
"""

from itertools import pairwise
from random import Random

import pytest

from nexar.cluster.decisions.membership_events import MembershipMessage, SendMessage
from nexar.cluster.decisions.paxos import (
    LATER,
    OK,
    Agreement,
    Ballot,
    Electorate,
    Vote,
    VoteAnswer,
    VoteDecision,
    accept_any,
    majority,
)
from nexar.wire.control import Accept, Accepted, BallotNumber, Chosen, Prepare, Promise, Rejected
from tests.unit.cluster.decisions.voters import SEED_NODE, a_membership

HERE = (0, 1, 0)
THREE = frozenset({1, 2, 3})


def an_agreement(me: int = 1, voters: frozenset[int] = THREE, vote: Vote | None = None) -> Agreement:
    return Agreement(HERE, me, voters, random=Random(1), vote=vote)


def messages(says: list[SendMessage]) -> dict[int, MembershipMessage]:
    return {say.node: say.message for say in says}


def ballot(number: int, node: int = 1) -> BallotNumber:
    return BallotNumber(number, node)


def test_a_single_voter_decides_by_itself() -> None:
    alone = an_agreement(voters=frozenset({1}))
    assert alone.propose(b"v", 0.0) == []
    assert alone.chosen == b"v"


def test_prepare_promise_accept_accepted_chosen() -> None:
    one, two = an_agreement(1), an_agreement(2)
    said = messages(one.propose(b"v", 0.0))
    assert said == {2: Prepare(HERE, ballot(1)), 3: Prepare(HERE, ballot(1))}
    (promise,) = two.receive(1, said[2], 0.0)
    said = messages(one.receive(2, promise.message, 0.0))
    assert said == {2: Accept(HERE, ballot(1), b"v"), 3: Accept(HERE, ballot(1), b"v")}
    assert one.vote.accepted is None, "the proposer's own vote comes last"
    (accepted,) = two.receive(1, said[2], 0.0)
    said = messages(one.receive(2, accepted.message, 0.0))
    assert said == {2: Chosen(HERE, b"v"), 3: Chosen(HERE, b"v")}
    assert one.chosen == one.vote.value == b"v"
    assert two.receive(1, said[2], 0.0) == []
    assert two.chosen == b"v"


def an_owner(voters: frozenset[int] = THREE) -> Agreement:
    """Of round 0."""
    return Agreement(HERE, 1, voters, random=Random(1), owns_round_0=True)


def test_the_owner_of_round_0_needs_no_promises() -> None:
    one, two = an_owner(), an_agreement(2)
    said = messages(one.propose(b"v", 0.0))
    assert said == {2: Accept(HERE, ballot(0), b"v"), 3: Accept(HERE, ballot(0), b"v")}
    assert one.vote.accepted is None, "the proposer's own vote comes last"
    (accepted,) = two.receive(1, said[2], 0.0)
    one.receive(2, accepted.message, 0.0)
    assert one.chosen == b"v"


def test_the_owner_of_round_0_proposes_one_value_in_it() -> None:
    one = an_owner()
    one.propose(b"v", 0.0)
    one.withdraw()
    assert messages(one.propose(b"w", 0.0))[2] == Prepare(HERE, ballot(1))


def test_the_owner_of_round_0_does_not_use_it_after_a_promise() -> None:
    one = an_owner()
    one.receive(3, Prepare(HERE, ballot(0, 3)), 0.0)
    assert messages(one.propose(b"v", 0.0))[2] == Prepare(HERE, ballot(1))


def test_what_was_accepted_in_round_0_binds_later_ballots() -> None:
    one, two, three = an_owner(), an_agreement(2), an_agreement(3)
    accept = messages(one.propose(b"v", 0.0))[2]
    two.receive(1, accept, 0.0)
    prepare = messages(three.propose(b"w", 0.0))[2]
    (promise,) = two.receive(3, prepare, 0.0)
    assert promise.message == Promise(HERE, ballot(1, 3), ballot(0), b"v")
    assert three.receive(2, promise.message, 0.0) == []
    said = messages(three.tick(1.0))
    assert said[2] == Accept(HERE, ballot(1, 3), b"v", inherited=True)
    (rejected,) = two.receive(1, accept, 1.0)
    assert rejected.message == Rejected(HERE, ballot(0), ballot(1, 3))


@pytest.mark.parametrize("owns", [True, False], ids=["round 0", "round 1"])
def test_voters_in_reserve_are_asked_when_the_others_are_late(owns: bool) -> None:
    one = an_owner() if owns else an_agreement()
    assert set(messages(one.propose(b"v", 0.0, reserve=(3,)))) == {2}
    assert set(messages(one.tick(0.2))) == {2, 3}


def test_a_voter_in_reserve_that_has_promised_is_asked_for_its_vote() -> None:
    one = an_agreement()
    one.propose(b"v", 0.0, reserve=(3,))
    said = messages(one.receive(3, Promise(HERE, ballot(1)), 0.2))
    assert set(said) == {2, 3}


def test_who_knows_what_was_chosen_says_so_to_whoever_asks() -> None:
    one = an_agreement(1)
    one.receive(2, Chosen(HERE, b"v"), 0.0)
    for sent in (Prepare(HERE, ballot(9, 3)), Accept(HERE, ballot(9, 3), b"w")):
        assert one.receive(3, sent, 0.0) == [SendMessage(3, Chosen(HERE, b"v"))]
    assert one.propose(b"w", 0.0) == [] == one.tick(9.0)
    assert one.due(0.0) is None


def test_what_was_chosen_stays_whatever_a_liar_says_later() -> None:
    one = an_agreement(1)
    for sender, value in (2, b"v"), (3, b"v"), (3, b"w"):
        assert one.receive(sender, Chosen(HERE, value), 0.0) == []
    assert one.chosen == b"v"


def test_a_round_that_nobody_reaches_by_outbidding_others_is_ignored() -> None:
    one, far = an_agreement(1), ballot(2**64 - 1, 3)
    assert one.receive(3, Prepare(HERE, far), 0.0) == [] == one.receive(3, Accept(HERE, far, b"w"), 0.0)
    assert messages(one.propose(b"v", 0.0)) == {2: Prepare(HERE, ballot(1)), 3: Prepare(HERE, ballot(1))}
    one.receive(3, Rejected(HERE, ballot(1), far), 0.0)
    assert messages(one.tick(9.0)) == {2: Prepare(HERE, ballot(2)), 3: Prepare(HERE, ballot(2))}
    assert one.receive(3, Prepare(HERE, ballot(2**32, 3)), 9.0) == [SendMessage(3, Promise(HERE, ballot(2**32, 3)))]


def test_nobody_outbids_the_highest_number_that_a_message_has_room_for() -> None:
    one = an_agreement(1, vote=Vote(HERE, promised=ballot(2**64 - 1, 3)))
    assert one.propose(b"v", 0.0) == [] == one.tick(9.0)
    assert one.due(9.0) == 9.0 + one.longest_pause, "it looks again, and does not spin"
    assert one.receive(3, Accept(HERE, ballot(2**64 - 1, 3), b"w"), 9.0) == [
        SendMessage(3, Accepted(HERE, ballot(2**64 - 1, 3)))
    ]


def test_a_learner_is_notified_and_has_no_vote() -> None:
    one = Agreement(HERE, 1, frozenset({1}), random=Random(1), learners=(8,))
    assert one.propose(b"v", 0.0) == [SendMessage(8, Chosen(HERE, b"v"))]
    learner = an_agreement(8)
    assert learner.receive(1, Prepare(HERE, ballot(1)), 0.0) == []
    assert learner.receive(1, Accept(HERE, ballot(1), b"v"), 0.0) == []
    learner.receive(1, Chosen(HERE, b"v"), 0.0)
    assert learner.chosen == b"v"


def test_lower_ballots_are_refused_after_a_promise() -> None:
    two = an_agreement(2)
    two.receive(3, Prepare(HERE, ballot(5, 3)), 0.0)
    for sent in (Prepare(HERE, ballot(4, 1)), Accept(HERE, ballot(4, 1), b"v")):
        assert two.receive(1, sent, 0.0) == [SendMessage(1, Rejected(HERE, ballot(4, 1), ballot(5, 3)))]
    assert two.vote.accepted is None


def test_messages_of_senders_that_may_not_send_them_are_ignored() -> None:
    two = an_agreement(2)
    assert two.receive(8, Prepare(HERE, ballot(5, 8)), 0.0) == []
    assert two.receive(3, Prepare(HERE, ballot(5, 1)), 0.0) == [], "a ballot of somebody else"
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    assert one.receive(8, Promise(HERE, ballot(1)), 0.0) == []
    assert one.receive(2, Promise(HERE, ballot(7)), 0.0) == [], "a ballot that is not under way"
    assert one.chosen is None


def test_what_is_found_in_promises_is_proposed_instead() -> None:
    one = an_agreement(1)
    one.propose(b"mine", 0.0)
    assert one.receive(2, Promise(HERE, ballot(1), ballot(0, 3), b"theirs"), 0.0) == [], "a freer majority may come"
    due = one.due(0.0)
    assert due is not None
    assert messages(one.tick(due))[2] == Accept(HERE, ballot(1), b"theirs", inherited=True)


def test_a_majority_that_binds_to_nothing_is_preferred() -> None:
    one = an_agreement(1)
    one.propose(b"mine", 0.0)
    one.receive(2, Promise(HERE, ballot(1), ballot(0, 3), b"theirs"), 0.0)
    assert messages(one.receive(3, Promise(HERE, ballot(1)), 0.0))[2] == Accept(HERE, ballot(1), b"mine")


def test_messages_without_an_answer_are_repeated_ever_more_rarely() -> None:
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    one.receive(2, Rejected(HERE, ballot(7), None), 0.0)
    moments = []
    for _ in range(6):
        due = one.due(0.0)
        assert due is not None
        moments.append(due)
        assert messages(one.tick(due)) == {2: Prepare(HERE, ballot(1)), 3: Prepare(HERE, ballot(1))}
    gaps = [round(later - earlier, 3) for earlier, later in pairwise(moments)]
    assert gaps == [0.2, 0.4, 0.5, 0.5, 0.5]


def test_after_a_higher_ballot_it_tries_again_with_one_that_is_higher_still() -> None:
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    assert one.receive(2, Rejected(HERE, ballot(1), ballot(6, 3)), 0.0) == []
    assert one.proposing
    due = one.due(0.0)
    assert due is not None
    assert 0.0 <= due < 1.0
    assert messages(one.tick(due))[2] == Prepare(HERE, ballot(7))


def test_a_later_value_is_taken_while_none_was_named() -> None:
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    assert one.propose(b"w", 0.0) == []
    assert messages(one.receive(2, Promise(HERE, ballot(1)), 0.0))[2] == Accept(HERE, ballot(1), b"w")
    assert one.propose(b"x", 0.0) == []


def test_who_has_withdrawn_proposes_nothing_more() -> None:
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    one.withdraw()
    assert not one.proposing
    assert one.receive(2, Promise(HERE, ballot(1)), 0.0) == [] == one.tick(9.0)
    assert one.due(0.0) is None


def test_a_judge_may_refuse_and_name_whom_it_reaches() -> None:
    two = an_agreement(2)
    said = two.receive(1, Accept(HERE, ballot(1), b"v"), 0.0, lambda _: VoteDecision(VoteAnswer.NO, (3,)))
    assert said == [SendMessage(1, Rejected(HERE, ballot(1), None, (3,)))]
    assert two.vote.accepted is None


def test_a_judge_may_take_its_time_and_the_answer_comes_when_it_is_ready() -> None:
    two = an_agreement(2)
    assert two.receive(1, Accept(HERE, ballot(1), b"v"), 0.0, lambda _: LATER) == []
    assert two.recheck(lambda _: LATER) == []
    assert two.recheck(lambda _: OK) == [SendMessage(1, Accepted(HERE, ballot(1)))]
    assert two.recheck(lambda _: OK) == []


def test_a_ballot_that_is_pondered_is_refused_if_a_higher_one_was_promised_meanwhile() -> None:
    two = an_agreement(2)
    two.receive(1, Accept(HERE, ballot(1), b"v"), 0.0, lambda _: LATER)
    two.receive(3, Prepare(HERE, ballot(2, 3)), 0.0)
    assert two.recheck(lambda _: OK) == [SendMessage(1, Rejected(HERE, ballot(1), ballot(2, 3)))]


def test_what_was_accepted_once_is_not_judged_again() -> None:
    two = an_agreement(2)
    two.receive(1, Accept(HERE, ballot(1), b"v"), 0.0)
    said = two.receive(3, Accept(HERE, ballot(2, 3), b"v"), 0.0, lambda _: VoteDecision(VoteAnswer.NO))
    assert said == [SendMessage(3, Accepted(HERE, ballot(2, 3)))]


def test_a_proposer_that_promised_a_higher_ballot_cannot_add_its_vote_to_its_own() -> None:
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    one.receive(2, Promise(HERE, ballot(1)), 0.0)
    one.receive(3, Prepare(HERE, ballot(2, 3)), 0.0)
    one.receive(2, Accepted(HERE, ballot(1)), 0.0)
    assert one.chosen is None
    one.receive(3, Accepted(HERE, ballot(1)), 0.0)
    assert one.chosen == b"v", "two others are a majority without it"


def test_a_proposer_that_cannot_vote_for_its_ballot_any_more_begins_a_higher_one() -> None:
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    one.receive(2, Promise(HERE, ballot(1)), 0.0)
    one.receive(3, Prepare(HERE, ballot(2, 3)), 0.0)  # and 3 dies
    one.receive(2, Accepted(HERE, ballot(1)), 0.0)
    assert one.tick(0.1) == [], "a pause, at random"
    assert messages(one.tick(1.0))[2] == Prepare(HERE, ballot(3))


def test_who_refused_is_asked_again_and_may_agree() -> None:
    one = an_agreement(1)
    one.propose(b"v", 0.0)
    one.receive(2, Promise(HERE, ballot(1)), 0.0)
    one.receive(2, Rejected(HERE, ballot(1), None, (3,)), 0.0)
    assert messages(one.tick(0.1))[2] == Accept(HERE, ballot(1), b"v")
    one.receive(2, Accepted(HERE, ballot(1)), 0.2)
    assert one.chosen == b"v"


def test_a_vote_that_was_kept_binds_who_comes_back_with_it() -> None:
    two = an_agreement(2)
    two.receive(1, Accept(HERE, ballot(3), b"v"), 0.0)
    again = an_agreement(2, vote=Vote.decode(two.vote.encode()))
    assert again.receive(3, Prepare(HERE, ballot(2, 3)), 0.0) == [
        SendMessage(3, Rejected(HERE, ballot(2, 3), ballot(3)))
    ]
    said = again.receive(3, Prepare(HERE, ballot(4, 3)), 0.0)
    assert said == [SendMessage(3, Promise(HERE, ballot(4, 3), ballot(3), b"v"))]
    assert messages(again.propose(b"w", 0.0))[1] == Prepare(HERE, ballot(5, 2))


def test_who_may_have_forgotten_its_vote_has_none() -> None:
    two = Agreement(HERE, 2, THREE, may_vote=False)
    assert two.receive(1, Prepare(HERE, ballot(1)), 0.0) == []
    assert two.receive(1, Accept(HERE, ballot(1), b"v"), 0.0) == []


def test_who_has_not_answered_is_known() -> None:
    one = an_agreement(1)
    assert one.missing() == []
    one.propose(b"v", 0.0)
    assert set(one.missing()) == {2, 3}
    one.receive(2, Promise(HERE, ballot(1)), 0.0)
    assert set(one.missing()) == {1, 2, 3}


def a_ballot(**promises: tuple[int, bytes] | None) -> Ballot:
    """`a=None`: a voter that had accepted nothing; `b=(3, b"x")`: one that accepted x in round 3."""
    ballot = Ballot(BallotNumber(9, 1), again=0.0, interval=0.1)
    for name, accepted in promises.items():
        number, value = (None, b"") if accepted is None else (BallotNumber(accepted[0], 7), accepted[1])
        ballot.promised(ord(name), number, value)
    return ballot


def test_a_majority_that_accepted_nothing_binds_to_nothing() -> None:
    assert a_ballot(a=None, b=None).binding(2) is None
    assert a_ballot(a=None, b=(1, b"x"), c=None).binding(2) is None


def test_where_every_majority_binds_the_highest_ballot_does() -> None:
    assert a_ballot(a=None, b=(1, b"x")).binding(2) == b"x"
    assert a_ballot(a=None, b=(1, b"x"), c=(2, b"y")).binding(2) == b"y"
    assert a_ballot(a=(1, b"x"), b=(2, b"y"), c=(1, b"x")).binding(2) == b"y"


def test_a_promise_that_comes_twice_counts_once_and_one_that_comes_late_not_at_all() -> None:
    ballot = a_ballot(a=None, b=None)
    ballot.promised(ord("a"), BallotNumber(1, 1), b"other")
    assert len(ballot.promises) == 2
    ballot.ask(b"v", inherited=False, again=1.0, interval=0.1)
    ballot.promised(ord("c"), None, b"")
    assert len(ballot.promises) == 2


def test_who_agrees_in_the_end_has_not_refused() -> None:
    ballot = a_ballot(a=None, b=None)
    ballot.agreed(ord("a"))  # before anything was asked
    ballot.refused(ord("a"), (5,))
    assert (ballot.accepted, ballot.rejected) == (set(), {})
    ballot.ask(b"v", inherited=True, again=1.0, interval=0.1)
    ballot.refused(ord("a"), (5, 6))
    assert ballot.reached() == {5, 6}
    ballot.agreed(ord("a"))
    ballot.refused(ord("a"), (5,))
    assert (ballot.accepted, ballot.rejected) == ({ord("a")}, {})


def test_who_has_not_given_what_is_asked_in_this_phase_is_asked_again() -> None:
    ballot = a_ballot(a=None, b=None)
    assert ballot.unanswered([ord(name) for name in "abc"]) == [ord("c")]
    ballot.ask(b"v", inherited=False, again=1.0, interval=0.1)
    ballot.agreed(ord("c"))
    ballot.refused(ord("b"), ())
    assert ballot.unanswered([ord(name) for name in "abc"]) == [ord("a"), ord("b")]


def test_a_ballot_of_the_seed_changes_no_vote() -> None:
    electorate = Electorate(a_membership(2))
    voter = Agreement(HERE, 1, electorate, random=Random(1), ignored_proposer=electorate.seed_voter)
    before = voter.vote
    assert voter.receive(SEED_NODE, Prepare(HERE, ballot(1, SEED_NODE)), 0.0) == []
    assert voter.receive(SEED_NODE, Accept(HERE, ballot(1, SEED_NODE), b"v"), 0.0) == []
    assert voter.vote == before
    assert voter.receive(2, Prepare(HERE, ballot(1, 2)), 0.0) == [SendMessage(2, Promise(HERE, ballot(1, 2), None))]


@pytest.mark.parametrize(("size", "voters", "needed"), [(1, 1, 1), (2, 3, 2), (3, 3, 2), (4, 5, 3), (7, 7, 4)])
def test_there_is_always_an_odd_number_of_voters(size: int, voters: int, needed: int) -> None:
    electorate = Electorate(a_membership(size))
    assert (len(electorate), electorate.needed) == (voters, needed)
    assert list(electorate) == [*range(1, size + 1), *([SEED_NODE] if size % 2 == 0 else [])]


def test_without_a_seed_the_members_are_alone() -> None:
    electorate = Electorate(a_membership(4, seed=False))
    assert (len(electorate), electorate.needed, electorate.seed_voter) == (4, 3, None)


def test_who_is_neither_member_nor_witness_has_no_vote() -> None:
    assert SEED_NODE in Electorate(a_membership(4))
    assert SEED_NODE not in Electorate(a_membership(3))
    assert 4 not in Electorate(a_membership(3))
    assert "1" not in Electorate(a_membership(3))


def test_two_majorities_always_meet() -> None:
    assert all(2 * majority(range(count)) > count for count in range(1, 50))


EMPTY = Vote((0, 3, 0))


def test_a_promise_excludes_lower_ballots_and_no_other() -> None:
    vote = EMPTY.promising(BallotNumber(2, 5))
    assert EMPTY.allows(BallotNumber(0, 0))
    assert not vote.allows(BallotNumber(2, 4))
    assert not vote.allows(BallotNumber(1, 9))
    assert vote.allows(BallotNumber(2, 5))
    assert vote.allows(BallotNumber(3, 1))


def test_what_was_accepted_outlives_later_promises() -> None:
    vote = EMPTY.accepting(BallotNumber(1, 2), b"value").promising(BallotNumber(4, 1))
    assert (vote.accepted, vote.value, vote.promised) == (BallotNumber(1, 2), b"value", BallotNumber(4, 1))


@pytest.mark.parametrize(
    "vote", [EMPTY, EMPTY.promising(BallotNumber(1, 2)), EMPTY.accepting(BallotNumber(2**40, 2**60), b"\x00x")]
)
def test_a_vote_is_the_same_after_a_stay_on_the_disk(vote: Vote) -> None:
    assert Vote.decode(vote.encode()) == vote


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x81\xa8instance\x93\x00\x01", b"nonsense"])
def test_other_bytes_are_no_vote(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a vote"):
        Vote.decode(data)


def test_who_has_no_judge_agrees_to_anything() -> None:
    assert accept_any(Accept((0, 1, 0), BallotNumber(1, 1), b"")) is OK
