import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from nexar.collectives.fingerprint import code_of_algorithm
from nexar.collectives.flight_recorder import Dump, RecordedCall, ThreadStack, encode_dump
from nexar.errors import UsageError
from nexar.observe.dump_analysis import DumpFinding, RankPosition, analyse, call_text, positions_of, read_dumps
from tests.unit.observe.recorded import ALL_REDUCE, BROADCAST, SCAN, called, done, dump

IN_42 = (called(42, began=12.0),)


def only(*dumps: Dump) -> DumpFinding:
    (found,) = analyse(dumps)
    return found


def waiting(*ranks: int, flying: tuple[RecordedCall, ...] = IN_42) -> list[Dump]:
    return [dump(rank, done(41, 12.1), flying) for rank in ranks]


def failed(rank: int, began: float = 31.0, *, written: float = 1000.0) -> Dump:
    outcome = called(42, began=began, ended=1.0, outcome="CollectiveTimeout")
    return dump(rank, (*done(41, 31.1), outcome), written=written)


def test_a_rank_that_has_not_come_is_named_with_the_line_it_is_in() -> None:
    found = only(*waiting(0, 1, 3), dump(2, done(41, 12.0)))
    assert (found.kind, found.ranks, found.communicator) == ("missing", (2,), 0)
    assert found.text == (
        "rank 2 is missing: its last finished call is all_reduce #41, it is in user code (train.py:88) for 12 s; "
        "ranks 0, 1, 3 wait in all_reduce #42 for 12 s"
    )


def test_those_who_gave_up_waited_too() -> None:
    found = only(failed(0), failed(1), *waiting(3), dump(2, done(41, 12.0)))
    assert found.text.endswith(
        "rank 3 waits in all_reduce #42 for 12 s, ranks 0, 1 waited in all_reduce #42 until CollectiveTimeout"
    )


def test_a_rank_that_is_stuck_in_an_earlier_call_is_missing_and_the_earlier_call_is_reported_first() -> None:
    found = analyse([*waiting(0, 1, 3), dump(2, done(39), (called(40, SCAN, began=20.0),))])
    assert [each.kind for each in found] == ["mismatch", "ahead", "missing"], "the cause first, then its consequences"
    assert found[0].text == "#40 is scan of float32[8], sum on rank 2, all_reduce of float32[8], sum on ranks 0, 1, 3"
    assert "rank 2 is missing: its last finished call is all_reduce #39, it is in scan #40 for 20 s" in found[2].text


def test_who_called_something_else_is_named_once_however_many_calls_follow() -> None:
    odd = dump(1, (*done(41), called(42, BROADCAST, began=12.0, ended=11.0)), (called(43, began=10.0),))
    found = analyse([*waiting(0, 2, 3), odd])
    assert found[0].ranks == (1,)
    assert found[0].text == (
        "#42 is broadcast of float32[8], root 0 on rank 1, all_reduce of float32[8], sum on ranks 0, 2, 3"
    )
    assert [each.kind for each in found].count("mismatch") == 1


def test_ways_are_named_where_nothing_else_differs() -> None:
    other = (called(42, ALL_REDUCE._replace(algorithm_code=code_of_algorithm("direct")), began=12.0),)
    first = analyse([*waiting(0, 2, 3), *waiting(1, flying=other)])[0]
    assert first.text == (
        "#42 is all_reduce of float32[8], sum, by direct on rank 1, "
        "all_reduce of float32[8], sum, by ring on ranks 0, 2, 3"
    )


def test_a_rank_without_a_dump_is_said_to_have_none() -> None:
    dumps = [dump(rank, done(41, 12.1), IN_42, heard=13.0 + rank) for rank in (0, 1, 2)]
    found = only(*dumps)
    assert (found.kind, found.ranks) == ("no dump", (3,))
    assert found.text == (
        "rank 3 wrote no dump: it died or never got the signal; last contact was 13 s before; "
        "the others were in all_reduce #42"
    )


def test_who_came_when_the_others_had_given_up_is_late_and_an_older_dump_says_where_it_was() -> None:
    older = dump(2, done(41, 30.0), written=990.0)
    found = only(older, failed(0), failed(1), failed(3), failed(2, began=1.5))
    assert (found.kind, found.ranks) == ("late", (2,))
    assert found.text == (
        "rank 2 reached all_reduce #42 29.5 s after the first; while the others waited: "
        "its last finished call is all_reduce #41, it is in user code (train.py:88) for 30 s"
    )


def test_all_in_one_call_and_nobody_goes_on() -> None:
    dumps = [dump(rank, done(41), (called(42, began=12.0, step=2 if rank == 3 else 5),)) for rank in range(4)]
    found = only(*dumps)
    assert (found.kind, found.ranks) == ("stalled", (3,))
    assert "rank 3 has done 2 steps of it, others up to 5" in found.text


def test_who_went_on_is_notified_where_others_are_left_behind() -> None:
    root = dump(0, done(42, 1.0))
    found = only(root, *waiting(1, 2, 3))
    assert (found.kind, found.ranks) == ("ahead", (0,))
    assert found.text == "ranks 1, 2, 3 wait in all_reduce #42 for 12 s, which rank 0 has already left"


def test_a_rank_far_behind_is_named_although_nobody_waits_for_it() -> None:
    found = only(*(dump(rank, done(41, 0.01)) for rank in (0, 1, 3)), dump(2, done(20, 0.01)))
    assert (found.kind, found.ranks) == ("behind", (2,))
    assert found.text.startswith("rank 2 is 21 calls behind: its last finished call is all_reduce #20")


def test_ranks_on_their_way_have_not_diverged() -> None:
    on_its_way = (called(42, began=0.002),)
    dumps = [dump(rank, done(41, 0.003), on_its_way if rank else ()) for rank in range(4)]
    assert analyse(dumps) == ()


def test_epochs_that_differ_are_reported() -> None:
    found = only(*(dump(rank, done(3, 0.1), epoch=3 if rank else 2) for rank in range(4)))
    assert (found.kind, found.ranks, found.communicator) == ("epochs", (0,), None)
    assert found.text.startswith("epochs differ: 2 on rank 0, 3 on ranks 1, 2, 3")


def test_each_communicator_is_looked_at_for_itself_in_its_last_generation() -> None:
    dumps = [
        dump(0, done(3, 0.1), size=2),
        dump(1, done(3, 0.1), (called(4, began=0.01),), size=2),
        dump(0, done(1, 9.0), (called(2, began=8.0),), communicator=5, generation=2, size=2),
        dump(1, done(1, 9.0), communicator=5, generation=2, size=2),
    ]
    zero, one = (_joined(dumps[rank], dumps[rank + 2]) for rank in (0, 1))
    found = only(zero, one)
    assert (found.kind, found.communicator, found.ranks) == ("missing", 5, (1,))


def _half(rank: int, flying: tuple[RecordedCall, ...] = (), *, size: int = 2) -> Dump:
    """Of a node that is rank 2 or 3 of the world, and 0 or 1 of communicator 5."""
    return _joined(dump(rank + 2, done(3, 0.1)), dump(rank, done(1, 9.0), flying, communicator=5, first=2, size=size))


def test_ranks_of_another_communicator_are_named_by_their_ranks_in_the_world() -> None:
    world = [dump(rank, done(3, 0.1)) for rank in (0, 1)]
    missing = only(*world, _half(0, (called(2, began=8.0),)), _half(1))
    assert (missing.kind, missing.communicator, missing.ranks) == ("missing", 5, (3,))
    assert missing.text.startswith("rank 3 is missing")
    assert missing.text.endswith("rank 2 waits in all_reduce #2 for 8 s")
    silent = [each for each in analyse([*world, _half(0, (called(2, began=8.0),))]) if each.communicator == 5]
    assert [(each.kind, each.ranks) for each in silent] == [("no dump", (3,))]
    closed = only(*world, _half(0), dump(3, done(3, 0.1)))
    assert (closed.kind, closed.ranks) == ("closed", (3,))


def test_where_ranks_of_the_world_are_not_known_it_is_said_whose_ranks_they_are() -> None:
    alone = [dump(rank, done(1), IN_42 if rank else (), communicator=5, first=2, size=2) for rank in range(2)]
    found = only(*alone)
    assert found.ranks == (0,)
    assert found.text.startswith("(ranks of the communicator) rank 0 is missing")


def test_who_has_closed_a_communicator_that_others_are_in_is_named() -> None:
    zero = _joined(dump(0, done(3, 0.1), size=2), dump(0, done(1), communicator=5, size=2))
    found = only(zero, dump(1, done(3, 0.1), size=2))
    assert (found.kind, found.communicator, found.ranks) == ("closed", 5, (1,))


def test_dumps_of_an_earlier_run_are_left_out() -> None:
    earlier = [dump(rank, done(41), IN_42, cluster="theirs", written=1.0) for rank in range(2)]
    assert analyse([*earlier, *(dump(rank, done(3, 0.1)) for rank in range(4))]) == ()


def test_of_several_dumps_of_a_rank_the_last_counts() -> None:
    earlier = [dump(rank, done(41), IN_42 if rank else (), written=1.0) for rank in range(4)]
    assert analyse([*earlier, *(dump(rank, done(43, 0.1), written=2.0) for rank in range(4))]) == ()


def test_what_was_written_before_a_loss_is_not_hidden_by_what_a_survivor_wrote_after_it() -> None:
    lost = called(42, began=1.0, ended=0.5, outcome="PeerLost")
    before = [dump(rank, (*done(41), lost), written=1.0) for rank in (0, 1, 2)]
    after = dump(0, done(3, 0.1), communicator=9, written=2.0, size=1)
    found = only(*before, after)
    assert (found.kind, found.communicator, found.ranks) == ("no dump", 0, (3,))


def _joined(one: Dump, other: Dump) -> Dump:
    return Dump(
        **{
            **{field: getattr(one, field) for field in one.__struct_fields__},
            "communicators": (*one.communicators, *other.communicators),
        }
    )


def test_the_dumps_of_a_directory_are_read_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    for rank, written in ((0, 3.0), (1, 1.0), (2, 2.0)):
        (tmp_path / f"rank-{rank}.json").write_bytes(encode_dump(dump(rank, done(2), written=written)))
    (tmp_path / "rank-9.draft").write_bytes(b"half of it")
    found = read_dumps(tmp_path)
    assert [each.rank for each in found.dumps] == [1, 2, 0]
    assert found.unreadable == {}


def test_what_is_no_dump_is_reported_and_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(encode_dump(dump(0)))
    (tmp_path / "b.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe.json")
    found = read_dumps(tmp_path)
    assert [each.rank for each in found.dumps] == [0]
    assert "not a flight recorder dump" in found.unreadable["b.json"]


def test_nothing_to_read_is_said_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="NEXAR_DUMP_DIR"):
        read_dumps(tmp_path)
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(UsageError, match=r"\(1 other files\)"):
        read_dumps(tmp_path)
    with pytest.raises(UsageError, match="is not a directory"):
        read_dumps(tmp_path / "b.json")


def place(*arguments: object, alone: bool = True, **facts: object) -> RankPosition:
    made = dump(*arguments, **facts)  # type: ignore[arg-type]
    return RankPosition(made, made.communicators[0], alone=alone)


def test_a_rank_between_two_calls_is_in_user_code_at_a_line_since_the_last_one_ended() -> None:
    found = place(2, done(41, 12.0))
    assert found.activity() == "it is in user code (train.py:88) for 12 s"
    assert found.history() == "its last finished call is all_reduce #41"
    assert (found.begun, found.stuck) == (41, None)


def test_a_rank_that_has_done_nothing_yet_says_so() -> None:
    found = place(2, at="")
    assert found.activity() == "it is in user code"
    assert found.history() == "it has finished no call"
    assert found.begun == -1
    assert found.finished is None


def test_the_main_thread_is_nobodys_where_ranks_share_a_process() -> None:
    assert place(2, done(1), alone=False).activity() == "it is in user code for 12 s"
    places = positions_of([dump(0, pid=7), dump(1, pid=7), dump(2, pid=8)], 0, 1)
    assert ["train.py" in each.activity() for each in places] == [False, False, True]


def test_older_dumps_of_one_rank_do_not_make_it_two() -> None:
    places = positions_of([dump(0, written=1.0), dump(0, written=2.0)], 0, 1)
    assert all("train.py" in each.activity() for each in places)


def test_a_rank_is_stuck_in_the_first_call_that_lasts() -> None:
    flying = (called(42, began=12.0), called(43, SCAN, began=11.0))
    found = place(0, done(41), flying)
    assert found.stuck is flying[0]
    assert found.activity() == "it is in all_reduce #42 for 12 s"
    assert place(0, done(41), (called(42, began=0.01),)).stuck is None, "that one is on its way"


def test_a_rank_is_stuck_in_the_call_it_left_without_its_result_unless_it_went_on() -> None:
    failed = called(42, began=31.0, ended=1.0, outcome="CollectiveTimeout")
    assert place(0, (*done(41), failed)).stuck is failed
    assert place(0, (*done(41), failed, called(43, began=0.9, ended=0.5))).stuck is None


def test_what_is_of_another_communicator_or_generation_is_left_out() -> None:
    dumps = [dump(0), dump(1, communicator=5), dump(2, generation=2)]
    assert [each.rank for each in positions_of(dumps, 0, 1)] == [0]


def test_a_call_is_named_as_errors_name_it() -> None:
    assert call_text(called(7, ALL_REDUCE, began=1.0)) == "all_reduce #7"
    assert place(0, done(3), written=1000.0).arrived_at(3) == 1000.0 - 12.1
    assert place(0, done(3)).arrived_at(4) is None


def test_a_rank_in_a_call_of_another_communicator_is_in_that_call() -> None:
    made = dump(2, done(41, 12.0))
    other = replace(made.communicators[0], communicator=9, in_flight=(called(3, SCAN, began=5.0),))
    made = replace(made, communicators=(*made.communicators, other))
    assert (
        RankPosition(made, made.communicators[0], alone=True).activity() == "it is in scan #3 of communicator 9 for 5 s"
    )


@pytest.mark.parametrize(("inner", "said"), [("communicator/messaging.py", "recv"), ("arrays/view.py", "user code")])
def test_a_rank_that_waits_for_a_message_is_in_that_method(inner: str, said: str) -> None:
    frames = ("/home/ann/train.py:88 in step: comm.recv()", f"/lib/nexar/{inner}:7 in recv: return self._wait()")
    made = replace(dump(2, done(41, 12.0)), threads=(ThreadStack("MainThread", True, "train.py:88", frames),))
    found = RankPosition(made, made.communicators[0], alone=True)
    assert found.activity() == f"it is in {said} (train.py:88) for 12 s"
