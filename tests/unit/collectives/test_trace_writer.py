import os
from pathlib import Path

import pytest

from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.trace_writer import TraceWriter, decode_trace_part
from tests.unit.collectives.recorded_world import World

BARRIER = Fingerprint(OperationCode.BARRIER)


def written(directory: Path) -> list[Path]:
    return sorted(directory.glob("*"))


def called(world: World, count: int) -> None:
    call_log = world[0].call_log
    for _ in range(count):
        call_log.end(call_log.begin(BARRIER))


def test_the_calls_of_a_communicator_are_written_once_for_its_owner_only(tmp_path: Path) -> None:
    world, place = World(2), tmp_path / "new" / "parts"
    writer = TraceWriter(str(place), world[0], world[0].call_log)
    called(world, 3)
    writer.write()
    called(world, 1)
    writer.write()
    (path,) = written(place)
    part = decode_trace_part(path.read_bytes())
    assert path.stat().st_mode & 0o777 == 0o600
    assert [call[0] for call in part.calls] == [0, 1, 2]
    assert (part.rank, part.size, part.pid, part.missed) == (0, 2, os.getpid(), 0)
    assert all(call[1] == tuple(BARRIER) and call[2] <= call[3] <= part.monotonic for call in part.calls)


def test_what_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    world = World(2)
    TraceWriter(str(tmp_path / "file" / "below"), world[0], world[0].call_log).write()
    assert "could not be written" in caplog.text


def test_a_forked_child_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)
    writer = TraceWriter(str(tmp_path), world[0], world[0].call_log)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    writer.write()
    assert written(tmp_path) == []


def test_bytes_that_are_no_part_are_refused() -> None:
    with pytest.raises(ValueError, match="not a trace part"):
        decode_trace_part(b"\xc1")
