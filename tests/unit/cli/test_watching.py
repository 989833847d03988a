import re
import time
from pathlib import Path
from typing import Any

import pytest

from nexar.cli.watching import onlooker
from nexar.errors import ConfigError, SeedUnreachable, UsageError
from nexar.security.invitation import Invitation
from nexar.security.join_ticket import format_ticket
from nexar.security.storage import write_secret_file

HERE = "127.0.0.1:9"
TICKET = format_ticket(Invitation((HERE,), b"s" * 32, b"f" * 32))


class Looks:
    """Instead of who would look: nobody answers, for this reason."""

    timeout: float | None = 2.0

    def __init__(self, invitation: Invitation, _: object, **asked: Any) -> None:
        assert invitation.addresses == (HERE,)
        self.asked = asked
        if self.timeout is not None or asked["hurry"]:
            raise SeedUnreachable(addresses=[HERE], attempts=1, cause="Connection refused", timeout=self.timeout)


@pytest.fixture(autouse=True)
def _looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexar.cluster.onlooker.Onlooker", Looks)
    for name in ("NEXAR_TICKET", "NEXAR_SEED", "NEXAR_CLUSTER_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_a_file_that_is_not_there_is_told_of_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"no ticket in .*ticket: the run that wrote it has ended .*start it, or wait"):
        onlooker(None, tmp_path / "ticket", None, timeout=None)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 1e300, -1.0])
def test_a_time_for_which_nobody_could_wait_is_refused(tmp_path: Path, timeout: float) -> None:
    with pytest.raises(ConfigError, match=r"--timeout.*seconds, 0 to 1e\+09"):
        onlooker(None, tmp_path / "ticket", None, timeout=timeout)


def test_where_nobody_answers_it_says_when_the_ticket_was_written(tmp_path: Path) -> None:
    path = tmp_path / "ticket"
    write_secret_file(path, f"{TICKET}\n".encode())
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    with pytest.raises(SeedUnreachable) as gone:
        onlooker(None, path, None, timeout=None)
    assert re.search(rf"(?s)no seed at {HERE} .*written to {path} at {written}:\d\d has ended", str(gone.value))


def test_without_a_file_it_says_what_to_do() -> None:
    with pytest.raises(SeedUnreachable, match=r"the cluster has ended, or .* give the ticket of one that runs"):
        onlooker(TICKET, None, None, timeout=None)


def test_whoever_answers_and_is_not_the_seed_is_told_of_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Looks, "timeout", None)
    with pytest.raises(SeedUnreachable, match="check that the seed runs"):
        onlooker(TICKET, None, None, timeout=None)


def test_who_gives_a_time_is_in_no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Looks, "timeout", None)
    made: Any = onlooker(TICKET, None, None, timeout=7.0)
    assert made.asked == {"timeout": 7.0, "hurry": False}
