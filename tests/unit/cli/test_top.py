import json

import pytest
from typer.testing import CliRunner

from nexar.cli import top as module
from nexar.cli.main import app
from tests.unit.cli.test_status import Looking


def test_programs_get_a_line_for_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "onlooker", Looking)
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
