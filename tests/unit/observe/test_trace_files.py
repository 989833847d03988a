import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from nexar.errors import UsageError
from nexar.observe import trace_files
from nexar.observe.trace_files import read_parts, write_trace
from tests.unit.observe.parts import call, part


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
    assert "it is no part of a trace" in found.unreadable[str(tmp_path / "bad.part")]
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
    assert read_parts([tmp_path]).unreadable == {str(tmp_path / "pipe.part"): "it is no regular file"}


def test_what_the_file_held_stays_until_all_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    out.write_text("before")

    def half(_: object) -> Iterator[dict[str, int]]:
        yield {"one": 1}
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_files, "events", half)
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
    with pytest.raises(UsageError, match="is no directory"):
        read_parts([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match="cannot be written"):
        write_trace(tmp_path / "nowhere" / "out.json", [])
