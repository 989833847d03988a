"""A vote remembers promises and what was accepted, in memory and on a disk."""

import pytest

from nexar.cluster.decisions.vote import OK, Vote, approve
from nexar.wire.messages import Accept, Number

EMPTY = Vote((0, 3, 0))


def test_a_promise_closes_the_door_to_lower_ballots_and_to_no_other() -> None:
    vote = EMPTY.promising(Number(2, 5))
    assert EMPTY.allows(Number(0, 0))
    assert not vote.allows(Number(2, 4))
    assert not vote.allows(Number(1, 9))
    assert vote.allows(Number(2, 5))
    assert vote.allows(Number(3, 1))


def test_what_was_accepted_outlives_later_promises() -> None:
    vote = EMPTY.accepting(Number(1, 2), b"value").promising(Number(4, 1))
    assert (vote.accepted, vote.value, vote.promised) == (Number(1, 2), b"value", Number(4, 1))


@pytest.mark.parametrize(
    "vote", [EMPTY, EMPTY.promising(Number(1, 2)), EMPTY.accepting(Number(2**40, 2**60), b"\x00x")]
)
def test_a_vote_is_the_same_after_a_stay_on_the_disk(vote: Vote) -> None:
    assert Vote.decode(vote.encode()) == vote


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x81\xa8instance\x93\x00\x01", b"nonsense"])
def test_other_bytes_are_no_vote(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a vote"):
        Vote.decode(data)


def test_who_has_no_judge_agrees_to_anything() -> None:
    assert approve(Accept((0, 1, 0), Number(1, 1), b"")) is OK
