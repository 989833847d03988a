"""A rank closes a communicator that others still use: what they hear, and when."""

from nexar.collectives.farewell import Farewell
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.errors import Revoked
from nexar.wire.messages import GaveUp, Inquire, Report
from tests.unit.collectives.told_world import World

BARRIER = Fingerprint(OperationCode.BARRIER)


def told(world: World) -> list[tuple[int, int]]:
    return [(source, dest) for source, dest, message in world.said if isinstance(message, GaveUp)]


def leave(world: World, rank: int) -> None:
    world[rank].journal.leave()
    world[rank].journal.close()


def test_it_answers_that_a_call_is_done_or_will_never_be() -> None:
    farewell = Farewell(3, 1, 2, 5)
    assert farewell.answer(Inquire(3, 1, 4, 9)) == Report(3, 1, 9, 2, "done")
    for sequence in (5, 6):
        assert farewell.answer(Inquire(3, 1, sequence, 9)) == farewell.word
    message = farewell.answer(Inquire(3, 1, -1, 9))  # of no collective
    assert isinstance(message, Report)
    assert message.doing == "user code, which has closed this communicator"
    assert farewell.word.closed
    assert (farewell.word.sequence, farewell.word.rank) == (5, 2)


def test_where_all_close_after_the_same_call_nothing_is_said() -> None:
    world = World(3)
    for rank in world.ranks:
        rank.journal.end(rank.journal.begin(BARRIER))
    for number in range(3):
        leave(world, number)
    world.deliver()
    assert world.said == []


def test_who_waits_already_is_told_at_once_and_also_of_calls_to_come() -> None:
    world = World(3, pairs=[(0, 1), (1, 2)])
    waiting = [world[rank].journal.begin(BARRIER) for rank in (1, 2)]
    assert world[0].hears(1, 0, BARRIER)
    leave(world, 0)
    world.deliver()  # to 2 through 1
    for entry in waiting:
        assert isinstance(entry.error, Revoked)
        assert (entry.error.rank, entry.error.closed) == (0, True)
        assert "rank 0 has closed it, and takes no part in barrier #0" in str(entry.error)
    for rank, entry in zip((1, 2), waiting, strict=True):
        world[rank].journal.end(entry, entry.error)
        assert world[rank].journal.take() is None
        assert "barrier #1" in str(world[rank].journal.begin(BARRIER).error)
    assert len(told(world)) == len(set(told(world)))


def test_who_comes_later_is_told_when_it_asks() -> None:
    world = World(2)
    leave(world, 0)
    entry = world[1].journal.begin(BARRIER)
    assert entry.error is None
    world[1].journal.patience.declare(entry)
    world.deliver()
    assert isinstance(entry.error, Revoked)


def test_who_asks_in_the_moment_between_is_told_too() -> None:
    world = World(2)
    world[0].journal.leave()
    entry = world[1].journal.begin(BARRIER)
    world[1].journal.patience.declare(entry)
    world.deliver()
    assert isinstance(entry.error, Revoked)


def test_a_call_that_it_had_a_part_in_is_left_alone() -> None:
    world = World(2)
    entries = [rank.journal.begin(BARRIER) for rank in world.ranks]
    world[0].journal.end(entries[0])
    leave(world, 0)
    world[1].journal.patience.declare(entries[1])
    world.deliver()
    assert entries[1].error is None
    assert world[1].journal.end(entries[1]) is None


def test_one_that_is_closed_already_says_nothing() -> None:
    world = World(2)
    assert world[0].hears(1, 0, BARRIER)
    world[0].journal.close()
    leave(world, 0)
    assert world.said == []
