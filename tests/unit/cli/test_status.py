import json
from typing import Self

import pytest
from typer.testing import CliRunner

from nexar.cli import status as module
from nexar.cli.main import app
from nexar.wire.bulletin import Board
from tests.unit.observe.boards import board, busy, row


class Looking:
    """A onlooker without a seed."""

    shown = busy()

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def look(self) -> Board:
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
def test_the_exit_code_says_whether_everybody_is_well(shown: Board, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "onlooker", Looking)
    monkeypatch.setattr(Looking, "shown", shown)
    ran = CliRunner().invoke(app, ["status", "--json"])
    assert ran.exit_code == code
    assert len(json.loads(ran.stdout)["ranks"]) == len(shown.rows)
    words = "members are here" if shown.epoch else "forming: 0 of 2 members have come"
    assert words in CliRunner().invoke(app, ["status"]).stdout
