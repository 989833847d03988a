from nexar.collectives.given_up import GIVEN_UP, GivenUp
from nexar.wire.messages import GaveUp


def gave_up(sequence: int, rank: int = 1, *, closed: bool = False) -> GaveUp:
    return GaveUp(3, 1, sequence, rank, "tired", closed=closed)


def test_a_call_that_was_given_up_is_found_and_no_other() -> None:
    given_up = GivenUp()
    assert not given_up
    assert given_up.add(gave_up(4))
    assert given_up.find(4) == gave_up(4)
    assert (given_up.find(3), given_up.find(5)) == (None, None)


def test_the_first_word_about_a_call_stands() -> None:
    given_up = GivenUp()
    assert given_up.add(gave_up(4, rank=1))
    assert not given_up.add(gave_up(4, rank=2))
    assert given_up.find(4) == gave_up(4, rank=1)


def test_who_has_closed_takes_no_part_in_that_call_and_those_after_it() -> None:
    given_up = GivenUp()
    given_up.add(gave_up(4))
    assert given_up.add(gave_up(4, rank=2, closed=True))
    assert given_up.find(4) == gave_up(4)
    assert given_up.find(5) == given_up.find(900) == gave_up(4, rank=2, closed=True)
    assert given_up.find(3) is None
    assert not given_up.add(gave_up(7))


def test_of_those_who_have_closed_the_first_counts() -> None:
    given_up = GivenUp()
    assert given_up.add(gave_up(6, rank=1, closed=True))
    assert not given_up.add(gave_up(8, rank=2, closed=True))
    assert given_up.add(gave_up(2, rank=3, closed=True))
    assert given_up.find(3) == gave_up(2, rank=3, closed=True)
    assert not given_up.add(gave_up(2, rank=0, closed=True))


def test_what_is_remembered_is_bounded_and_a_close_is_not_forgotten() -> None:
    given_up = GivenUp()
    given_up.add(gave_up(GIVEN_UP + 50, closed=True))
    for sequence in range(GIVEN_UP + 10):
        given_up.add(gave_up(sequence))
    assert len(given_up) == GIVEN_UP
    assert given_up.find(GIVEN_UP + 60) == gave_up(GIVEN_UP + 50, closed=True)
