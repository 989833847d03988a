"""The page of a cluster: what its seed's board shows, for browsers. Read-only, and only for who has the key.

The key is derived from the cluster's secret, so whoever has the ticket can make it, and whoever has the key cannot make
the ticket. It is part of the address, or comes in a header: `Authorization: Bearer …`. What members say of themselves
reaches the browser as JSON, and the page as text: never as markup.
"""

from __future__ import annotations

import base64
import hmac
import json
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final

from nexar.observe.http_service import TEXT, HttpResponse, HttpService, ServedPage
from nexar.observe.overview import Overview, OverviewBuilder, cells_of, straggler_text
from nexar.wire.status import StatusPage

_LABEL: Final = b"nexar page key, format 1"
_REMEDY: Final = "give --page another port, or 0 for any"
_REFUSED: Final = HttpResponse(
    b"This page needs its key: open the whole address that --page printed, or send the key as Authorization: Bearer.\n",
    TEXT,
    HTTPStatus.FORBIDDEN,
)
_MISSING: Final = HttpResponse(b"There is no such page here.\n", TEXT, HTTPStatus.NOT_FOUND)
_FILES: Final = {
    "": ("page.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_LONGEST_KEY: Final = 128


def page_key(secret: bytes) -> str:
    """Of the cluster with this secret: 43 characters that may stand in an address."""
    return base64.urlsafe_b64encode(hmac.digest(secret, _LABEL, "sha256")).decode().rstrip("=")


class PageResponder:
    """What the page answers. Any thread."""

    def __init__(self, board: Callable[[], StatusPage], secret: bytes) -> None:
        """`board` is called by one thread at a time."""
        self.key: Final = page_key(secret)
        self._board = board
        self._lock = threading.Lock()
        self._overview_builder = OverviewBuilder()  # under the lock
        folder = files("nexar.observe") / "page_files"
        self._elsewhere = HttpResponse(b"", TEXT, HTTPStatus.TEMPORARY_REDIRECT, f"{self.key}/")
        """For who left out the last slash: without it a browser looks for the page's files beside the key."""
        self._files = {path: HttpResponse((folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}

    def respond(self, path: str, headers: Mapping[str, str]) -> HttpResponse:
        """See service.Respond."""
        first, slash, rest = path.removeprefix("/").partition("/")
        if self._is_key(first):
            return self._answer(rest) if slash else self._elsewhere
        scheme, _, key = (headers.get("authorization") or "").partition(" ")
        if scheme.lower() == "bearer" and self._is_key(key.strip()):
            return self._answer(path.removeprefix("/"))
        return _REFUSED

    def _is_key(self, text: str) -> bool:
        """Takes as long for a wrong one as for the right one."""
        return len(text) <= _LONGEST_KEY and hmac.compare_digest(text.encode(), self.key.encode())

    def _answer(self, name: str) -> HttpResponse:
        if name == "board.json":
            with self._lock:  # who watches the seed from elsewhere has one line to it
                overview = self._overview_builder.see(self._board(), time.monotonic())
            return HttpResponse(json.dumps(facts_of(overview), allow_nan=False).encode(), "application/json")
        return self._files.get(name, _MISSING)


class StatusWebPage(ServedPage):
    """Served from its making on. Close it, or leave its `with` block."""

    def __init__(self, board: Callable[[], StatusPage], secret: bytes, host: str, port: int) -> None:
        """UsageError if it cannot listen there."""
        display = PageResponder(board, secret)
        self._service = HttpService(host, port, display.respond, name="page", remedy=_REMEDY)
        self.url: Final = f"{self._service.url}/{display.key}/"
        """With the key: a secret."""


def facts_of(overview: Overview) -> dict[str, Any]:
    """For programs, and in words for people."""
    facts = overview.facts()
    cells = [cells_of(line, rates=True) for line in overview.lines]
    for rank, words in zip(facts["ranks"], cells, strict=True):
        rank["cells"] = list(words.values())
    facts["headings"] = list(cells[0]) if cells else []
    facts["sentence"] = "" if overview.straggler is None else straggler_text(overview)
    return facts
