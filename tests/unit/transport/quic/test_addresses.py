import socket

import pytest

from nexar.errors import UsageError
from nexar.transport.quic.addresses import resolve, to_numeric


def test_numeric_addresses_stay_as_they_are() -> None:
    assert to_numeric("127.0.0.1:5") == ("127.0.0.1", 5)
    assert to_numeric("[::1]:5") == ("::1", 5)


def test_an_empty_host_is_every_interface() -> None:
    assert to_numeric(":7") in {("::", 7), ("0.0.0.0", 7)}


def test_a_name_is_resolved_in_the_family_of_the_socket() -> None:
    assert resolve("localhost:5", beside="0.0.0.0") == [("127.0.0.1", 5)]


def test_a_name_gives_every_address_it_stands_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET6, 0, 0, "", ("::1", 5, 0, 0)), (socket.AF_INET, 0, 0, "", ("127.0.0.1", 5))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found * 2)
    assert resolve("somewhere:5", beside="::") == [("::1", 5), ("127.0.0.1", 5)]


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(UsageError, match="not an address"):
        to_numeric("nowhere")
