import socket
from collections.abc import Iterator

import pytest

from nexar.security.authority import Authority
from nexar.security.certificates import Trust
from nexar.security.tls import client_context, server_context
from nexar.transport.tls.handshake import (
    ConnectionHello,
    Half,
    HandshakeFailed,
    HandshakeSteps,
    HelloAnswer,
    answer,
    dial,
)
from nexar.transport.tls.sockets import PIECE_BYTES, Channel, PlainChannel, TlsChannel

AUTHORITY = Authority.create("c")
TRUST = Trust(AUTHORITY.certificate_pem)
TOKEN = b"t" * 16

Ends = tuple[Channel, Channel]


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    with pair[0], pair[1]:
        for end in pair:
            end.setblocking(False)
        yield pair


def run(*stories: HandshakeSteps[object]) -> list[object]:
    """Run stories side by side to their ends: what each returned or raised."""
    results: dict[int, object] = {}
    while len(results) < len(stories):
        for number, handshake in enumerate(stories):
            if number not in results:
                try:
                    next(handshake)
                except StopIteration as end:
                    results[number] = end.value
                except HandshakeFailed as failure:
                    results[number] = failure
    return [results[number] for number in range(len(stories))]


def stories(
    sockets: tuple[socket.socket, socket.socket], *, plain: bool
) -> tuple[HandshakeSteps[object], HandshakeSteps[object]]:
    client = TlsChannel(
        sockets[0],
        client_context(AUTHORITY.admit(2), TRUST),
        server_side=False,
        server_name="0000000000000001.c.nexar",
    )
    server = TlsChannel(sockets[1], server_context(AUTHORITY.admit(1), TRUST), server_side=True)
    return dial(client, ConnectionHello(Half.DATA, TOKEN, plain), lambda _: None), answer(
        server, lambda hello, _: hello
    )


@pytest.fixture(params=["tls", "plain"])
def ends(request: pytest.FixtureRequest, sockets: tuple[socket.socket, socket.socket]) -> Ends:
    client, served = run(*stories(sockets, plain=request.param == "plain"))
    assert isinstance(served, tuple)
    return client, served[1]  # type: ignore[return-value]


def read_all(channel: Channel, size: int) -> bytes:
    view, got = memoryview(bytearray(size)), 0
    while got < size:
        got += channel.read_into(view[got:])
    return bytes(view)


def test_bytes_arrive_in_order_whatever_the_sizes(ends: Ends) -> None:
    sent, received = bytearray(), bytearray()
    data = memoryview(bytes(range(256)) * 4096)
    buffer = memoryview(bytearray(PIECE_BYTES))
    position = 0
    while position < len(data) or len(received) < len(sent):
        taken = (
            ends[0].write(data[position : position + 100_003], more=position % 2 == 1) if position < len(data) else 0
        )
        sent += data[position : position + taken]
        position += taken
        ends[0].flush()
        count = ends[1].read_into(buffer[: 1 + position % PIECE_BYTES])
        received += buffer[:count]
    assert received == data


def test_reading_an_idle_channel_gives_nothing(ends: Ends) -> None:
    view = memoryview(bytearray(10))
    assert ends[0].read_into(view) == 0
    assert not ends[0].buffered


def test_what_was_fetched_but_not_read_is_buffered(ends: Ends) -> None:
    ends[0].write(memoryview(b"x" * 100))
    ends[0].flush()
    assert read_all(ends[1], 10) == b"x" * 10
    assert ends[1].buffered == isinstance(ends[1], TlsChannel)
    assert read_all(ends[1], 90) == b"x" * 90
    assert not ends[1].buffered


def test_the_end_of_the_stream_shows_behind_the_last_byte(ends: Ends) -> None:
    ends[0].write(memoryview(b"last"))
    ends[0].flush()
    ends[0].socket.close()
    assert read_all(ends[1], 4) == b"last"
    with pytest.raises(EOFError):
        ends[1].read_into(memoryview(bytearray(1)))


def test_a_full_socket_takes_no_more_and_nothing_is_lost(ends: Ends) -> None:
    data, sent = memoryview(b"0123456789abcdef" * 4096), 0
    while taken := ends[0].write(data):
        sent += taken
    received = b""
    while len(received) < sent:
        received += read_all(ends[1], min(sent - len(received), 1000))
        ends[0].flush()
    assert received == (bytes(data) * (sent // len(data) + 1))[:sent]


@pytest.mark.parametrize("size", [1, 200, 70_000])
def test_plain_bytes_right_behind_the_shutdown_of_tls_are_not_swallowed(
    sockets: tuple[socket.socket, socket.socket], size: int
) -> None:
    """The dialer is done first and talks at once; the listener has not even looked at the end of TLS."""
    dialing, serving = stories(sockets, plain=True)
    early: object = None
    while early is None:
        try:
            next(dialing)
            next(serving)
        except StopIteration as end:
            early = end.value
    assert isinstance(early, PlainChannel)
    message = (bytes(range(1, 251)) * (size // 250 + 1))[:size]
    sent = early.write(memoryview(message))
    _, late = run(serving)[0]  # type: ignore[misc]
    assert isinstance(late, PlainChannel)
    assert read_all(late, sent) == message[:sent]


def test_a_refusal_reaches_the_dialer_with_its_reason(sockets: tuple[socket.socket, socket.socket]) -> None:
    dialing, _ = stories(sockets, plain=False)
    server = TlsChannel(sockets[1], server_context(AUTHORITY.admit(1), TRUST), server_side=True)
    serving = answer(
        server, lambda hello, _: ConnectionHello(hello.half, TOKEN, False, HelloAnswer.UNVERIFIED, "not you")
    )
    outcomes = run(dialing, serving)
    for outcome in outcomes:
        assert isinstance(outcome, HandshakeFailed)
        assert (outcome.reason, outcome.verification) == ("not you", True)


def test_an_answer_to_somebody_else_is_not_believed(sockets: tuple[socket.socket, socket.socket]) -> None:
    dialing, _ = stories(sockets, plain=False)
    server = TlsChannel(sockets[1], server_context(AUTHORITY.admit(1), TRUST), server_side=True)
    outcome = run(dialing, answer(server, lambda hello, _: ConnectionHello(hello.half, b"x" * 16, False)))[0]
    assert isinstance(outcome, HandshakeFailed)
    assert "another connection" in outcome.reason
