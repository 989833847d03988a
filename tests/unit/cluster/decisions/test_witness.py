"""The seed votes when the members are even, looks before it agrees, follows, and remembers."""

import pytest

from nexar.cluster.change import Change, Departure
from nexar.cluster.decisions.succession_events import Action, Adopt, Heard, Probe, Probed, Say, Tick
from nexar.cluster.decisions.vote import Vote
from nexar.cluster.decisions.witness import Witness
from nexar.errors import InternalError
from nexar.wire.messages import Accept, Accepted, Chosen, Number, Prepare, Promise, Rejected, Suspect
from tests.unit.cluster.decisions.parliament import SEED, a_member, a_membership

HERE = (0, 1, 0)
BALLOT = Number(1, 1)
REMOVE_2 = Change(2, left=(Departure(2, "silence"),)).encode()


def a_witness(size: int = 2, **facts: bool) -> Witness:
    return Witness(a_membership(size), **facts)


def hear(witness: Witness, word: Prepare | Accept | Chosen | Suspect, sender: int = 1) -> list[Action]:
    return witness.step(Heard(sender, word), 0.0)


def test_with_an_even_number_of_members_it_votes_and_looks_before_it_agrees() -> None:
    witness = a_witness()
    assert hear(witness, Prepare(HERE, BALLOT)) == [Say(1, Promise(HERE, BALLOT))]
    assert hear(witness, Accept(HERE, BALLOT, REMOVE_2)) == [Probe(2)]
    assert witness.vote.accepted is None
    assert witness.step(Probed(2, "silence"), 1.0) == [Say(1, Accepted(HERE, BALLOT))]
    assert witness.vote == Vote(HERE, BALLOT, BALLOT, REMOVE_2)


def test_whom_it_reaches_it_does_not_remove() -> None:
    witness = a_witness()
    hear(witness, Accept(HERE, BALLOT, REMOVE_2))
    assert witness.step(Probed(2, None), 0.1) == [Say(1, Rejected(HERE, BALLOT, None, (2,)))]


def test_with_an_odd_number_it_only_follows() -> None:
    witness = a_witness(3)
    assert hear(witness, Prepare(HERE, BALLOT)) == []
    chosen = Chosen(HERE, REMOVE_2)
    assert hear(witness, chosen) == [Adopt(Change.decode(REMOVE_2)), *(Say(node, chosen) for node in (1, 2, 3))]
    assert [member.node for member in witness.membership.members] == [1, 3]
    assert witness.changes_since(1) == [REMOVE_2]


def test_newcomers_must_have_been_let_in_by_it() -> None:
    witness = a_witness()
    joins = Accept(HERE, BALLOT, Change(2, joined=(a_member(9),)).encode())
    assert hear(witness, joins) == []
    witness.admitted = frozenset({9})
    assert hear(witness, joins) == [Say(1, Accepted(HERE, BALLOT))]


def test_a_vote_that_it_kept_binds_it_after_a_restart() -> None:
    witness = a_witness()
    hear(witness, Prepare(HERE, Number(5, 2)), sender=2)
    again = Witness(a_membership(2), vote=Vote.decode(witness.vote.encode()))
    assert hear(again, Prepare(HERE, BALLOT)) == [Say(1, Rejected(HERE, BALLOT, Number(5, 2)))]


def test_a_vote_of_another_epoch_means_nothing_any_more() -> None:
    witness = Witness(a_membership(2, epoch=4), vote=Vote((0, 3, 0), Number(9, 9)))
    assert hear(witness, Prepare((0, 4, 0), BALLOT)) == [Say(1, Promise((0, 4, 0), BALLOT))]


def test_a_seed_that_may_have_forgotten_its_vote_has_none() -> None:
    witness = a_witness(may_vote=False)
    assert hear(witness, Prepare(HERE, BALLOT)) == []
    assert hear(witness, Chosen(HERE, REMOVE_2))[0] == Adopt(Change.decode(REMOVE_2))


def test_who_is_behind_is_told_and_who_is_ahead_is_asked() -> None:
    witness = a_witness(3)
    hear(witness, Chosen(HERE, REMOVE_2))
    for word in (Prepare(HERE, BALLOT), Suspect(1, 3, 1, "silence")):
        assert hear(witness, word) == [Say(1, Chosen(HERE, REMOVE_2))]
    assert hear(witness, Prepare((0, 9, 0), BALLOT), sender=3) == [Say(3, Prepare((0, 2, 0), Number(0, SEED)))]


def test_what_was_chosen_later_waits_for_what_was_chosen_before() -> None:
    witness = a_witness(3)
    later = Change(3, left=(Departure(3, "silence"),)).encode()
    assert hear(witness, Chosen((0, 2, 0), later)) == [Say(1, Prepare(HERE, Number(0, SEED)))]
    assert hear(witness, Chosen((0, 2, 0), later)) == [], "it has asked"
    adopted = [action.change.epoch for action in hear(witness, Chosen(HERE, REMOVE_2)) if isinstance(action, Adopt)]
    assert adopted == [2, 3]


def test_what_does_not_concern_it_changes_nothing() -> None:
    witness = a_witness()
    assert hear(witness, Prepare((5, 1, 0), BALLOT)) == []
    assert hear(witness, Chosen(HERE, b"nonsense")) == []
    assert witness.step(Tick(), 0.0) == []
    assert witness.due(0.0) is None
    assert witness.membership.epoch == 1


def test_without_a_seed_there_is_no_witness() -> None:
    with pytest.raises(InternalError, match="no witness"):
        Witness(a_membership(2, seed=False))
