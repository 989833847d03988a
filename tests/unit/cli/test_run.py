import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from nexar.cli.exit_codes import FAILED, WRONG_INPUT
from nexar.cli.main import app
from nexar.cli.run import merge, traced
from nexar.errors import UsageError
from tests.unit.observe.parts import call, part


def leave_part(folder: Path) -> None:
    (folder / "1.part").write_bytes(msgspec.msgpack.encode(part(0, [call(1, 1.0, 2.0)])))


def test_what_ranks_leave_in_the_given_place_becomes_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    with traced(out) as settings:
        folder = Path(str(settings["trace_dir"]))
        leave_part(folder)
    assert not folder.exists()
    assert json.loads(out.read_text())["otherData"]["calls"] == 1
    assert f"1 calls of 1 ranks are in {out}" in capsys.readouterr().err


def test_a_run_that_failed_leaves_its_trace_too(tmp_path: Path) -> None:
    out = tmp_path / "out.json"

    def run() -> None:
        with traced(out) as settings:
            leave_part(Path(str(settings["trace_dir"])))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert json.loads(out.read_text())["otherData"]["ranks"] == 1


def test_without_a_file_nobody_is_notified() -> None:
    with traced(None) as settings:
        assert settings == {}


def test_where_nothing_can_be_written_nothing_begins(tmp_path: Path) -> None:
    for place in (tmp_path / "nowhere" / "out.json", tmp_path):
        with pytest.raises(UsageError, match=f"--trace {place} cannot be written: .*; name a file"), traced(place):
            pytest.fail("it began")


def test_a_command_that_cannot_write_its_trace_starts_nobody(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(17)")
    ended = CliRunner().invoke(app, ["run", "--trace", str(tmp_path), str(script)])
    assert ended.exit_code == WRONG_INPUT
    assert "--trace" in ended.output


def test_a_run_of_which_no_rank_left_anything_touches_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    with traced(out):
        assert not out.exists(), "to look whether it could be written, nothing is"
    assert not out.exists()
    out.write_text("an older one")
    ended = CliRunner().invoke(app, ["trace", "merge", str(tmp_path), "-o", str(out)])
    assert ended.exit_code == FAILED
    assert out.read_text() == "an older one"
    assert f"{out} is not written" in capsys.readouterr().err + ended.output


def test_parts_of_other_runs_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_part(tmp_path)
    other = msgspec.structs.replace(part(1, []), cluster="other", wall=1.0)
    (tmp_path / "2.part").write_bytes(msgspec.msgpack.encode(other))
    assert merge([tmp_path], tmp_path / "out.json") == 1
    assert "skipped 1 parts of earlier runs" in capsys.readouterr().err


def test_a_part_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.part").write_bytes(b"")
    assert merge([tmp_path], tmp_path / "out.json") == 0
    assert "bad.part is left out of the trace" in capsys.readouterr().err
