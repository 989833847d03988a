import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nexar.errors import UsageError
from nexar.observe import trace_merge
from nexar.observe.trace_merge import events, read_parts, write_trace
from tests.unit.observe.parts import call, part

US = 1e-6


def of_phase(found: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [each for each in found if each["ph"] == phase]


def late() -> list[dict[str, Any]]:
    """Rank 1 comes 2 ms after rank 0."""
    return list(events([part(0, [call(7, 10.0, 10.003)]), part(1, [call(7, 10.002, 10.003)])]))


def test_each_call_is_a_slice_with_the_arrival_of_every_rank() -> None:
    one, other = (each for each in of_phase(late(), "X") if each["cat"] == "collective")
    assert (one["name"], one["pid"], one["tid"]) == ("all_reduce", 0, 0)
    assert (one["ts"], one["dur"]) == (0.0, pytest.approx(3000, abs=0.1))
    assert other["ts"] == pytest.approx(2000, abs=0.1)
    assert one["args"]["arrivals_us"] == {"rank 0": 0.0, "rank 1": pytest.approx(2000, abs=0.1)}
    assert (one["args"]["last"], one["args"]["sequence"], one["args"]["bytes"]) == (1, 7, 64)


def test_who_waited_shows_for_whom_and_an_arrow_leads_there() -> None:
    found = late()
    (wait,) = (each for each in found if each.get("cat") == "wait")
    assert (wait["name"], wait["pid"], wait["ts"]) == ("waiting for rank 1", 0, 0.0)
    assert wait["dur"] == pytest.approx(2000, abs=0.1)
    (begins,), (ends,) = of_phase(found, "s"), of_phase(found, "f")
    assert begins["id"] == ends["id"]
    assert (begins["pid"], ends["pid"], ends["bp"]) == (1, 0, "e")
    assert begins["ts"] == pytest.approx(ends["ts"], abs=0.1)


def test_ranks_that_come_together_need_no_arrow() -> None:
    found = list(events([part(rank, [call(1, 1.0 + rank * 10 * US, 1.001)]) for rank in range(3)]))
    assert {each["ph"] for each in found} == {"M", "X"}
    assert len(of_phase(found, "X")) == 3


def test_a_node_whose_rank_changed_is_one_process_of_the_trace() -> None:
    found = list(
        events(
            [
                part(2, [call(1, 1.0, 1.1)], node=9),
                part(1, [call(0, 2.0, 2.1)], node=9, generation=2),
                part(0, [call(0, 2.0, 2.1)], node=9, generation=2, communicator=0xAB),
            ]
        )
    )
    assert {each["pid"] for each in found} == {0}
    names = {each["args"]["name"] for each in of_phase(found, "M") if "name" in each["args"]}
    assert names == {"rank 2, then 1", "world", "communicator 171"}


def test_ranks_of_another_communicator_are_called_as_their_processes_are() -> None:
    """Nodes 3 and 4 are ranks 2 and 3 of the world, and 0 and 1 of the other, to which the last one comes late."""
    world = [part(rank, [call(0, 0.0, 0.001)]) for rank in range(4)]
    half = [
        part(0, [call(0, 1.0, 2.0)], node=3, communicator=9),
        part(1, [call(0, 1.9, 2.0)], node=4, communicator=9),
    ]
    found = list(events([*half, *world]))
    names = {each["pid"]: each["args"]["name"] for each in found if each["name"] == "process_name"}
    (wait,) = (each for each in found if each.get("cat") == "wait")
    assert (names[wait["pid"]], wait["name"]) == ("rank 2", "waiting for rank 3")
    calls = [each["args"] for each in found if each.get("cat") == "collective" and each["tid"] == 1]
    assert [each["last"] for each in calls] == [3, 3]
    assert set(calls[0]["arrivals_us"]) == {"rank 2", "rank 3"}


def test_a_rank_whose_place_in_the_world_is_not_known_is_named_with_its_communicator() -> None:
    found = list(events([part(1, [call(0, 1.0, 2.0)], communicator=9)]))
    assert found[0]["args"]["name"] == "rank 1 of communicator 9"


def test_hosts_with_different_clocks_are_on_one() -> None:
    found = list(events([part(0, [call(1, 1.0, 1.002)]), part(1, [call(1, 1.0, 1.002)], host="b", ahead=12345.0)]))
    starts = [each["ts"] for each in of_phase(found, "X") if each["cat"] == "collective"]
    assert starts == pytest.approx([0.0, 0.0], abs=1.0)


def test_a_call_that_failed_says_so_and_nothing_makes_an_empty_trace() -> None:
    (failed,) = of_phase(list(events([part(0, [call(1, 1.0, 2.0, outcome="PeerLost")])])), "X")
    assert failed["args"]["error"] == "PeerLost"
    assert list(events([])) == []


def test_what_is_written_is_json_with_every_call(tmp_path: Path) -> None:
    parts = [part(rank, [call(number, number, number + 0.5) for number in range(5)]) for rank in range(2)]
    written = write_trace(tmp_path / "out.json", parts)
    trace = json.loads((tmp_path / "out.json").read_text())
    assert written == (2, 10, 0)
    assert trace["otherData"]["calls"] == 10
    assert sum(each.get("cat") == "collective" for each in trace["traceEvents"]) == 10


def test_no_part_makes_a_trace_that_is_empty_and_still_json(tmp_path: Path) -> None:
    assert write_trace(tmp_path / "out.json", []).ranks == 0
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"] == []


def test_files_that_are_no_parts_are_named_and_the_others_read(tmp_path: Path) -> None:
    (tmp_path / "good.part").write_bytes(msgspec.msgpack.encode(part(0, [])))
    (tmp_path / "bad.part").write_bytes(b"\xc1")
    (tmp_path / "old.part").write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(part(0, []), format=99)))
    found = read_parts([tmp_path])
    assert len(found.parts) == 1
    assert "not a trace part" in found.unreadable[str(tmp_path / "bad.part")]
    assert "its format is 99" in found.unreadable[str(tmp_path / "old.part")]


def store(place: Path, name: str, **changes: object) -> None:
    place.mkdir(exist_ok=True)
    whole = msgspec.structs.replace(part(0, [call(1, 1.0, 2.0)]), **changes)
    (place / f"{name}.part").write_bytes(msgspec.msgpack.encode(whole))


def test_of_several_runs_in_one_directory_the_last_one_is_read(tmp_path: Path) -> None:
    store(tmp_path / "here", "a", cluster="old", wall=100.0)
    store(tmp_path / "here", "b", cluster="new", wall=200.0)
    store(tmp_path / "there", "c", cluster="new", wall=90.0, rank=1)
    store(tmp_path / "there", "d", cluster="older", wall=80.0)
    found = read_parts([tmp_path / "here", tmp_path / "there"])
    assert [each.rank for each in found.parts] == [0, 1], "whatever the clock on the wall of another host says"
    assert found.earlier == 2


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_a_time_that_is_none_makes_no_part(tmp_path: Path, time: float) -> None:
    store(tmp_path, "wall", wall=time)
    store(tmp_path, "monotonic", monotonic=time)
    store(tmp_path, "began", calls=(call(1, time, 2.0),))
    store(tmp_path, "ended", calls=(call(1, 1.0, time),))
    found = read_parts([tmp_path])
    assert found.parts == ()
    assert len(found.unreadable) == 4


def test_a_pipe_in_the_directory_holds_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.part")
    assert read_parts([tmp_path]).unreadable == {str(tmp_path / "pipe.part"): "it is not a regular file"}


def test_what_the_file_held_stays_until_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    out.write_text("before")

    def half(_: object) -> Iterator[dict[str, int]]:
        yield {"one": 1}
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_merge, "events", half)
    with pytest.raises(UsageError, match="No space left"):
        write_trace(out, [part(0, [])])
    assert out.read_text() == "before"
    assert list(tmp_path.iterdir()) == [out]


def test_a_link_to_a_file_stays_one_and_what_is_no_file_gets_the_trace_as_it_comes(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out.json")
    write_trace(tmp_path / "link", [part(0, [])])
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "out.json").read_text())["otherData"]["ranks"] == 1
    write_trace(Path("/dev/null"), [part(0, [])])
    assert Path("/dev/null").is_char_device()


def test_what_is_no_directory_and_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a directory"):
        read_parts([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match="cannot be written"):
        write_trace(tmp_path / "nowhere" / "out.json", [])
