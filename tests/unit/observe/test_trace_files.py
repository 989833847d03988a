import json
from pathlib import Path

import msgspec
import pytest

from nexar.errors import UsageError
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
    assert "it is no part of a trace" in found.unreadable["bad.part"]
    assert "its format is 99" in found.unreadable["old.part"]


def test_what_is_no_directory_and_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no directory"):
        read_parts([tmp_path / "nowhere"])
    with pytest.raises(UsageError, match="cannot be written"):
        write_trace(tmp_path / "nowhere" / "out.json", [])
