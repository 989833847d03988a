"""Those who reach the port of the page or of the metrics, and want to do harm there. Real sockets of this process."""

import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus

import pytest

from nexar.config import Config
from nexar.errors import UsageError
from nexar.observe import http_service as module
from nexar.observe.http_service import MAX_CONNECTIONS, MAX_HEAD_BYTES, HttpResponse, HttpService
from nexar.observe.metrics import check_metrics, open_metrics
from nexar.observe.page import StatusWebPage

HERE = "127.0.0.1"


def respond(path: str, headers: Mapping[str, str]) -> HttpResponse:
    if path == "/fault":
        raise RuntimeError("a bug of ours")
    return HttpResponse(f"path {path}".encode())


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpService]:
    monkeypatch.setattr(module, "REQUEST_TIMEOUT", 0.4)
    with HttpService(HERE, 0, respond, name="trial") as made:
        yield made


def connect(service: HttpService) -> socket.socket:
    return socket.create_connection((service.host, service.port), timeout=20)


def say(service: HttpService, request: bytes) -> bytes:
    with connect(service) as line:
        line.sendall(request)
        return read(line)


def read(line: socket.socket) -> bytes:
    """Until the other side ends it; a reset is an end too."""
    found = b""
    try:
        while piece := line.recv(65536):
            found += piece
    except ConnectionError:
        return found
    return found


def test_a_path_is_answered_whole_with_headers_that_keep_browsers_careful(service: HttpService) -> None:
    answer = say(service, b"GET /a/b?key=secret HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200")
    assert body == b"path /a/b"
    for header in (b"nosniff", b"no-referrer", b"default-src 'none'", b"X-Frame-Options: DENY", b"no-store"):
        assert header in head
    assert b"Python" not in head


def test_a_head_is_asked_for_alone(service: HttpService) -> None:
    line = http.client.HTTPConnection(service.host, service.port, timeout=20)
    line.request("HEAD", "/x")
    answer = line.getresponse()
    assert (answer.status, answer.getheader("Content-Length"), answer.read()) == (200, "7", b"")
    line.close()


@pytest.mark.parametrize("method", [b"POST", b"PUT", b"DELETE", b"OPTIONS", b"TRACE", b"CONNECT", b"BREW"])
def test_whoever_wants_to_change_something_is_notified_that_this_is_read_only(
    service: HttpService, method: bytes
) -> None:
    answer = say(service, method + b" / HTTP/1.1\r\nContent-Length: 9999999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 405")
    assert b"Allow: GET, HEAD" in answer


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"nonsense", b"400"),
        (b"GET", b"400"),
        (b"GET / HTTP/9.9", b"505"),
        (b"GET / HTTP/1.1 more", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00", b"400"),
        (b"GET /" + b"a" * 20000, b"431"),
        (b"GET <script>alert(1)</script> HTTP/x", b"400"),
    ],
)
def test_nonsense_gets_a_plain_refusal_that_repeats_nothing(
    service: HttpService, request_line: bytes, status: bytes
) -> None:
    answer = say(service, request_line + b"\r\n\r\n")
    assert answer[9:12] in (status, b""), answer
    assert b"script" not in answer.partition(b"\r\n\r\n")[2]


def test_headers_without_end_are_cut_off(service: HttpService) -> None:
    answer = say(service, b"GET / HTTP/1.1\r\n" + b"X-Long: y\r\n" * (MAX_HEAD_BYTES // 8))
    assert answer[9:12] in (b"431", b""), answer
    assert say(service, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n")[9:12] == b"431", "too many of them"


def test_who_sends_a_byte_now_and_then_has_one_deadline_for_all(service: HttpService) -> None:
    began = time.monotonic()
    with connect(service) as line:
        try:
            while time.monotonic() - began < 20:
                line.sendall(b"G")
                time.sleep(0.02)
        except ConnectionError:
            pass
    assert time.monotonic() - began < 10


def test_those_who_take_every_place_and_keep_silent_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_TIMEOUT", 600.0)
    with HttpService(HERE, 0, respond, name="trial") as service:
        idle = [connect(service) for _ in range(MAX_CONNECTIONS + 10)]
        try:
            for _ in range(5):
                assert say(service, b"GET /x HTTP/1.1\r\n\r\n").endswith(b"path /x")
            assert read(idle[0]) == b"", "the first that came is the first to go"
        finally:
            for line in idle:
                line.close()


def test_who_is_being_answered_is_not_hung_up_on_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_TIMEOUT", 600.0)
    go_on, began = threading.Event(), threading.Semaphore(0)

    def slow(path: str, headers: Mapping[str, str]) -> HttpResponse:
        began.release()
        go_on.wait(60)
        return respond(path, headers)

    with HttpService(HERE, 0, slow, name="trial") as service:
        busy = [connect(service) for _ in range(MAX_CONNECTIONS)]
        try:
            for line in busy:
                line.sendall(b"GET /x HTTP/1.1\r\n\r\n")
            assert all(began.acquire(timeout=60) for _ in busy)
            assert say(service, b"GET /x HTTP/1.1\r\n\r\n") == b"", "there is no room for it"
            go_on.set()
            assert all(read(line).endswith(b"path /x") for line in busy)
        finally:
            go_on.set()
            for line in busy:
                line.close()


def test_an_answer_may_say_where_it_is_instead() -> None:
    moved = HttpResponse(b"", status=HTTPStatus.TEMPORARY_REDIRECT, location="there/")
    with HttpService(HERE, 0, lambda *_: moved, name="trial") as service:
        answer = say(service, b"GET /x HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 307")
    assert b"\r\nLocation: there/\r\n" in answer


def test_a_fault_of_ours_is_an_answer_and_the_next_one_is_served(
    service: HttpService, caplog: pytest.LogCaptureFixture
) -> None:
    assert say(service, b"GET /fault HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.0 500")
    assert "a bug of ours" in caplog.text
    assert b"a bug" not in say(service, b"GET /fault HTTP/1.1\r\n\r\n")
    assert say(service, b"GET /x HTTP/1.1\r\n\r\n").endswith(b"path /x")


def test_closing_ends_conversations_and_threads(service: HttpService) -> None:
    with connect(service) as line:
        line.sendall(b"GET /")
        deadline = time.monotonic() + 20
        while not any(each.name == "nexar-trial-connection" for each in threading.enumerate()):
            assert time.monotonic() < deadline
        service.close()
        service.close()
        assert read(line) == b""
    assert not any(each.name.startswith("nexar-trial") for each in threading.enumerate())


def test_a_place_that_is_taken_is_named(service: HttpService) -> None:
    expected = rf"^the other cannot listen at 127.0.0.1:{service.port}: Address already in use; take another$"
    with pytest.raises(UsageError, match=expected):
        HttpService(HERE, service.port, respond, name="other")


def test_the_port_of_metrics_that_is_taken_is_named_with_its_setting(service: HttpService) -> None:
    with pytest.raises(UsageError, match=rf"{service.port}: Address already in use; set NEXAR_METRICS_PORT to another"):
        open_metrics(Config(), service.port, 0)
    with pytest.raises(UsageError, match=rf"{service.port}: Address already in use; set NEXAR_METRICS_PORT to another"):
        check_metrics(Config(metrics_port=service.port), 1)


def test_a_page_whose_port_is_taken_says_how_to_give_another(service: HttpService) -> None:
    with pytest.raises(UsageError, match=rf"{service.port}: Address already in use; give --page another port, or 0"):
        StatusWebPage(lambda: pytest.fail("nobody looks"), bytes(32), HERE, service.port)


def test_where_no_thread_is_to_be_had_one_reader_is_hung_up_on_and_the_next_answered(
    service: HttpService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert say(service, b"GET /x HTTP/1.1\r\n\r\n") == b""
    assert "could not answer a connection: can't start new thread" in caplog.text
    assert say(service, b"GET /x HTTP/1.1\r\n\r\n").endswith(b"path /x")


def test_a_forked_child_does_not_hold_the_port(service: HttpService) -> None:
    child = os.fork()
    if not child:
        taken = 1
        try:
            socket.socket(fileno=os.dup(service._listener.fileno()))
        except OSError:
            taken = 0
        os._exit(taken)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert say(service, b"GET /x HTTP/1.1\r\n\r\n").endswith(b"path /x")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9000", "localhost.evil.example", "127.0.0.1.evil.example", ""]
)
def test_who_was_sent_here_by_a_foreign_name_is_notified_nothing(service: HttpService, host: str) -> None:
    answer = say(service, f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.0 421")
    assert b"path /metrics" not in answer


def test_addresses_and_names_of_this_host_are_answered(service: HttpService) -> None:
    names = ["127.0.0.1", f"127.0.0.1:{service.port}", "[::1]", "[::1]:80", "10.1.2.3:5", "localhost", "LOCALHOST.:7"]
    for host in (*names, socket.gethostname()):
        answer = say(service, f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.0 200"), host
    assert say(service, b"GET /metrics HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 200")
