"""Each law is noticed when it is broken, and not before."""

from random import Random

import pytest

from nexar.cluster.decisions.membership_events import (
    MembershipAction,
    MembershipDecided,
    MembershipInput,
    MessageReceived,
    PeerLossFound,
    PeerReachable,
    ProbeFinished,
    SelfExpelled,
    SendMessage,
    Tick,
)
from nexar.cluster.membership import Change, Departure
from nexar.testing.simulator.cluster import SEED, described_member, first_membership
from nexar.testing.simulator.laws import Laws, ReferenceElectorate, Violation
from nexar.wire.control import Accept, Accepted, BallotNumber, Chosen, Prepare, Promise
from tests.losses import silent

INSTANCE = (0, 1, 0)
FIRST = BallotNumber(1, 1)
SECOND = BallotNumber(2, 2)
GOES = Change(2, left=(Departure(5, "gone"),))
OTHER_GOES = Change(2, left=(Departure(4, "gone"),))


def made(nodes: int = 5) -> Laws:
    laws = Laws(first_membership(nodes, Random(1), has_seed=True))
    for node in range(1, nodes + 1):
        laws.enters(node, 1)
    return laws


def does(laws: Laws, node: int, *actions: MembershipAction, event: MembershipInput | None = None) -> None:
    event = event or Tick()
    laws.before_step(node, event)
    laws.after_step(node, event, actions)


def asks(laws: Laws, ballot: BallotNumber, change: Change = GOES) -> None:
    """The proposer of this ballot, who has lost whom the change removes, asks for it."""
    for departure in change.left:
        laws.before_step(ballot.node, PeerLossFound(departure.node, silent("gone")))
    does(laws, ballot.node, SendMessage(3, Accept(INSTANCE, ballot, change.encode())))


def votes(laws: Laws, node: int, ballot: BallotNumber, change: Change = GOES) -> None:
    for departure in change.left:
        laws.before_step(node, ProbeFinished(departure.node, silent("no answer")))
    accept = Accept(INSTANCE, ballot, change.encode())
    does(laws, node, SendMessage(ballot.node, Accepted(INSTANCE, ballot)), event=MessageReceived(ballot.node, accept))
    laws.before_step(ballot.node, MessageReceived(node, Accepted(INSTANCE, ballot)))


def promises(laws: Laws, node: int, accepted: BallotNumber | None = None) -> None:
    promise = Promise(INSTANCE, SECOND, accepted)
    does(laws, node, SendMessage(2, promise), event=MessageReceived(2, Prepare(INSTANCE, SECOND)))


def decided(laws: Laws, change: Change = GOES) -> Laws:
    asks(laws, FIRST, change)
    votes(laws, 2, FIRST, change)
    votes(laws, 3, FIRST, change)
    does(laws, 1, MembershipDecided(change))
    return laws


def test_the_seed_votes_when_the_number_of_members_is_even() -> None:
    odd, even = (ReferenceElectorate.of(first_membership(nodes, Random(1), has_seed=True)) for nodes in (5, 6))
    assert (SEED in odd.voters, odd.majority) == (False, 3)
    assert (SEED in even.voters, even.majority) == (True, 4)


def test_what_a_majority_has_voted_for_is_lawful() -> None:
    laws = decided(made())
    does(laws, 2, MembershipDecided(GOES))
    does(laws, 5, SelfExpelled(2, "gone"))
    assert laws.last.epoch == 2
    assert laws.removed == {5: 2}


def test_a_minority_that_decides_is_noticed() -> None:
    laws = made()
    asks(laws, FIRST)
    votes(laws, 2, FIRST)
    with pytest.raises(Violation, match="a minority never decides"):
        does(laws, 1, MembershipDecided(GOES))


def test_votes_of_different_ballots_are_not_added_up() -> None:
    laws = made()
    asks(laws, FIRST)
    votes(laws, 3, FIRST)
    asks(laws, SECOND)
    votes(laws, 4, SECOND)
    with pytest.raises(Violation, match="a minority never decides"):
        does(laws, 1, SendMessage(2, Chosen(INSTANCE, GOES.encode())))


def test_votes_of_who_has_none_are_not_counted() -> None:
    laws = made()
    asks(laws, FIRST)
    votes(laws, 2, FIRST)
    votes(laws, SEED, FIRST)
    with pytest.raises(Violation, match="a minority never decides"):
        does(laws, 1, MembershipDecided(GOES))


def test_two_memberships_of_one_epoch_are_noticed() -> None:
    laws = decided(made())
    with pytest.raises(Violation, match="each epoch has one membership"):
        does(laws, 2, MembershipDecided(OTHER_GOES))


def test_an_epoch_that_is_left_out_or_entered_twice_is_noticed() -> None:
    laws = decided(made())
    with pytest.raises(Violation, match="epochs grow one by one"):
        does(laws, 1, MembershipDecided(GOES))
    with pytest.raises(Violation, match="epochs grow one by one"):
        does(laws, 2, MembershipDecided(Change(3, left=GOES.left)))


def test_a_vote_below_a_promise_is_noticed_and_one_that_is_said_again_is_not() -> None:
    laws = made()
    asks(laws, FIRST)
    votes(laws, 2, FIRST)
    promises(laws, 2, accepted=FIRST)
    promises(laws, 3)
    votes(laws, 2, FIRST)
    with pytest.raises(Violation, match="no node votes below its promise"):
        votes(laws, 3, FIRST)


def test_a_promise_that_does_not_name_the_last_vote_is_noticed() -> None:
    laws = made()
    asks(laws, FIRST)
    votes(laws, 2, FIRST)
    with pytest.raises(Violation, match="votes are remembered"):
        promises(laws, 2)


def test_a_ballot_with_two_values_is_noticed() -> None:
    laws = made()
    asks(laws, FIRST)
    with pytest.raises(Violation, match="a ballot has one value"):
        asks(laws, FIRST, OTHER_GOES)


def test_who_goes_on_after_it_was_expelled_is_noticed() -> None:
    laws = decided(made())
    does(laws, 5, SelfExpelled(2, "gone"))
    with pytest.raises(Violation, match="an expelled node takes no part"):
        does(laws, 5, MembershipDecided(GOES))
    with pytest.raises(Violation, match="an expelled node takes no part"):
        votes(laws, 5, FIRST)


def test_who_votes_at_the_request_of_the_expelled_is_noticed() -> None:
    laws = decided(made())
    does(laws, 2, MembershipDecided(GOES))
    message = Prepare((0, 2, 0), BallotNumber(1, 5))
    with pytest.raises(Violation, match="an expelled node takes no part"):
        does(laws, 2, SendMessage(5, Promise((0, 2, 0), message.ballot)), event=MessageReceived(5, message))


def test_an_expelled_node_that_is_a_member_again_is_noticed() -> None:
    laws = decided(made())
    laws.admitted.add(5)
    back = Change(3, joined=(described_member(5),)).encode()
    instance = (0, 2, 0)
    does(laws, 1, SendMessage(2, Accept(instance, FIRST, back)))
    for node in (2, 3, SEED):
        does(laws, node, SendMessage(1, Accepted(instance, FIRST)))
        laws.before_step(1, MessageReceived(node, Accepted(instance, FIRST)))
    with pytest.raises(Violation, match="an expelled node takes no part"):
        does(laws, 1, MembershipDecided(Change.decode(back)))


def test_a_newcomer_that_nobody_let_in_is_noticed() -> None:
    with pytest.raises(Violation, match="only admitted nodes join"):
        decided(made(), Change(2, joined=(described_member(77),)))


def test_a_vote_for_the_removal_of_who_was_never_missed_is_noticed() -> None:
    laws = made()
    asks(laws, FIRST)
    with pytest.raises(Violation, match="one node alone cannot expel another"):
        does(laws, 2, SendMessage(1, Accepted(INSTANCE, FIRST)))
    laws.before_step(2, ProbeFinished(5, silent("no answer")))
    laws.before_step(2, PeerReachable(5))
    with pytest.raises(Violation, match="one node alone cannot expel another"):
        does(laws, 2, SendMessage(1, Accepted(INSTANCE, FIRST)))


def test_who_resigns_may_be_voted_out_by_those_who_reach_it() -> None:
    laws = made()
    ballot = BallotNumber(1, 5)
    does(laws, 5, SendMessage(2, Accept(INSTANCE, ballot, GOES.encode())))
    for node in (2, 3):
        does(laws, node, SendMessage(5, Accepted(INSTANCE, ballot)))
        laws.before_step(5, MessageReceived(node, Accepted(INSTANCE, ballot)))
    does(laws, 5, SelfExpelled(2, "it wanted to"), SendMessage(1, Chosen(INSTANCE, GOES.encode())))
    assert laws.last.rank_of(5) is None


def test_a_value_that_had_votes_in_an_earlier_ballot_may_be_voted_for_again() -> None:
    laws = made()
    asks(laws, FIRST)
    votes(laws, 3, FIRST)
    does(laws, 2, SendMessage(4, Accept(INSTANCE, SECOND, GOES.encode(), inherited=True)))
    does(laws, 4, SendMessage(2, Accepted(INSTANCE, SECOND)))
