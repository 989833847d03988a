"""A ballot counts each voter once, and finds out what must be proposed."""

from nexar.cluster.decisions.ballot import Ballot
from nexar.wire.messages import Number


def a_ballot(**promises: tuple[int, bytes] | None) -> Ballot:
    """`a=None`: a voter that had accepted nothing; `b=(3, b"x")`: one that accepted x in round 3."""
    ballot = Ballot(Number(9, 1), again=0.0, interval=0.1)
    for name, accepted in promises.items():
        number, value = (None, b"") if accepted is None else (Number(accepted[0], 7), accepted[1])
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
    ballot.promised(ord("a"), Number(1, 1), b"other")
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
