"""A small read-only HTTP service in a thread of its own: what is shown to browsers and scrapers.

What it is to withstand, since anybody who reaches the port may speak: a request has one deadline for all of its head,
whatever pace its bytes come at, and a size that it may not exceed; there are only so many conversations at once, and
for who comes beyond that the one is hung up on that has kept silent for longest: whoever wants an answer asks at once.
A browser that a foreign page sends here by a name of its own gets nothing: the Host header must be an address, or a
name of this host. No body is ever read, no file ever opened, and a connection carries one answer.
"""

from __future__ import annotations

import io
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, Final, NamedTuple, Self, TypeAlias
from weakref import WeakSet

from nexar.errors import UsageError
from nexar.transport.address import format_address

_log = logging.getLogger(__name__)

MAX_HEAD_BYTES: Final = 8 << 10
MAX_CONNECTIONS: Final = 32
REQUEST_TIMEOUT: Final = 5.0
"""Seconds for the head of a request, and again for the answer."""
_END: Final = b"\r\n\r\n"
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
TEXT: Final = "text/plain; charset=utf-8"


class HttpResponse(NamedTuple):
    """What is sent back."""

    body: bytes
    kind: str = TEXT
    status: HTTPStatus = HTTPStatus.OK
    location: str = ""
    """Where it is instead, relative to what was asked for."""


Respond: TypeAlias = Callable[[str, Mapping[str, str]], HttpResponse]
"""From a path (without its query) and the headers (names in lower case) to an answer. Called by several threads at
once; what it raises is logged, and the other side told that it failed."""


class HttpService:
    """Open from its making on. Close it, or leave its `with` block. In a forked child it is closed by itself."""

    def __init__(self, host: str, port: int, respond: Respond, *, name: str, remedy: str = "take another") -> None:
        """Port 0: any. UsageError, with the remedy, if it cannot listen there."""
        self._respond = respond
        self._name = name
        self._names: Final = frozenset({host.lower(), "localhost", socket.gethostname().lower()})
        self._listener = _listen(host, port, name, remedy)
        found = self._listener.getsockname()
        self.host: Final[str] = found[0]
        self.port: Final[int] = found[1]
        self._room = threading.Semaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._talks: dict[threading.Thread, _Connection] = {}  # under the lock; the oldest first
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"nexar-{name}", daemon=True)
        _services.add(self)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it is, without a path."""
        return f"http://{format_address(self.host, self.port)}"

    def close(self) -> None:
        """Nobody is answered any more when this returns. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        _close_socket(self._listener)
        self._thread.join()
        with self._lock:
            talks = dict(self._talks)
        for talk in talks.values():
            _close_socket(talk.connection)
        for thread in talks:
            thread.join()
        self._listener.close()

    def abandon(self) -> None:
        """In a forked child, which has none of the threads."""
        self._closed.set()
        self._listener.close()
        for talk in list(self._talks.values()):
            talk.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the threads -------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # no descriptor is left, say: others may give some back
                if not self._closed.wait(0.2):
                    _log.warning("the %s could not take a connection: %s", self._name, error)
                continue
            if not self._make_room():
                connection.close()
                continue
            talk = _Connection(connection)
            thread = threading.Thread(target=self._talk, args=(talk,), name=f"nexar-{self._name}-talk", daemon=True)
            with self._lock:
                self._talks[thread] = talk
            try:
                thread.start()
            except RuntimeError as error:  # no thread is to be had now: the next one may be
                _log.warning("the %s could not answer a connection: %s", self._name, error)
                connection.close()
                self._ended(thread)

    def _make_room(self) -> bool:
        """For one more. False: everybody is being answered."""
        if self._room.acquire(blocking=False):
            return True
        with self._lock:
            silent = next((talk for talk in self._talks.values() if not talk.has_asked), None)
            if silent is None:
                return False
            _close_socket(silent.connection)
        return self._room.acquire(timeout=REQUEST_TIMEOUT)  # its thread is on its way out

    def _talk(self, talk: _Connection) -> None:
        def asked() -> None:
            with self._lock:
                talk.has_asked = True

        try:
            with talk.connection:
                _RequestHandler(talk.connection, self._respond, self._names, asked)
        except OSError as gone:  # it hung up, or took too long
            _log.debug("a reader of the %s went away: %s", self._name, gone)
        finally:
            self._ended(threading.current_thread())

    def _ended(self, thread: threading.Thread) -> None:
        with self._lock:
            self._talks.pop(thread, None)
        self._room.release()


class _Connection:
    """One connection, for the service."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection: Final = connection
        self.has_asked = False  # written by its thread, read by who makes room: both under the lock


class ServedPage:
    """What is shown by a service of its own, from its making on. Close it, or leave its `with` block."""

    _service: HttpService

    def close(self) -> None:
        """Idempotent."""
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _RequestHandler(BaseHTTPRequestHandler):
    """One request and its answer. The head is read here, all of it by one deadline; the library takes it apart."""

    def __init__(
        self, connection: socket.socket, respond: Respond, names: frozenset[str], asked: Callable[[], None]
    ) -> None:
        """`names`: under which this host may be asked for. `asked` is told that the head is there."""
        self.connection = self.request = connection
        self.close_connection = True
        self.command = self.requestline = ""
        self.request_version = "HTTP/1.0"
        self._respond = respond
        self._names = names
        self._asked = asked
        self.wfile: Any = io.BytesIO()
        self.handle()
        connection.settimeout(REQUEST_TIMEOUT)
        connection.sendall(self.wfile.getvalue())
        connection.shutdown(socket.SHUT_WR)

    def handle(self) -> None:
        head = _read_head(self.connection, time.monotonic() + REQUEST_TIMEOUT)
        self._asked()
        if head is None:
            return self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        self.rfile: Any = io.BytesIO(head)
        self.raw_requestline = self.rfile.readline()
        if not self.parse_request():
            return None  # what is wrong with it was said
        if self.command not in ("GET", "HEAD"):
            return self.send_error(HTTPStatus.METHOD_NOT_ALLOWED, "this is read-only: GET and HEAD")
        headers = {name.lower(): text for name, text in self.headers.items()}
        if not _is_host(headers.get("host"), self._names):
            return self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "ask by an address or by the name of this host")
        self.request_version = "HTTP/1.0"  # also of who named none: it gets headers nevertheless
        try:
            answer = self._respond(self.path.partition("?")[0], headers)
        except Exception:  # noqa: BLE001 - a fault of ours must not cost who reads next its answer
            _log.exception("no answer to a reader")
            return self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
        return self._send(answer)

    def _send(self, answer: HttpResponse) -> None:
        self.send_response_only(answer.status)
        for name, text in _HEADERS.items():
            self.send_header(name, text)
        if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if answer.location:
            self.send_header("Location", answer.location)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """As plain text, which repeats nothing of what was asked. The library says its errors by this too."""
        self.request_version = "HTTP/1.0"
        status = HTTPStatus(code)
        ours = (HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.MISDIRECTED_REQUEST)
        told = message if status in ours and message else status.phrase
        self._send(HttpResponse(f"{status.value} {told}\n".encode(), TEXT, status))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name for it
        """Nobody wants a line for each request."""


def check_place(host: str, port: int, *, name: str, remedy: str) -> None:
    """UsageError, as for a Service, if none could listen there now: for who starts those that will."""
    _listen(host, port, name, remedy).close()


def _listen(host: str, port: int, name: str, remedy: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:  # the library repeats the address in its text
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise UsageError(f"the {name} cannot listen at {format_address(host, port)}: {reason}; {remedy}") from error


def _is_host(header: str | None, names: frozenset[str]) -> bool:
    """Whether a Host header can be of who reached this host as itself. A name in the DNS that leads here is whoever's
    owns the name: a page of theirs would read the answer as its own. An address, a browser takes from nobody's DNS.
    """
    if header is None:  # no browser leaves it out
        return True
    host = header.strip().lower()
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].removesuffix(".")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host in names
    return True


def _read_head(connection: socket.socket, deadline: float) -> bytes | None:
    """Up to the empty line. None: it is too long. OSError at the deadline, or when the other side hangs up."""
    head = b""
    while _END not in head:
        if len(head) > MAX_HEAD_BYTES:
            return None
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(MAX_HEAD_BYTES)
        if not piece:
            raise ConnectionError("it hung up")
        head += piece
        if time.monotonic() >= deadline:
            raise TimeoutError("it took too long")
    return head[: head.index(_END) + len(_END)]


def _close_socket(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself


_services: Final[WeakSet[HttpService]] = WeakSet()


def _forked() -> None:
    for service in list(_services):
        service.abandon()


os.register_at_fork(after_in_child=_forked)
