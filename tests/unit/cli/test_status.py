import io
import json
from typing import Self

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nexar.cli import status as module
from nexar.cli.main import app
from nexar.cli.status import coloured, plain
from nexar.observe.overview import Overview, OverviewBuilder
from nexar.wire.status import StatusPage
from tests.unit.observe.boards import HOSTILE, board, busy, row


def seen(*, lost: bool = False) -> Overview:
    return OverviewBuilder().see(busy(lost=lost), 10.0)


def test_a_table_says_who_does_what_and_for_whom_it_waits() -> None:
    lines = plain(seen(lost=True)).splitlines()
    assert lines[0] == "4 of 4 members are present, epoch 1"
    assert lines[1].split()[:4] == ["rank", "state", "host", "pid"]
    assert "all_reduce #7 for 2.5 s" in lines[2]
    assert "quic+tls: 3, shm: 2" in lines[2]
    assert "its own code; last all_reduce #6" in lines[3]
    assert "was killed by SIGKILL (1.5 s ago)" in lines[5]
    assert lines[6] == "rank 1 keeps the others waiting: 20 ms a call, 90% of all lateness"


def test_a_rank_that_says_nothing_is_described_by_what_it_said_last() -> None:
    text = plain(OverviewBuilder().see(board(row(0, "stuck", heard=9.0, operation="barrier #3")), 1.0))
    assert "silent for 9 s; last in barrier #3" in text


def test_what_members_say_is_no_markup() -> None:
    console = Console(file=io.StringIO(), width=240, force_terminal=True, color_system="truecolor")
    console.print(coloured(seen(lost=True), rates=True))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert HOSTILE.partition("[")[0] in text
    assert "[red]" in text
    assert "\x1b[1;31mlost" in text
    assert "keeps the others waiting" in text


def test_an_empty_table_is_only_its_title() -> None:
    assert plain(OverviewBuilder().see(board(epoch=0, size=3), 0.0)) == "forming: 0 of 3 members have joined"


class Looking:
    """An observer without a seed."""

    shown = busy()

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def read_board(self) -> StatusPage:
        return self.shown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@pytest.fixture(autouse=True)
def without_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NEXAR_TICKET", "NEXAR_SEED", "NEXAR_CLUSTER_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_ticket_it_says_where_to_get_one() -> None:
    ran = CliRunner().invoke(app, ["status"])
    assert ran.exit_code == 2
    assert "give --ticket or --ticket-file, or set NEXAR_TICKET" in ran.stderr


def test_a_ticket_that_is_none_is_wrong_input_and_is_not_shown() -> None:
    ran = CliRunner().invoke(app, ["status", "--ticket", "nexar1_secretsecret"])
    assert ran.exit_code == 2
    assert "secretsecret" not in ran.stderr


@pytest.mark.parametrize(("shown", "code"), [(board(row(0)), 0), (busy(lost=True), 1), (board(size=2, epoch=0), 3)])
def test_the_exit_code_says_whether_everybody_is_well(
    shown: StatusPage, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "observer_session", Looking)
    monkeypatch.setattr(Looking, "shown", shown)
    ran = CliRunner().invoke(app, ["status", "--json"])
    assert ran.exit_code == code
    assert len(json.loads(ran.stdout)["ranks"]) == len(shown.rows)
    words = "members are present" if shown.epoch else "forming: 0 of 2 members have joined"
    assert words in CliRunner().invoke(app, ["status"]).stdout


def test_programs_get_a_line_for_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "observer_session", Looking)
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    ran = CliRunner().invoke(app, ["top", "--json", "--count", "3"])
    assert ran.exit_code == 0
    assert [json.loads(each)["size"] for each in ran.stdout.splitlines()] == [4, 4, 4]
    plain = CliRunner().invoke(app, ["top", "--count", "1"])
    assert "sent/s" in plain.stdout


@pytest.mark.parametrize("option", [("--interval", "0"), ("--count", "0")])
def test_what_makes_no_sense_is_refused(option: tuple[str, str]) -> None:
    ran = CliRunner().invoke(app, ["top", *option])
    assert ran.exit_code == 2
    assert option[0] in ran.stderr
