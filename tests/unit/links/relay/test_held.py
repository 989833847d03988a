"""What waits to be believed: within a bound for each neighbour, the newest of it."""

from nexar.links.relay.held import HELD_BYTES, Held
from nexar.wire.relay import RelayHeader, RelayKind


def header(source: int, over: int, sequence: int = 0, number: int = 1) -> RelayHeader:
    return RelayHeader(RelayKind.FRAME, 2, number, 1, sequence, 0, (source, over, 9))


def test_all_of_it_comes_back_in_order() -> None:
    held = Held()
    assert not held
    for number in range(3):
        held.put(header(1, 5, number), b"%d" % number)
    assert held
    assert [each.carried for each in held.take()] == [b"0", b"1", b"2"]
    assert not held
    assert held.take() == []


def test_that_of_one_source_comes_back_and_the_rest_stays() -> None:
    held = Held()
    for source in (1, 2, 1):
        held.put(header(source, 5), b"of %d" % source)
    assert [each.carried for each in held.take(1)] == [b"of 1", b"of 1"]
    assert [each.carried for each in held.take()] == [b"of 2"]


def test_the_oldest_makes_room_and_only_for_what_comes_over_the_same_neighbour() -> None:
    held = Held()
    held.put(header(1, 5), b"honest")
    for number in range(40):
        held.put(header(1000 + number, 6, number), bytes(HELD_BYTES // 4))
    frames = held.take()
    assert [each.carried for each in frames if each.header.route[1] == 5] == [b"honest"]
    assert [each.header.sequence for each in frames if each.header.route[1] == 6] == [37, 38, 39]
    assert held.displaced == 37


def test_frames_that_carry_nothing_count_too() -> None:
    held = Held()
    for number in range(10_000):
        held.put(header(1, 5, number), b"")
    assert len(held.take()) < HELD_BYTES // 256


def test_one_frame_is_held_however_large_it_is() -> None:
    held = Held()
    held.put(header(1, 5), bytes(2 * HELD_BYTES))
    assert len(held.take()) == 1
