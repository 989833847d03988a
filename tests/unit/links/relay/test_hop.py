"""Room by hops travelled, and why it never comes to a circle of waits."""

import random
from typing import Any, cast

import pytest

from nexar.links.relay.hop import CLASS_BYTES, MOST_SOURCES, RETURN_BYTES, WORDS_BYTES, Hop, Waiting
from nexar.wire.frame import FrameError


def hop(number: int = 1) -> Hop:
    made = Hop(number)
    made.link = cast(Any, object())
    return made


def test_nothing_goes_before_there_is_a_link() -> None:
    waits = Hop(1)
    waits.put(Waiting(1, b"x", None))
    assert waits.take() is None
    waits.link = cast(Any, object())
    assert waits.take() == Waiting(1, b"x", None)


def test_a_class_takes_so_much_and_others_are_not_held_up_by_it() -> None:
    full = hop()
    full.sent(1, CLASS_BYTES)
    full.put(Waiting(1, b"near", None))
    full.put(Waiting(2, b"far", None))
    assert full.take() == Waiting(2, b"far", None)
    assert full.take() is None
    assert full.waits == 1
    full.has_taken(1, 1)
    assert full.take() == Waiting(1, b"near", None)


def test_what_has_come_the_farthest_goes_first() -> None:
    waits = hop()
    for hops in (1, 3, 2):
        waits.put(Waiting(hops, b"", None))
    assert [each.hops for each in iter(waits.take, None)] == [3, 2, 1]


def test_room_is_given_back_in_amounts_that_no_sender_waits_for() -> None:
    came = hop()
    came.took_in(1, RETURN_BYTES)
    assert came.passed_on(1, RETURN_BYTES - 1) == 0
    assert came.passed_on(1, 1) == RETURN_BYTES


def test_who_gives_more_than_there_is_room_for_is_found_out() -> None:
    came = hop()
    came.took_in(1, CLASS_BYTES)
    came.took_in(2, 1)
    with pytest.raises(FrameError, match="after 1 hops"):
        came.took_in(1, 1)


def test_what_waits_for_who_is_gone_can_be_had_back() -> None:
    waits = hop()
    for hops in (2, 1):
        waits.put(Waiting(hops, b"", None))
    assert [each.hops for each in waits.drain()] == [1, 2]
    assert waits.waits == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_ring_full_of_frames_that_all_go_halfway_round_runs_empty(seed: int) -> None:
    """Each node of a ring sends without end to the one opposite: with one class for all, everybody would wait for
    everybody. What one frame may lie in is a class of its own for each hop, so all arrive.
    """
    chance, size, each = random.Random(seed), 8, 60_000
    out = [hop(node) for node in range(size)]  # out[n]: from n to n + 1
    came = [hop(node) for node in range(size)]  # came[n]: what n has from n - 1
    left, arrived = [40] * size, 0
    wire: list[list[tuple[int, bytes]]] = [[] for _ in range(size)]
    for _ in range(200_000):
        node = chance.randrange(size)
        if left[node] and out[node].has_room(1):
            left[node] -= 1
            out[node].sent(1, each)
            wire[node].append((1, bytes(each)))
        before = (node - 1) % size
        if wire[before]:
            hops, body = wire[before].pop(0)
            came[node].took_in(hops, each)
            if hops == size // 2:
                arrived += 1
                out[before].has_taken(hops, came[node].passed_on(hops, each))
            else:
                out[node].put(Waiting(hops + 1, body, came[node]))
        while (found := out[node].take()) is not None:
            wire[node].append((found.hops, bytes(found.body)))
            assert found.came_over is not None
            out[before].has_taken(found.hops - 1, found.came_over.passed_on(found.hops - 1, each))
        if arrived == 40 * size:
            break
    assert arrived == 40 * size


def test_room_for_what_never_went_there_is_not_remembered() -> None:
    full = hop()
    full.sent(1, CLASS_BYTES)
    for hops in range(2, 1000):
        full.has_taken(hops, 10)
    full.has_taken(1, 2 * CLASS_BYTES)
    assert full.has_room(1)
    assert not full._under_way


def test_words_of_this_node_s_own_wait_within_a_bound_and_frames_of_others_do_not_count() -> None:
    waits = Hop(1)
    waits.put(Waiting(2, bytes(WORDS_BYTES), hop(2)))
    assert waits.takes_words
    waits.put(Waiting(1, bytes(WORDS_BYTES), None))
    assert not waits.takes_words
    waits.link = cast(Any, object())
    while waits.take() is not None:
        continue
    assert waits.takes_words


def test_who_invents_sources_keeps_nobody_from_being_remembered() -> None:
    way = hop()
    way.remember((0, 5, 9))
    for invented in range(MOST_SOURCES + 10):
        way.remember((0, 6, 1000 + invented))
    way.remember((0, 6, 7))
    assert {(0, 5, 9), (0, 6, 7)} <= set(way.sources)
    assert len(way.sources) == MOST_SOURCES + 1


def test_who_says_that_it_brings_frames_of_another_does_not_take_its_place() -> None:
    way = hop()
    way.remember((0, 5, 9))
    way.remember((0, 6, 66, 9))
    way.remember((0, 5, 4, 9))
    assert way.sources == [(0, 5, 4, 9), (0, 6, 66, 9)]
