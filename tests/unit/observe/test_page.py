import json
from http import HTTPStatus
from urllib.parse import urljoin

import pytest

from nexar.observe.http_service import HttpResponse
from nexar.observe.page import PageResponder, page_key
from nexar.wire.status import StatusPage, StatusReport, StatusRow
from tests.unit.observe.boards import HOSTILE, busy

SECRET = bytes(range(32))


def display(board: StatusPage | None = None) -> PageResponder:
    return PageResponder(lambda: busy(lost=True) if board is None else board, SECRET)


def ask(path: str, **headers: str) -> HttpResponse:
    return display().respond(path.replace("KEY", page_key(SECRET)), headers)


def test_the_key_follows_from_the_secret_and_is_not_the_secret() -> None:
    assert page_key(SECRET) == page_key(bytes(range(32)))
    assert page_key(SECRET) != page_key(bytes(32))
    assert len(page_key(SECRET)) == 43
    assert page_key(SECRET).replace("-", "").replace("_", "").isalnum()


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/board.json",
        "/wrong/board.json",
        "/KEYx/",
        "/key/",
        "//",
        "/%2e%2e/",
        "/../KEY/",
        "/é/",
        "",
        "/" + "a" * 9999,
    ],
)
def test_without_the_key_nothing_is_shown_but_what_to_do(path: str) -> None:
    answer = ask(path)
    assert answer.status == HTTPStatus.FORBIDDEN
    assert b"--page printed" in answer.body
    assert page_key(SECRET).encode() not in answer.body


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic KEY", "Bearer KEY KEY", "Bearer é"])
def test_a_header_with_something_else_is_no_key(header: str) -> None:
    assert ask("/board.json", authorization=header.replace("KEY", page_key(SECRET))).status == HTTPStatus.FORBIDDEN


def test_the_key_may_come_in_the_address_or_in_a_header() -> None:
    one, other = ask("/KEY/board.json"), ask("/board.json", authorization=f"bearer  {page_key(SECRET)}")
    assert json.loads(one.body)["title"] == json.loads(other.body)["title"]
    assert one.kind == "application/json"


def test_who_left_out_the_last_slash_is_sent_to_where_the_files_are_found() -> None:
    answer = ask("/KEY")
    assert (answer.status, answer.body) == (HTTPStatus.TEMPORARY_REDIRECT, b"")
    there = urljoin(f"http://host/proxied/{page_key(SECRET)}", answer.location)
    assert there == f"http://host/proxied/{page_key(SECRET)}/"
    assert ask("/KEY/").status == HTTPStatus.OK
    assert "KEY" not in ask("/wrong").location


@pytest.mark.parametrize(
    "path", ["/KEY/page.html", "/KEY/../page.py", "/KEY/etc/passwd", "/KEY//page.js", "/KEY/page_files"]
)
def test_with_the_key_there_is_only_what_is_there(path: str) -> None:
    assert ask(path).status == HTTPStatus.NOT_FOUND


def test_the_page_needs_nothing_from_elsewhere_and_puts_nothing_in_as_markup() -> None:
    html, css, script = (ask(f"/KEY/{name}").body.decode() for name in ("", "page.css", "page.js"))
    assert 'src="page.js"' in html
    assert 'href="page.css"' in html
    for text in (html, css, script):
        assert "//" not in text.replace("// Everything that comes", "").replace("; // milliseconds", "")
    assert "<script>" not in html
    assert not {"innerHTML", "outerHTML", "document.write", "eval", "insertAdjacentHTML"} & set(script.split("."))
    assert "style=" not in html


def test_the_board_has_the_facts_and_the_text() -> None:
    facts = json.loads(ask("/KEY/board.json").body)
    assert facts["headings"][:2] == ["rank", "state"]
    assert [rank["cells"][1] for rank in facts["ranks"]] == ["waiting", "running", "waiting", "lost"]
    assert facts["ranks"][2]["host"] == HOSTILE
    assert "rank 1 keeps the others waiting" in facts["sentence"]
    assert json.loads(
        PageResponder(lambda: StatusPage("c", 3), SECRET).respond(f"/{page_key(SECRET)}/board.json", {}).body
    ) == {
        "cluster": "c",
        "epoch": 0,
        "size": 3,
        "joined": 0,
        "title": "forming: 0 of 3 members have joined",
        "straggler": None,
        "ranks": [],
        "headings": [],
        "sentence": "",
    }


def test_what_no_browser_could_read_is_never_sent() -> None:
    row = StatusRow(1, 0, "running", "host", heard=float("inf"), bulletin=StatusReport(0, 1))
    with pytest.raises(ValueError, match="not JSON compliant"):
        display(StatusPage("c", 1, epoch=1, rows=(row,))).respond(f"/{page_key(SECRET)}/board.json", {})
