import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nexar.cli.main import app
from nexar.collectives.flight_recorder import Dump, encode_dump
from tests.unit.observe.recorded import called, done, dump

MISSING = [
    *(dump(rank, done(41, 12.1), (called(42, began=12.0),)) for rank in (0, 1, 3)),
    dump(2, done(41, 12.0)),
]


def ask(directory: Path, *options: str) -> tuple[int, str]:
    ran = CliRunner().invoke(app, ["trace", "analyze", str(directory), *options])
    return ran.exit_code, ran.stdout


def store(directory: Path, dumps: list[Dump]) -> None:
    for number, each in enumerate(dumps):
        (directory / f"{number}.json").write_bytes(encode_dump(each))


def test_who_diverged_is_printed_in_a_sentence_and_is_status_1(tmp_path: Path) -> None:
    store(tmp_path, MISSING)
    (tmp_path / "other.json").write_text("{}")
    status, text = ask(tmp_path)
    assert status == 1
    assert text.splitlines()[0] == "4 dumps of 4 ranks"
    assert "cannot read other.json: not a flight recorder dump" in text
    assert "- rank 2 is missing: its last finished call is all_reduce #41, it is in user code (train.py:88)" in text


def test_programs_get_the_facts(tmp_path: Path) -> None:
    store(tmp_path, MISSING)
    status, text = ask(tmp_path, "--json")
    facts = json.loads(text)
    assert status == 1
    assert (facts["dumps"], facts["ranks"]) == (4, [0, 1, 2, 3])
    assert [(each["kind"], each["ranks"]) for each in facts["findings"]] == [("missing", [2])]


def test_ranks_that_agree_are_status_0(tmp_path: Path) -> None:
    store(tmp_path, [dump(rank, done(3, 0.1), size=2, communicator=7) for rank in range(2)])
    status, text = ask(tmp_path)
    assert status == 0
    assert "no rank diverged" in text


def test_a_communicator_other_than_the_first_is_named(tmp_path: Path) -> None:
    flying = (called(1, began=5.0),)
    store(tmp_path, [dump(rank, done(0), () if rank else flying, size=2, communicator=7) for rank in range(2)])
    assert "- communicator 7: (ranks of the communicator) rank 1 is missing" in ask(tmp_path)[1]


def test_nothing_to_read_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(tmp_path)[0] == 2
