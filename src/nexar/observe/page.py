"""The read-only web page of a seed's status board.

A request needs the key, which derives from the cluster's secret, in the URL or in an `Authorization: Bearer` header.
The page shows members' text as text, never as markup.
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
_MAX_KEY_LENGTH: Final = 128


def page_key(secret: bytes) -> str:
    """43 URL-safe characters."""
    return base64.urlsafe_b64encode(hmac.digest(secret, _LABEL, "sha256")).decode().rstrip("=")


class PageResponder:
    """Answers the page's requests. Thread-safe."""

    def __init__(self, board: Callable[[], StatusPage], secret: bytes) -> None:
        """`board` is called by one thread at a time."""
        self.key: Final = page_key(secret)
        self._board = board
        self._lock = threading.Lock()
        self._overview_builder = OverviewBuilder()  # guarded by the lock
        folder = files("nexar.observe") / "page_files"
        self._redirect = HttpResponse(b"", TEXT, HTTPStatus.TEMPORARY_REDIRECT, f"{self.key}/")
        """Adds the last slash, without which relative URLs are wrong."""
        self._files = {path: HttpResponse((folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}

    def respond(self, path: str, headers: Mapping[str, str]) -> HttpResponse:
        first, slash, rest = path.removeprefix("/").partition("/")
        if self._is_key(first):
            return self._answer(rest) if slash else self._redirect
        scheme, _, key = (headers.get("authorization") or "").partition(" ")
        if scheme.lower() == "bearer" and self._is_key(key.strip()):
            return self._answer(path.removeprefix("/"))
        return _REFUSED

    def _is_key(self, text: str) -> bool:
        """In constant time."""
        return len(text) <= _MAX_KEY_LENGTH and hmac.compare_digest(text.encode(), self.key.encode())

    def _answer(self, name: str) -> HttpResponse:
        if name == "board.json":
            with self._lock:  # a board of a remote seed is read over one connection
                overview = self._overview_builder.see(self._board(), time.monotonic())
            return HttpResponse(json.dumps(facts_of(overview), allow_nan=False).encode(), "application/json")
        return self._files.get(name, _MISSING)


class StatusWebPage(ServedPage):
    """Serves the page. Its URL contains the key."""

    def __init__(self, board: Callable[[], StatusPage], secret: bytes, host: str, port: int) -> None:
        """Raises UsageError if it cannot listen."""
        responder = PageResponder(board, secret)
        service = HttpService(host, port, responder.respond, name="page", remedy=_REMEDY)
        super().__init__(service)
        self.url: Final = f"{service.url}/{responder.key}/"


def facts_of(overview: Overview) -> dict[str, Any]:
    """Return the overview and its text as JSON data."""
    facts = overview.facts()
    cells = [cells_of(line, rates=True) for line in overview.lines]
    for rank, words in zip(facts["ranks"], cells, strict=True):
        rank["cells"] = list(words.values())
    facts["headings"] = list(cells[0]) if cells else []
    facts["sentence"] = "" if overview.straggler is None else straggler_text(overview)
    return facts
