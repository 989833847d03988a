import pytest

from nexar.errors import UsageError
from nexar.transport.quic.addresses import format_address, parse_address, to_numeric


@pytest.mark.parametrize("text", ["10.0.0.7:4000", "[fe80::1]:0", "host.example:65535"])
def test_text_and_address_are_the_same_thing(text):
    assert format_address(parse_address(text)) == text


@pytest.mark.parametrize("text", ["", "host", "host:", "host:port", "host:70000", "fe80::1:80"])
def test_what_is_no_address_is_refused_with_the_remedy(text):
    with pytest.raises(UsageError, match="write"):
        parse_address(text)


def test_an_ipv4_peer_of_a_dual_stack_socket_is_shown_as_ipv4():
    assert format_address(("::ffff:10.0.0.7", 5)) == "10.0.0.7:5"


def test_an_empty_host_is_every_interface():
    assert to_numeric(":7") in [("::", 7), ("0.0.0.0", 7)]


def test_a_name_that_is_nowhere_is_an_oserror():
    with pytest.raises(OSError, match=r"."):
        to_numeric("no such host:1")
