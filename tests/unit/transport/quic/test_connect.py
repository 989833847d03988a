import socket
import threading
import time

import pytest

from nexar.errors import UsageError
from nexar.native import quic
from nexar.transport.base import ConnectRefused, Expected
from nexar.transport.parallel_dial import TargetFailed
from nexar.transport.quic.connect import QuicDialMethod, _HandshakeTimedOut, resolve, to_numeric
from nexar.transport.quic.transport import QuicSettings, QuicTransport
from tests.unit.transport.quic.scene import EVENT_TIMEOUT


def test_numeric_addresses_stay_as_they_are() -> None:
    assert to_numeric("127.0.0.1:5") == ("127.0.0.1", 5)
    assert to_numeric("[::1]:5") == ("::1", 5)


def test_an_empty_host_is_every_interface() -> None:
    assert to_numeric(":7") in {("::", 7), ("0.0.0.0", 7)}


def test_a_name_is_resolved_in_the_family_of_the_socket() -> None:
    assert resolve("localhost:5", local_host="0.0.0.0") == [("127.0.0.1", 5)]


def test_a_name_gives_every_address_it_stands_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET6, 0, 0, "", ("::1", 5, 0, 0)), (socket.AF_INET, 0, 0, "", ("127.0.0.1", 5))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found * 2)
    assert resolve("somewhere:5", local_host="::") == [("::1", 5), ("127.0.0.1", 5)]


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(UsageError, match="not an address"):
        to_numeric("nowhere")


def test_a_place_may_be_silent_for_longer_than_an_inbound_handshake(scene):
    impatient = scene.node(1, settings=QuicSettings(handshake_timeout=0.1))
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer in time"):
        impatient.transport.connect("127.0.0.1:9", Expected(2), began + 0.5)
    assert time.monotonic() - began >= 0.5


def test_a_node_that_appears_while_it_is_dialed_is_found(scene):
    dialer = scene.node(1, settings=QuicSettings(handshake_timeout=0.1))
    with socket.socket(type=socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        outcome = []
        dial = threading.Thread(
            target=lambda: outcome.append(
                dialer.transport.connect(address, Expected(5), time.monotonic() + EVENT_TIMEOUT)
            )
        )
        dial.start()
        silent.settimeout(EVENT_TIMEOUT)
        silent.recv(2048)
    late = QuicTransport(scene.authority.admit(5), scene.trust, bind=address)
    try:
        late.listen(address, dialer.acceptor)
        deadline = time.monotonic() + EVENT_TIMEOUT
        while dial.is_alive() and time.monotonic() < deadline:
            late.poll()
            late.sleep(0.01, 0.0)
        dial.join(EVENT_TIMEOUT)
        assert outcome[0].peer.node == 5
    finally:
        late.close()


def test_an_attempt_that_was_done_when_it_is_called_off_is_hung_up(scene):
    one, two = scene.node(1), scene.node(2)
    method = QuicDialMethod(one.transport._endpoint, one.transport._identity, Expected(2))
    method.begin(two.native_address)
    (dial,) = method._dials
    scene.drive(lambda: dial.done and two.acceptor.carriers)
    method.cancel_all()
    scene.drive(lambda: two.acceptor.sinks[0].lost)
    assert "another address answered first" in two.acceptor.sinks[0].lost[0].reason


def test_a_place_of_a_family_that_the_socket_does_not_speak_fails_alone(scene):
    one, two = scene.node(1), scene.node(2)
    carrier = one.transport.connect(f"[::1]:9,{two.address}", Expected(2), time.monotonic() + EVENT_TIMEOUT)
    assert carrier.peer.node == 2
    with pytest.raises(ConnectRefused):
        one.transport.connect("[::1]:9", Expected(2), time.monotonic() + EVENT_TIMEOUT)


class FailedDial:
    def __init__(self, kind: str, reason: str) -> None:
        self.error = quic.ConnectError(reason)
        self.error.kind, self.error.reason = kind, reason

    def result(self) -> None:
        raise self.error


def test_the_kind_of_a_failed_dial_decides_whether_it_is_tried_again_and_not_its_reason(scene) -> None:
    one = scene.node(1)
    method = QuicDialMethod(one.transport._endpoint, one.transport._identity, Expected(2))
    with pytest.raises(_HandshakeTimedOut):
        method._result_of(FailedDial("timed_out", "whatever it says"))
    with pytest.raises(TargetFailed, match="timed out"):
        method._result_of(FailedDial("failed", "timed out"))
