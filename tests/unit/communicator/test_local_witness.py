"""The seed's vote in a world of threads."""

from nexar.cluster.change import Change, Departure
from nexar.cluster.decisions.succession_events import Word
from nexar.cluster.membership import Member, Membership
from nexar.communicator.local_witness import LocalWitness, local_seed
from nexar.wire.messages import Accept, Accepted, Message, Number, Ping, Prepare, Promise, Rejected

INSTANCE = (0, 1, 0)
BALLOT = Number(1, 1)


def a_world() -> tuple[LocalWitness, list[Message]]:
    """Two members; what node 1 hears."""
    members = tuple(Member(node, "here", bytes(32), {}) for node in (1, 2))
    return LocalWitness(Membership("local", 1, members, seed=local_seed())), []


def change_without(node: int) -> bytes:
    return Change(2, left=(Departure(node, "it left"),)).encode()


def test_it_votes_for_who_goes_on_without_one_that_has_left() -> None:
    witness, heard = a_world()
    tell = witness.introduce(1, heard.append)
    witness.introduce(2, lambda _: None)
    witness.forget(2)
    assert tell(Prepare(INSTANCE, BALLOT))
    assert isinstance(heard.pop(), Promise)
    tell(Accept(INSTANCE, BALLOT, change_without(2)))
    assert heard == [Accepted(INSTANCE, BALLOT)]


def test_it_does_not_vote_for_the_removal_of_one_that_is_there() -> None:
    witness, heard = a_world()
    tell = witness.introduce(1, heard.append)
    witness.introduce(2, lambda _: None)
    tell(Prepare(INSTANCE, BALLOT))
    tell(Accept(INSTANCE, BALLOT, change_without(2)))
    assert isinstance(heard[-1], Rejected)
    assert heard[-1].reachable == (2,)


def test_what_is_no_word_about_who_comes_next_is_passed_over() -> None:
    witness, heard = a_world()
    assert not isinstance(Ping(1), Word)
    assert witness.introduce(1, heard.append)(Ping(1))
    assert heard == []


def test_nobody_hears_anything_who_has_left() -> None:
    witness, heard = a_world()
    tell = witness.introduce(1, heard.append)
    witness.forget(1)
    witness.forget(1)
    tell(Prepare(INSTANCE, BALLOT))
    assert heard == []


def test_each_world_has_a_seed_of_its_own() -> None:
    assert local_seed().node != local_seed().node
