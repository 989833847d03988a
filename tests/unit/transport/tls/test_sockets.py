"""How TCP sockets are configured."""

import socket

import pytest

from nexar.transport.tls.sockets import begin_dial, open_listener, restore_retry, tune, widen

TCP_RTO_MAX_MS = 44


def longest_pause(connection: socket.socket) -> int:
    """Milliseconds between two attempts to get a packet through."""
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
    except OSError:
        pytest.skip("this kernel cannot be told how long to wait (Linux 6.15 can)")


def test_lost_packets_are_repeated_every_second_until_the_connection_is_made() -> None:
    with open_listener("127.0.0.1:0") as listening, socket.socket() as dialing:
        usual = longest_pause(dialing)
        begin_dial(dialing, listening.getsockname())
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            assert [longest_pause(each) for each in (dialing, accepted)] == [1000, 1000]
            restore_retry(dialing)
        assert longest_pause(dialing) == usual


def test_connections_are_made_where_the_kernel_knows_no_such_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nexar.transport.tls.sockets._RETRY", (9999, 1000))
    with open_listener("127.0.0.1:0") as listening, socket.socket() as dialing:
        begin_dial(dialing, listening.getsockname())
        listening.setblocking(True)
        listening.accept()[0].close()


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="this system has no limit for unsent bytes")
def test_a_connection_for_payloads_alone_holds_more_of_them_unsent() -> None:
    def limit(connection: socket.socket) -> int:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)

    with socket.socket() as connection:
        tune(connection)
        usual = limit(connection)
        widen(connection)
        assert limit(connection) > usual
