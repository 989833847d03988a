import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from nexar.cli.cluster_options import (
    as_variables,
    elastic_settings,
    entry_options,
    observer_session,
    page_address,
    shown_cluster,
    ticket_in,
)
from nexar.cli.main import app
from nexar.environment import effective
from nexar.errors import ConfigError, SeedUnreachable, UsageError
from nexar.observe import page as page_module
from nexar.security.invitation import Invitation, format_ticket
from nexar.security.storage import write_secret_file
from tests.unit.observe.boards import board


def test_options_that_were_not_given_leave_the_settings_alone():
    assert elastic_settings(elastic=False, least=None, most=None) == {}


def test_options_become_settings_and_settings_become_variables():
    given = elastic_settings(elastic=True, least=2, most=5)
    assert effective(environ=as_variables(given)).config == effective(given, {}).config
    assert as_variables(given)["NEXAR_ELASTIC_ENABLED"] == "true"


TICKET = format_ticket(Invitation(("127.0.0.1:1",), bytes(32), bytes(32)))


class FakeSeed:
    ticket = TICKET
    board = staticmethod(board)


class FakePage:
    """Without a socket."""

    def __init__(self, _: object, secret: bytes, host: str, port: int) -> None:
        assert secret == bytes(32)
        self.url = f"http://{host}:{port}/key/"

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@contextmanager
def show(place: tuple[str, int] | None, write_ticket: Path | None = None) -> Iterator[None]:
    with shown_cluster(cast(Any, FakeSeed()), place, write_ticket):
        yield


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (None, None),
        ("8080", ("127.0.0.1", 8080)),
        ("0", ("127.0.0.1", 0)),
        (":8080", ("127.0.0.1", 8080)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_a_port_alone_is_of_this_host(text: str | None, place: tuple[str, int] | None) -> None:
    assert page_address(text) == place


@pytest.mark.parametrize("text", ["", ":", "nonsense", "70000", "10.0.0.1:", "-1"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--page"):
        page_address(text)


def test_the_ticket_is_in_its_file_for_as_long_as_it_is_good(tmp_path: Path) -> None:
    path = tmp_path / "ticket"
    with show(None, path):
        assert path.read_text().strip() == TICKET
    assert not path.exists()


@pytest.mark.parametrize(
    ("host", "warned"), [("127.0.0.1", False), ("localhost", False), ("::1", False), ("10.0.0.1", True)]
)
def test_the_address_is_printed_with_a_warning_where_others_listen(
    host: str, warned: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page_module, "StatusWebPage", FakePage)
    with show((host, 80)):
        said = capsys.readouterr().err
    assert f"the page of this cluster is at http://{host}:80/key/" in said
    assert ("not encrypted" in said) is warned


@pytest.mark.parametrize(
    ("option", "part"), [(("--page", "0"), "nexar seed"), (("--write-ticket", "t"), "has a ticket already")]
)
def test_a_cluster_that_others_opened_is_theirs_to_show(option: tuple[str, str], part: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    ran = CliRunner().invoke(app, ["run", "--ticket", TICKET, *option, str(script)])
    assert ran.exit_code == 2
    assert part in ran.stderr


HERE = "127.0.0.1:9"
OBSERVER_TICKET = format_ticket(Invitation((HERE,), b"s" * 32, b"f" * 32))


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
    monkeypatch.setattr("nexar.cluster.seed_session.ObserverSession", Looks)
    for name in ("NEXAR_TICKET", "NEXAR_SEED", "NEXAR_CLUSTER_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_a_missing_file_is_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        UsageError, match=r"no ticket in .*ticket: the run that wrote it has ended, .*start the run, or wait"
    ):
        observer_session(None, tmp_path / "ticket", None, timeout=None)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 1e300, -1.0])
def test_a_time_for_which_nobody_could_wait_is_refused(tmp_path: Path, timeout: float) -> None:
    with pytest.raises(ConfigError, match=r"--timeout.*seconds, 0 to 1e\+09"):
        observer_session(None, tmp_path / "ticket", None, timeout=timeout)


def test_where_nobody_answers_it_says_when_the_ticket_was_written(tmp_path: Path) -> None:
    path = tmp_path / "ticket"
    write_secret_file(path, f"{OBSERVER_TICKET}\n".encode())
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    with pytest.raises(SeedUnreachable) as gone:
        observer_session(None, path, None, timeout=None)
    assert re.search(rf"(?s)no seed at {HERE} .*written to {path} at {written}:\d\d has ended", str(gone.value))


def test_without_a_file_it_says_what_to_do() -> None:
    with pytest.raises(SeedUnreachable, match=r"the cluster has ended, or .* give the ticket of a running cluster"):
        observer_session(OBSERVER_TICKET, None, None, timeout=None)


def test_whoever_answers_and_is_not_the_seed_is_reported_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Looks, "timeout", None)
    with pytest.raises(SeedUnreachable, match="check that the seed runs"):
        observer_session(OBSERVER_TICKET, None, None, timeout=None)


def test_who_gives_a_time_is_in_no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Looks, "timeout", None)
    made: Any = observer_session(OBSERVER_TICKET, None, None, timeout=7.0)
    assert made.asked == {"timeout": 7.0, "hurry": False}


def test_what_is_given_replaces_every_other_way_in(tmp_path):
    file = tmp_path / "ticket"
    file.write_text("nexar1-x\n")
    file.chmod(0o600)
    assert entry_options("nexar1-y", None) == {"ticket": "nexar1-y", "seed": None}
    assert entry_options(None, file) == {"ticket": "nexar1-x", "seed": None}
    assert entry_options(None, None, "a:1") == {"seed": "a:1", "ticket": None}
    assert entry_options(None, None) == {}


def test_two_ways_at_once_are_refused(tmp_path):
    with pytest.raises(UsageError, match="give one of them"):
        entry_options("nexar1-x", tmp_path / "ticket")


def test_a_file_that_is_not_there_is_named_with_the_remedy(tmp_path):
    with pytest.raises(UsageError, match=r"missing cannot be read: No such file.*; name the file that `nexar seed"):
        entry_options(None, tmp_path / "missing")


def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path, monkeypatch):
    waiting = threading.Event()
    monkeypatch.setattr("nexar.cli.cluster_options.print_message", lambda _: waiting.set())
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(entry_options, None, tmp_path / "ticket", file_timeout=50)
        assert waiting.wait(50)
        with ticket_in(tmp_path / "ticket", "nexar1-x"):
            assert found.result(timeout=50)["ticket"] == "nexar1-x"


def test_a_file_that_does_not_come_is_not_waited_for_for_ever(tmp_path):
    with pytest.raises(UsageError, match=r"missing cannot be read: No such file"):
        entry_options(None, tmp_path / "missing", file_timeout=0.01)


def test_a_ticket_is_written_for_its_owner_alone_and_goes_with_its_seed(tmp_path):
    with ticket_in(tmp_path / "ticket", "nexar1-x"):
        assert (tmp_path / "ticket").stat().st_mode & 0o777 == 0o600
        assert entry_options(None, tmp_path / "ticket")["ticket"] == "nexar1-x"
        with (
            pytest.raises(UsageError, match="cannot be written"),
            ticket_in(tmp_path / "ticket" / "below a file", "nexar1-x"),
        ):
            pass
    assert not (tmp_path / "ticket").exists()


def test_a_ticket_stays_if_its_cluster_does(tmp_path):
    with ticket_in(tmp_path / "ticket", "nexar1-x", keep=True):
        pass
    assert entry_options(None, tmp_path / "ticket")["ticket"] == "nexar1-x"


def test_the_ticket_of_another_seed_is_left_alone(tmp_path):
    with ticket_in(tmp_path / "ticket", "nexar1-x"), ticket_in(tmp_path / "ticket", "nexar1-y", keep=True):
        pass
    assert entry_options(None, tmp_path / "ticket")["ticket"] == "nexar1-y"


def test_a_ticket_that_was_taken_away_already_is_no_fault(tmp_path):
    with ticket_in(tmp_path / "ticket", "nexar1-x"):
        (tmp_path / "ticket").unlink()
