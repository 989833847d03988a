"""Values agreed on by ballot, among nodes whose messages a test carries, drops or delays."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from nexar.cluster.agreements import AgreedValue, Agreements
from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.decisions.agreement_instances import DEFAULT_LIMITS
from nexar.cluster.decisions.membership_events import MembershipMessage
from nexar.errors import LinkClosed, PeerLost, UsageError
from nexar.wire.control import BallotNumber, Chosen, Prepare, Suspect
from tests.unit.cluster.memory_mesh import eventually

NODES = frozenset({1, 2, 3})
FIRST = (0, 1, 1)


class Drive:
    """What ballots ask of a node's progress."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kicks = 0

    def wake(self) -> None:
        assert not self.lock.locked()
        self.kicks += 1


class Electorate:
    """Three nodes. Messages wait until they are carried; who is absent receives none."""

    def __init__(self) -> None:
        self.messages: deque[tuple[int, int, MembershipMessage]] = deque()
        self.absent: set[int] = set()
        self.drives = {node: Drive() for node in NODES}
        self.control_loop = ControlLoop()
        self.ballots = {
            node: Agreements(node, cast(Any, self.drives[node]), self.control_loop, self._sayer(node)) for node in NODES
        }
        for node in NODES:
            self.ballots[node].add_generation(0, 1, NODES)

    def _sayer(self, sender: int) -> Callable[[int, MembershipMessage], None]:
        def say(node: int, message: MembershipMessage) -> None:
            self.messages.append((sender, node, message))

        return say

    def carry(self) -> None:
        """Everything that was said, and what is said about it."""
        while self.messages:
            sender, node, message = self.messages.popleft()
            if not {sender, node} & self.absent:
                self.ballots[node].receive(sender, message)

    def carry_until(self, agreed: AgreedValue) -> bytes:
        """Messages that were lost are repeated after a while."""

        def done() -> bool:
            self.carry()
            return agreed.done

        eventually(done, "a value")
        return agreed.value()


@pytest.fixture
def electorate() -> Iterator[Electorate]:
    made = Electorate()
    yield made
    for each in made.ballots.values():
        each.close()
        each.close()
    made.control_loop.close()


def test_one_value_is_chosen_for_all_who_propose(electorate: Electorate) -> None:
    proposed = {node: electorate.ballots[node].propose(FIRST, b"of %d" % node) for node in NODES}
    values = {electorate.carry_until(agreed) for agreed in proposed.values()}
    assert len(values) == 1
    assert values <= {b"of 1", b"of 2", b"of 3"}
    assert all(drive.kicks for drive in electorate.drives.values())  # who waits may lead, and sleep


def test_a_majority_is_enough_and_who_comes_late_gets_the_same(electorate: Electorate) -> None:
    electorate.absent = {3}
    chosen = electorate.carry_until(electorate.ballots[1].propose(FIRST, b"without 3"))
    assert chosen == b"without 3"
    electorate.absent = set()
    assert electorate.carry_until(electorate.ballots[3].propose(FIRST, b"too late")) == b"without 3"


def test_who_proposes_again_gets_the_same_at_once(electorate: Electorate) -> None:
    electorate.carry_until(electorate.ballots[1].propose(FIRST, b"first"))
    again = electorate.ballots[1].propose(FIRST, b"second")
    assert again.done
    assert again.result() == b"first"


def test_without_a_majority_nothing_is_chosen_and_who_is_missing_is_known(electorate: Electorate) -> None:
    electorate.absent = {2, 3}
    agreed = electorate.ballots[1].propose(FIRST, b"alone")
    electorate.carry()
    assert not agreed.done
    assert sorted(electorate.ballots[1].missing(FIRST)) == [2, 3]
    agreed.cancel()  # who waits no longer changes nothing
    electorate.absent = {3}
    assert electorate.carry_until(agreed) == b"alone"
    assert electorate.ballots[1].missing((9, 9, 9)) == []


def test_where_this_node_has_lost_too_many_voters_whoever_waits_is_notified_until_one_is_found(
    electorate: Electorate,
) -> None:
    electorate.absent = {2, 3}
    ballots = electorate.ballots[1]
    agreed = ballots.propose(FIRST, b"alone")
    ballots.voter_lost(9, "no voter")
    ballots.voter_lost(2, "it was killed")
    assert not agreed.done
    ballots.voter_lost(3, "it was killed, too")
    assert isinstance(agreed.error, PeerLost)
    assert (agreed.error.node, agreed.error.cause) == (3, "it was killed, too")
    with pytest.raises(PeerLost, match="killed, too"):
        ballots.propose((0, 1, 2), b"again")
    ballots.voter_reachable(3)
    electorate.absent = {2}
    assert electorate.carry_until(ballots.propose((0, 1, 2), b"again")) == b"again"


def test_instances_do_not_know_of_one_another(electorate: Electorate) -> None:
    one, other = electorate.ballots[1].propose(FIRST, b"one"), electorate.ballots[2].propose((0, 1, 2), b"other")
    assert (electorate.carry_until(one), electorate.carry_until(other)) == (b"one", b"other")


def test_messages_of_unknown_nodes_and_about_unknown_communicators_mean_nothing(electorate: Electorate) -> None:
    ballots = electorate.ballots[1]
    ballots.receive(9, Chosen(FIRST, b"forged"))
    ballots.receive(2, Prepare((5, 1, 1), BallotNumber(1, 2)))
    ballots.receive(2, Suspect(1, 3, 2, "another matter"))
    assert not electorate.messages
    assert electorate.carry_until(ballots.propose(FIRST, b"genuine")) == b"genuine"


def test_it_says_what_it_is_and_what_it_waits_for(electorate: Electorate) -> None:
    electorate.absent = {2, 3}
    agreed = electorate.ballots[1].propose((0, 1, 7), b"x")
    assert agreed.name == "agree #7"
    assert agreed.awaited().missing == "the vote of a majority"


def test_only_the_newest_instances_are_remembered(electorate: Electorate) -> None:
    ballots = electorate.ballots[1]
    for sequence in range(1, DEFAULT_LIMITS.kept + 3):
        ballots.receive(2, Chosen((0, 1, sequence), b"%d" % sequence))
    assert len(ballots._instances._agreements) == DEFAULT_LIMITS.kept
    assert ballots.propose((0, 1, DEFAULT_LIMITS.kept + 2), b"mine").result() == b"%d" % (DEFAULT_LIMITS.kept + 2)


def test_who_has_forgotten_its_vote_does_not_vote_again_and_who_comes_so_late_is_notified(
    electorate: Electorate,
) -> None:
    for node in NODES:
        for sequence in range(1, DEFAULT_LIMITS.kept + 3):
            electorate.ballots[node].receive(node % 3 + 1, Chosen((0, 1, sequence), b"%d" % sequence))
    with pytest.raises(UsageError, match="comes too late"):
        electorate.ballots[1].propose((0, 1, 2), b"another value")
    electorate.ballots[2].receive(1, Prepare((0, 1, 2), BallotNumber(1, 1)))
    assert not electorate.messages
    assert electorate.ballots[1].propose((0, 1, 3), b"another value").result() == b"3"


def test_of_large_values_only_the_newest_are_remembered(electorate: Electorate) -> None:
    large = DEFAULT_LIMITS.kept_bytes // 4
    for number in range(1, 9):
        agreed = electorate.ballots[1].propose((0, 1, number), bytes([number]) * large)
        assert electorate.carry_until(agreed) == bytes([number]) * large
    for each in electorate.ballots.values():
        kept = [made for made in each._instances._agreements.values() if made.chosen]
        assert [made.instance[2] for made in kept] == [5, 6, 7, 8]
        assert each._instances._bytes == sum(len(made.chosen or b"") for made in kept)
    with pytest.raises(UsageError, match="comes too late"):
        electorate.ballots[2].propose((0, 1, 4), b"late")
    assert electorate.carry_until(electorate.ballots[2].propose((0, 1, 5), b"not so late")) == bytes([5]) * large


def test_one_value_is_remembered_however_large(electorate: Electorate) -> None:
    assert electorate.carry_until(electorate.ballots[1].propose(FIRST, bytes(2 * DEFAULT_LIMITS.kept_bytes))) == bytes(
        2 * DEFAULT_LIMITS.kept_bytes
    )
    assert electorate.ballots[2].propose(FIRST, b"late").value() == bytes(2 * DEFAULT_LIMITS.kept_bytes)


def test_one_that_is_open_is_known_however_many_others_come_and_go(electorate: Electorate) -> None:
    for node in NODES:
        for communicator in range(1, DEFAULT_LIMITS.kept + 10):
            electorate.ballots[node].add_generation(communicator, 1, NODES)
            electorate.ballots[node].end_generation(communicator, 1)
    assert electorate.carry_until(electorate.ballots[1].propose(FIRST, b"still here")) == b"still here"
    assert len(electorate.ballots[1]._instances._voters) == DEFAULT_LIMITS.kept + 1


def test_one_that_is_over_here_still_has_this_vote_until_many_others_are_over_too(electorate: Electorate) -> None:
    ballots = electorate.ballots[2]
    ballots.end_generation(0, 1)
    ballots.end_generation(0, 1)
    ballots.end_generation(77, 1)  # never known
    assert electorate.carry_until(electorate.ballots[1].propose(FIRST, b"late")) == b"late"
    for communicator in range(1, DEFAULT_LIMITS.kept + 1):
        ballots.add_generation(communicator, 1, NODES)
        ballots.end_generation(communicator, 1)
    assert FIRST not in ballots._instances._agreements
    ballots.receive(1, Prepare((0, 1, 2), BallotNumber(1, 1)))
    assert not electorate.messages


def test_who_is_no_member_any_more_waits_for_no_vote(electorate: Electorate) -> None:
    electorate.absent = {2, 3}
    agreed = electorate.ballots[1].propose(FIRST, b"alone")
    kicks = electorate.drives[1].kicks
    electorate.ballots[1].end_all(LinkClosed(owner="its place"))
    assert isinstance(agreed.error, LinkClosed)
    assert electorate.drives[1].kicks > kicks
    with pytest.raises(LinkClosed):
        electorate.ballots[1].propose((0, 1, 2), b"again")
    electorate.absent = set()
    electorate.ballots[1].receive(2, Prepare(FIRST, BallotNumber(1, 2)))  # nor is its own asked for
    assert not [
        message for sender, _, message in electorate.messages if sender == 1 and not isinstance(message, Prepare)
    ]


def test_who_speaks_of_what_is_far_ahead_makes_nobody_forget_or_miss_anything(electorate: Electorate) -> None:
    ballots = electorate.ballots[1]
    mine = ballots.propose(FIRST, b"mine")
    electorate.messages.clear()
    for sequence in (*range(2, 3 * DEFAULT_LIMITS.kept), 1 << 40, 1 << 63):
        ballots.receive(3, Prepare((0, 1, sequence), BallotNumber(1, 3)))
    assert len(ballots._instances._agreements) <= DEFAULT_LIMITS.ahead + 2  # that, the next one, and those ahead
    electorate.messages.clear()
    for sequence in range(2, 20):
        assert electorate.carry_until(ballots.propose((0, 1, sequence), b"%d" % sequence)) == b"%d" % sequence
    assert electorate.carry_until(mine) == b"mine"


def test_a_lie_about_what_was_chosen_far_ahead_moves_nobody_there(electorate: Electorate) -> None:
    ballots = electorate.ballots[1]
    ballots.receive(3, Chosen((0, 1, 10_000), b"forged"))
    ballots.receive(3, Chosen((0, 1, 1 << 40), b"forged"))
    for sequence in range(1, DEFAULT_LIMITS.kept + 10):
        ballots.receive(2, Chosen((0, 1, sequence), b"genuine"))
    assert ballots._instances._reached == {(0, 1): DEFAULT_LIMITS.kept + 9}
    assert ballots.propose((0, 1, DEFAULT_LIMITS.kept + 10), b"mine").done is False
