import pytest
from msgspec.structs import replace

from nexar.collectives.stacks import Stack
from nexar.observe.place import Place, name, places_of
from tests.unit.observe.recorded import ALL_REDUCE, SCAN, called, done, dump


def place(*arguments: object, alone: bool = True, **facts: object) -> Place:
    made = dump(*arguments, **facts)  # type: ignore[arg-type]
    return Place(made, made.communicators[0], alone=alone)


def test_a_rank_between_two_calls_is_in_user_code_at_a_line_since_the_last_one_ended() -> None:
    found = place(2, done(41, 12.0))
    assert found.whereabouts() == "it is in user code (train.py:88) for 12 s"
    assert found.history() == "its last finished call is all_reduce #41"
    assert (found.begun, found.stuck) == (41, None)


def test_a_rank_that_has_done_nothing_yet_says_so() -> None:
    found = place(2, at="")
    assert found.whereabouts() == "it is in user code"
    assert found.history() == "it has finished no call"
    assert found.begun == -1
    assert found.finished is None


def test_the_main_thread_is_nobodys_where_ranks_share_a_process() -> None:
    assert place(2, done(1), alone=False).whereabouts() == "it is in user code for 12 s"
    places = places_of([dump(0, pid=7), dump(1, pid=7), dump(2, pid=8)], 0, 1)
    assert ["train.py" in each.whereabouts() for each in places] == [False, False, True]


def test_older_dumps_of_one_rank_do_not_make_it_two() -> None:
    places = places_of([dump(0, written=1.0), dump(0, written=2.0)], 0, 1)
    assert all("train.py" in each.whereabouts() for each in places)


def test_a_rank_is_stuck_in_the_first_call_that_lasts() -> None:
    flying = (called(42, began=12.0), called(43, SCAN, began=11.0))
    found = place(0, done(41), flying)
    assert found.stuck is flying[0]
    assert found.whereabouts() == "it is in all_reduce #42 for 12 s"
    assert place(0, done(41), (called(42, began=0.01),)).stuck is None, "that one is on its way"


def test_a_rank_is_stuck_in_the_call_it_left_without_its_result_unless_it_went_on() -> None:
    failed = called(42, began=31.0, ended=1.0, outcome="CollectiveTimeout")
    assert place(0, (*done(41), failed)).stuck is failed
    assert place(0, (*done(41), failed, called(43, began=0.9, ended=0.5))).stuck is None


def test_what_is_of_another_communicator_or_generation_is_left_out() -> None:
    dumps = [dump(0), dump(1, communicator=5), dump(2, generation=2)]
    assert [each.rank for each in places_of(dumps, 0, 1)] == [0]


def test_a_call_is_named_as_errors_name_it() -> None:
    assert name(called(7, ALL_REDUCE, began=1.0)) == "all_reduce #7"
    assert place(0, done(3), written=1000.0).came_at(3) == 1000.0 - 12.1
    assert place(0, done(3)).came_at(4) is None


def test_a_rank_in_a_call_of_another_communicator_is_in_that_call() -> None:
    made = dump(2, done(41, 12.0))
    other = replace(made.communicators[0], communicator=9, in_flight=(called(3, SCAN, began=5.0),))
    made = replace(made, communicators=(*made.communicators, other))
    assert Place(made, made.communicators[0], alone=True).whereabouts() == "it is in scan #3 of communicator 9 for 5 s"


@pytest.mark.parametrize(("inner", "said"), [("communicator/messaging.py", "recv"), ("arrays/view.py", "user code")])
def test_a_rank_that_waits_for_a_message_is_in_that_method(inner: str, said: str) -> None:
    frames = ("/home/ann/train.py:88 in step: comm.recv()", f"/lib/nexar/{inner}:7 in recv: return self._wait()")
    made = replace(dump(2, done(41, 12.0)), threads=(Stack("MainThread", True, "train.py:88", frames),))
    found = Place(made, made.communicators[0], alone=True)
    assert found.whereabouts() == f"it is in {said} (train.py:88) for 12 s"
