"""The seed's vote: kept before it is said, and not for the removal of who answers.

The seed votes when the members are even, looks before it agrees, follows, and remembers.
"""

import pytest

from nexar.cluster.decisions.admission_checks import JoinConnectionState
from nexar.cluster.decisions.admission_events import NotifyConnections, PersistVote
from nexar.cluster.decisions.membership_events import (
    MembershipAction,
    MembershipDecided,
    MessageReceived,
    ProbeFinished,
    SendMessage,
    StartProbe,
    Tick,
)
from nexar.cluster.decisions.paxos import Vote
from nexar.cluster.decisions.seed_voter import PROBE_TIMEOUT, SeedVoter, SeedVoteService, VoteAction
from nexar.cluster.membership import Change, Departure, Member, Membership
from nexar.errors import InternalError
from nexar.wire import join
from nexar.wire.control import (
    Accept,
    Accepted,
    BallotNumber,
    Chosen,
    Message,
    Prepare,
    Promise,
    Rejected,
    Suspect,
    Unknown,
    decode,
)
from nexar.wire.join import LivenessQuery
from tests.losses import silent
from tests.unit.cluster.decisions.admission_scene import SEED, key
from tests.unit.cluster.decisions.voters import SEED_NODE, a_member, a_membership

MEMBERSHIP = Membership("c", 1, tuple(Member(node, "a", key(node), {}) for node in (1, 2)), seed=SEED)
INSTANCE = (0, 1, 0)
BALLOT = BallotNumber(1, 1)
WITHOUT_2 = Change(2, left=(Departure(2, "silent"),)).encode()


class Scene:
    """A seed with lines to members; connections have ten times their number."""

    def __init__(
        self, *connected: int, awaited: frozenset[int] = frozenset(), seed_voter: SeedVoter | None = None
    ) -> None:
        self.lines = {node: JoinConnectionState(10 * node, "x") for node in connected}
        self.awaited = set(awaited)
        self.seed_voter = seed_voter or SeedVoter(MEMBERSHIP)
        self.voter = SeedVoteService(self.seed_voter, self.lines, self.awaited.__contains__)

    def propose(self, value: bytes = WITHOUT_2, now: float = 0.0) -> list[VoteAction]:
        """Node 1 asks for a promise and for this value; what follows from the second."""
        promised = self.voter.message_received(1, Prepare(INSTANCE, BALLOT), now)
        assert [type(said) for said in messages(promised)] == [Promise]
        return self.voter.message_received(1, Accept(INSTANCE, BALLOT, value), now)


def messages(deeds: list[VoteAction], to: int | None = None) -> list[Message | Unknown]:
    """What was said, to a connection if one is given."""
    tells = [deed for deed in deeds if isinstance(deed, NotifyConnections) and (to is None or to in deed.connections)]
    return [decode(feed.message.body) for feed in tells if isinstance(feed.message, join.SeedPaxosMessage)]


def asked(deeds: list[VoteAction]) -> list[tuple[int, tuple[int, ...]]]:
    tells = [deed for deed in deeds if isinstance(deed, NotifyConnections)]
    return [(feed.message.number, feed.connections) for feed in tells if isinstance(feed.message, LivenessQuery)]


def test_a_vote_is_kept_before_it_is_said() -> None:
    scene = Scene(1)
    keep, feed = scene.voter.message_received(1, Prepare(INSTANCE, BALLOT), 0.0)
    assert isinstance(keep, PersistVote)
    assert keep.vote.promised == BALLOT
    assert isinstance(feed, NotifyConnections)
    assert feed.connections == (10,)
    again = scene.voter.message_received(1, Prepare(INSTANCE, BALLOT), 0.0)
    assert [type(deed) for deed in again] == [NotifyConnections]  # nothing new to keep


def test_who_has_no_line_is_unreachable_at_once() -> None:
    deeds = Scene(1).propose()
    assert [type(deed) for deed in deeds] == [PersistVote, NotifyConnections]
    assert [type(said) for said in messages(deeds, to=10)] == [Accepted]


def test_who_answers_is_not_removed() -> None:
    scene = Scene(1, 2)
    deeds = scene.propose()
    ((number, to),) = asked(deeds)
    assert to == (20,)
    assert messages(deeds) == []  # it looks first
    assert scene.voter.answered(2, number + 1, 0.5) == []
    (rejected,) = messages(scene.voter.answered(2, number, 0.5))
    assert isinstance(rejected, Rejected)
    assert rejected.reachable == (2,)
    assert scene.voter.due(0.5) is None


def test_who_does_not_answer_in_time_is_unreachable() -> None:
    scene = Scene(1, 2)
    scene.propose()
    assert scene.voter.due(0.0) == PROBE_TIMEOUT
    assert scene.voter.tick(PROBE_TIMEOUT / 2) == []
    assert [type(said) for said in messages(scene.voter.tick(PROBE_TIMEOUT))] == [Accepted]
    assert scene.voter.tick(2 * PROBE_TIMEOUT) == []


def test_whose_line_breaks_while_it_is_asked_is_unreachable() -> None:
    scene = Scene(1, 2)
    scene.propose()
    del scene.lines[2]
    assert [type(said) for said in messages(scene.voter.lost(2, silent("reset"), 0.1))] == [Accepted]
    assert scene.voter.lost(2, silent("reset"), 0.1) == []


def test_who_may_still_come_back_to_a_restarted_seed_has_time_to() -> None:
    scene = Scene(1, awaited=frozenset({2}))
    assert messages(scene.propose()) == []
    scene.lines[2] = JoinConnectionState(20, "x")
    ((number, _),) = asked(scene.voter.returned(2))
    assert [type(said) for said in messages(scene.voter.answered(2, number, 0.5))] == [Rejected]
    assert scene.voter.returned(1) == []


def test_what_was_chosen_is_followed_and_reported_to_all_in_one_message() -> None:
    scene = Scene(1, 2)
    deeds = scene.voter.message_received(1, Chosen(INSTANCE, WITHOUT_2), 0.0)
    assert deeds[0] == Change.decode(WITHOUT_2)
    (feed,) = [deed for deed in deeds if isinstance(deed, NotifyConnections)]
    assert set(feed.connections) == {10, 20}
    assert scene.seed_voter.membership.epoch == 2


def test_a_restarted_seed_keeps_its_promise() -> None:
    before = Scene(1, 2)
    before.voter.message_received(1, Prepare(INSTANCE, BallotNumber(7, 1)), 0.0)
    scene = Scene(1, 2, seed_voter=SeedVoter(MEMBERSHIP, vote=before.seed_voter.vote))
    (rejected,) = messages(scene.voter.message_received(2, Prepare(INSTANCE, BallotNumber(3, 2)), 0.0))
    assert isinstance(rejected, Rejected)
    assert rejected.promised == BallotNumber(7, 1)


HERE = (0, 1, 0)
REMOVE_2 = Change(2, left=(Departure(2, "silence"),)).encode()


def a_witness(size: int = 2, **facts: bool) -> SeedVoter:
    return SeedVoter(a_membership(size), **facts)


def receive(witness: SeedVoter, sent: Prepare | Accept | Chosen | Suspect, sender: int = 1) -> list[MembershipAction]:
    return witness.step(MessageReceived(sender, sent), 0.0)


def test_with_an_even_number_of_members_it_votes_and_looks_before_it_agrees() -> None:
    witness = a_witness()
    assert receive(witness, Prepare(HERE, BALLOT)) == [SendMessage(1, Promise(HERE, BALLOT))]
    assert receive(witness, Accept(HERE, BALLOT, REMOVE_2)) == [StartProbe(2)]
    assert witness.vote.accepted is None
    assert witness.step(ProbeFinished(2, silent()), 1.0) == [SendMessage(1, Accepted(HERE, BALLOT))]
    assert witness.vote == Vote(HERE, BALLOT, BALLOT, REMOVE_2)


def test_whom_it_reaches_it_does_not_remove() -> None:
    witness = a_witness()
    receive(witness, Accept(HERE, BALLOT, REMOVE_2))
    assert witness.step(ProbeFinished(2, None), 0.1) == [SendMessage(1, Rejected(HERE, BALLOT, None, (2,)))]


def test_with_an_odd_number_it_only_follows() -> None:
    witness = a_witness(3)
    assert receive(witness, Prepare(HERE, BALLOT)) == []
    chosen = Chosen(HERE, REMOVE_2)
    assert receive(witness, chosen) == [
        MembershipDecided(Change.decode(REMOVE_2)),
        *(SendMessage(node, chosen) for node in (1, 2, 3)),
    ]
    assert [member.node for member in witness.membership.members] == [1, 3]
    assert [each.message for each in receive(witness, Prepare(HERE, BALLOT))] == [chosen], "a member that is behind"


def test_newcomers_must_have_been_let_in_by_it() -> None:
    witness = a_witness()
    joins = Accept(HERE, BALLOT, Change(2, joined=(a_member(9),)).encode())
    assert receive(witness, joins) == []
    witness.admitted = frozenset({9})
    assert receive(witness, joins) == [SendMessage(1, Accepted(HERE, BALLOT))]


def test_a_vote_that_it_kept_binds_it_after_a_restart() -> None:
    witness = a_witness()
    receive(witness, Prepare(HERE, BallotNumber(5, 2)), sender=2)
    again = SeedVoter(a_membership(2), vote=Vote.decode(witness.vote.encode()))
    assert receive(again, Prepare(HERE, BALLOT)) == [SendMessage(1, Rejected(HERE, BALLOT, BallotNumber(5, 2)))]


def test_a_vote_of_another_epoch_means_nothing_any_more() -> None:
    witness = SeedVoter(a_membership(2, epoch=4), vote=Vote((0, 3, 0), BallotNumber(9, 9)))
    assert receive(witness, Prepare((0, 4, 0), BALLOT)) == [SendMessage(1, Promise((0, 4, 0), BALLOT))]


def test_a_seed_that_may_have_forgotten_its_vote_has_none() -> None:
    witness = a_witness(may_vote=False)
    assert receive(witness, Prepare(HERE, BALLOT)) == []
    assert receive(witness, Chosen(HERE, REMOVE_2))[0] == MembershipDecided(Change.decode(REMOVE_2))


def test_who_is_behind_is_notified_and_who_is_ahead_is_asked() -> None:
    witness = a_witness(3)
    receive(witness, Chosen(HERE, REMOVE_2))
    for sent in (Prepare(HERE, BALLOT), Suspect(1, 3, 1, "silence")):
        assert receive(witness, sent) == [SendMessage(1, Chosen(HERE, REMOVE_2))]
    assert receive(witness, Prepare((0, 9, 0), BALLOT), sender=3) == [
        SendMessage(3, Prepare((0, 2, 0), BallotNumber(0, SEED_NODE)))
    ]


def test_what_was_chosen_later_waits_for_what_was_chosen_before() -> None:
    witness = a_witness(3)
    later = Change(3, left=(Departure(3, "silence"),)).encode()
    assert receive(witness, Chosen((0, 2, 0), later)) == [SendMessage(1, Prepare(HERE, BallotNumber(0, SEED_NODE)))]
    assert receive(witness, Chosen((0, 2, 0), later)) == [], "it has asked"
    adopted = [
        action.change.epoch
        for action in receive(witness, Chosen(HERE, REMOVE_2))
        if isinstance(action, MembershipDecided)
    ]
    assert adopted == [2, 3]


def test_what_does_not_concern_it_changes_nothing() -> None:
    witness = a_witness()
    assert receive(witness, Prepare((5, 1, 0), BALLOT)) == []
    assert receive(witness, Chosen(HERE, b"nonsense")) == []
    assert witness.step(Tick(), 0.0) == []
    assert witness.due(0.0) is None
    assert witness.membership.epoch == 1


def test_without_a_seed_there_is_no_witness() -> None:
    with pytest.raises(InternalError, match="no seed voter"):
        SeedVoter(a_membership(2, seed=False))
