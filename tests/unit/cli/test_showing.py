from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from nexar.cli.main import app
from nexar.cli.showing import page_place, shown
from nexar.errors import ConfigError
from nexar.observe import page as page_module
from nexar.security.invitation import Invitation
from nexar.security.join_ticket import format_ticket
from tests.unit.observe.boards import board

TICKET = format_ticket(Invitation(("127.0.0.1:1",), bytes(32), bytes(32)))


class Door:
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
    with shown(cast(Any, Door()), place, write_ticket):
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
    assert page_place(text) == place


@pytest.mark.parametrize("text", ["", ":", "nonsense", "70000", "10.0.0.1:", "-1"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--page"):
        page_place(text)


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
    monkeypatch.setattr(page_module, "Page", FakePage)
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
