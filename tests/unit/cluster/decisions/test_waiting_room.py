"""A stranger has its turn, for a while, and never at the cost of one that speaks while another is silent."""

from hypothesis import given
from hypothesis import strategies as st

from nexar.cluster.decisions.waiting_room import WaitingRoom


def test_with_room_nobody_has_to_go() -> None:
    room = WaitingRoom(2, 10.0)
    assert room.enter(1, 0.0) is None
    assert room.enter(2, 0.0) is None
    assert len(room) == 2


def test_without_room_the_oldest_silent_one_goes() -> None:
    room = WaitingRoom(2, 10.0)
    room.enter(1, 0.0)
    room.enter(2, 0.0)
    room.spoke(1)
    assert room.enter(3, 0.0) == 2
    assert room.enter(4, 0.0) == 3
    assert 1 in room


def test_when_all_have_spoken_the_oldest_goes() -> None:
    room = WaitingRoom(2, 10.0)
    for connection in (1, 2):
        room.enter(connection, 0.0)
        room.spoke(connection)
    assert room.enter(3, 0.0) == 1


def test_speaking_buys_no_time() -> None:
    room = WaitingRoom(2, 10.0)
    room.enter(1, 0.0)
    room.spoke(1)
    room.enter(2, 5.0)
    assert room.next_deadline == 10.0
    assert room.expired(9.9) == []
    assert room.expired(10.0) == [1]
    assert room.next_deadline == 15.0


def test_who_left_is_not_waited_for() -> None:
    room = WaitingRoom(2, 10.0)
    room.enter(1, 0.0)
    room.leave(1)
    room.leave(1)
    room.spoke(1)
    assert room.next_deadline is None
    assert room.expired(100.0) == []


@given(st.lists(st.tuples(st.sampled_from(["enter", "spoke", "leave", "tick"]), st.integers(0, 9)), max_size=60))
def test_it_never_holds_more_than_it_may_and_each_leaves_once(steps: list[tuple[str, int]]) -> None:
    room, inside, ended, now = WaitingRoom(3, 4.0), set[int](), list[int](), 0.0
    for number, (step, target) in enumerate(steps):
        now += 1
        if step == "enter":
            displaced = room.enter(100 + number, now)
            inside.add(100 + number)
            ended += [] if displaced is None else [displaced]
        elif step == "tick":
            ended += room.expired(now)
        elif inside:
            chosen = sorted(inside)[target % len(inside)]
            if step == "leave":
                ended.append(chosen)
                room.leave(chosen)
            else:
                room.spoke(chosen)
        inside -= set(ended)
        assert len(room) == len(inside) <= 3
        assert all(connection in room for connection in inside)
    assert len(ended) == len(set(ended))
