import time

from nexar.collectives.arena_records import RECORD_BYTES, Records
from nexar.collectives.fingerprint import Fingerprint, rooted
from nexar.collectives.operations import OperationCode

REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 2**40, 0, 1)
BROADCAST = Fingerprint(OperationCode.BROADCAST, 17, 8, rooted(2**20), 0)


def two() -> tuple[Records, Records]:
    memory = memoryview(bytearray(2 * RECORD_BYTES))
    return Records(memory, 0, 2), Records(memory, 1, 2)


def test_each_record_is_its_ranks_own() -> None:
    left, right = two()
    assert left.all == right.all
    assert left.others == (right.mine,)
    assert [left.index(word) for word in left.all] == [0, 1]
    assert RECORD_BYTES % 128 == 0


def test_what_was_given_up_in_a_row_is_known_and_nothing_else() -> None:
    left, right = two()
    for slip in (5, 6, 7):
        left.give_up(slip)
    assert [right.has_given_up(left.mine, slip) for slip in range(4, 9)] == [False, True, True, True, False]
    left.give_up(9)
    assert [right.has_given_up(left.mine, slip) for slip in range(7, 11)] == [False, False, True, False]


def test_the_row_is_empty_while_it_is_being_begun_anew() -> None:
    left, right = two()
    left.give_up(5)
    left.words[left.mine + 1] = 9  # the first of the two stores
    assert not any(right.has_given_up(left.mine, slip) for slip in range(4, 12))


def test_what_an_operation_is_taken_to_be_is_compared_and_told() -> None:
    left, right = two()
    left.take(4, REDUCE)
    right.take(4, REDUCE)
    assert not left.differs(right.mine, 4)
    right.take(5, BROADCAST)
    assert not left.differs(right.mine, 4)
    left.take(5, REDUCE)
    assert left.differs(right.mine, 5)
    assert left.taken(right.mine, 5) == BROADCAST
    left.take(6, REDUCE)
    right.take(6, REDUCE._replace())
    assert not left.differs(right.mine, 6)


def test_announcements_are_told_and_compared() -> None:
    left, right = two()
    before = time.monotonic_ns()
    left.announce(0, REDUCE)
    told = right.announced(left.mine, 0)
    assert told is not None
    assert told[0] == REDUCE
    assert before <= told[1] <= time.monotonic_ns()
    assert right.disagreement(0) is None
    right.announce(0, BROADCAST)
    assert right.disagreement(0) == (0, REDUCE)
    assert left.disagreement(0) == (1, BROADCAST)
    assert left.disagreement(8) is None
    assert all(left.arrivals(0))
    left.announce(8, REDUCE)
    assert left.announced(left.mine, 0) is None


def test_the_first_announcement_is_not_believed_before_it_is_whole() -> None:
    left, right = two()
    left.announce(0, REDUCE)
    last = left.mine + 16 + 4
    whole, left.words[last] = left.words[last], 0  # as it is before the last store
    assert right.announced(left.mine, 0) is None
    left.words[last] = whole
    assert right.announced(left.mine, 0) is not None


def test_an_announcement_that_is_overwritten_meanwhile_is_not_believed() -> None:
    left, right = two()
    left.announce(3, REDUCE)
    at = left.mine + 16 + 3 * 8
    left.words[at] = 11  # the first store of the next one in its room
    assert right.announced(left.mine, 3) is None
