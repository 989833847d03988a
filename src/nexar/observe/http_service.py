"""A small read-only HTTP service with its own threads.

Anybody may connect, so resources are bounded. A request's head has a deadline and a maximum size. When all connections
are in use, a new one replaces the oldest without a request. The Host header must be an address or a name of this host,
which defeats DNS rebinding. The service reads no body and opens no file.
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
"""Seconds for the request's head, and again for the response."""
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
    """The response to one request."""

    body: bytes
    kind: str = TEXT
    status: HTTPStatus = HTTPStatus.OK
    location: str = ""
    """Redirect target, relative to the requested path."""


Respond: TypeAlias = Callable[[str, Mapping[str, str]], HttpResponse]
"""Maps a path without query, and headers (lower-case names), to a response. Several threads call it. Exceptions are
logged and answered with status 500.
"""


class HttpService:
    """Serves from construction until `close()`. A forked child abandons it."""

    def __init__(self, host: str, port: int, respond: Respond, *, name: str, remedy: str = "take another") -> None:
        """Port 0: any. Raises UsageError with `remedy` if it cannot listen."""
        self._respond = respond
        self._name = name
        self._names: Final = frozenset({host.lower(), "localhost", socket.gethostname().lower()})
        self._listener = _listen(host, port, name, remedy)
        found = self._listener.getsockname()
        self.host: Final[str] = found[0]
        self.port: Final[int] = found[1]
        self._slots = threading.Semaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._clients: dict[threading.Thread, _Connection] = {}  # guarded by the lock; oldest first
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"nexar-{name}", daemon=True)
        _services.add(self)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{format_address(self.host, self.port)}"

    def close(self) -> None:
        """Blocks until all requests have ended. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        _close_socket(self._listener)
        self._thread.join()
        with self._lock:
            clients = dict(self._clients)
        for client in clients.values():
            _close_socket(client.connection)
        for thread in clients:
            thread.join()
        self._listener.close()

    def abandon(self) -> None:
        """For a forked child, which has none of the threads."""
        self._closed.set()
        self._listener.close()
        for client in list(self._clients.values()):
            client.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- threads -----------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # for example no descriptor is left: other threads may free some
                if not self._closed.wait(0.2):
                    _log.warning("the %s could not accept a connection: %s", self._name, error)
                continue
            if not self._take_slot():
                connection.close()
                continue
            client = _Connection(connection)
            thread = threading.Thread(
                target=self._serve_client, args=(client,), name=f"nexar-{self._name}-connection", daemon=True
            )
            with self._lock:
                self._clients[thread] = client
            try:
                thread.start()
            except RuntimeError as error:  # no thread can start now; a later one may
                _log.warning("the %s could not answer a connection: %s", self._name, error)
                connection.close()
                self._client_ended(thread)

    def _take_slot(self) -> bool:
        """False if all connections have sent a request."""
        if self._slots.acquire(blocking=False):
            return True
        with self._lock:
            silent = next((client for client in self._clients.values() if not client.has_request), None)
            if silent is None:
                return False
            _close_socket(silent.connection)
        return self._slots.acquire(timeout=REQUEST_TIMEOUT)  # its thread is ending

    def _serve_client(self, client: _Connection) -> None:
        def on_request() -> None:
            with self._lock:
                client.has_request = True

        try:
            with client.connection:
                _RequestHandler(client.connection, self._respond, self._names, on_request)
        except OSError as gone:  # the client hung up or took too long
            _log.debug("a client of the %s disconnected: %s", self._name, gone)
        finally:
            self._client_ended(threading.current_thread())

    def _client_ended(self, thread: threading.Thread) -> None:
        with self._lock:
            self._clients.pop(thread, None)
        self._slots.release()


class _Connection:
    def __init__(self, connection: socket.socket) -> None:
        self.connection: Final = connection
        self.has_request = False  # written by the connection's thread, read by the accepting one, under the lock


class ServedPage:
    """Base of objects that own a service."""

    def __init__(self, service: HttpService) -> None:
        self._service = service

    def close(self) -> None:
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _RequestHandler(BaseHTTPRequestHandler):
    def __init__(
        self, connection: socket.socket, respond: Respond, names: frozenset[str], on_request: Callable[[], None]
    ) -> None:
        """`names`: allowed in the Host header. Calls `on_request` when the head has arrived."""
        self.connection = self.request = connection
        self.close_connection = True
        self.command = self.requestline = ""
        self.request_version = "HTTP/1.0"
        self._respond = respond
        self._names = names
        self._on_request = on_request
        self.wfile: Any = io.BytesIO()
        self.handle()
        connection.settimeout(REQUEST_TIMEOUT)
        connection.sendall(self.wfile.getvalue())
        connection.shutdown(socket.SHUT_WR)

    def handle(self) -> None:
        head = _read_head(self.connection, time.monotonic() + REQUEST_TIMEOUT)
        self._on_request()
        if head is None:
            return self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        self.rfile: Any = io.BytesIO(head)
        self.raw_requestline = self.rfile.readline()
        if not self.parse_request():
            return None  # parse_request has sent the error
        if self.command not in ("GET", "HEAD"):
            return self.send_error(HTTPStatus.METHOD_NOT_ALLOWED, "read-only: use GET or HEAD")
        headers = {name.lower(): text for name, text in self.headers.items()}
        if not _is_host(headers.get("host"), self._names):
            return self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "use an address or the name of this host")
        self.request_version = "HTTP/1.0"  # a client that names no version gets headers too
        try:
            answer = self._respond(self.path.partition("?")[0], headers)
        except Exception:  # noqa: BLE001 - an error of ours must not end the service
            _log.exception("a request failed")
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
        """Repeats nothing of the request. The library calls it too."""
        self.request_version = "HTTP/1.0"
        status = HTTPStatus(code)
        ours = (HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.MISDIRECTED_REQUEST)
        reason = message if status in ours and message else status.phrase
        self._send(HttpResponse(f"{status.value} {reason}\n".encode(), TEXT, status))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's parameter name
        """Requests are not logged."""


def check_listen(host: str, port: int, *, name: str, remedy: str) -> None:
    """Raises UsageError if an HttpService could not listen there now."""
    _listen(host, port, name, remedy).close()


def _listen(host: str, port: int, name: str, remedy: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:  # the library repeats the address in its text
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise UsageError(f"the {name} cannot listen at {format_address(host, port)}: {reason}; {remedy}") from error


def _is_host(header: str | None, names: frozenset[str]) -> bool:
    """Another DNS name belongs to its registrant, whose page could read the response as same-origin."""
    if header is None:  # every browser sends it
        return True
    host = header.strip().lower()
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].removesuffix(".")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host in names
    return True


def _read_head(connection: socket.socket, deadline: float) -> bytes | None:
    """None if it is too long. Raises OSError at the deadline or if the peer hangs up."""
    head = b""
    while _END not in head:
        if len(head) > MAX_HEAD_BYTES:
            return None
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(MAX_HEAD_BYTES)
        if not piece:
            raise ConnectionError("the client hung up")
        head += piece
        if time.monotonic() >= deadline:
            raise TimeoutError("the client took too long")
    return head[: head.index(_END) + len(_END)]


def _close_socket(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # already closed by the peer


_services: Final[WeakSet[HttpService]] = WeakSet()


def _forked() -> None:
    for service in list(_services):
        service.abandon()


os.register_at_fork(after_in_child=_forked)
