"""Addresses: parse and format are inverse, and candidates come in the order worth trying."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.errors import UsageError
from nexar.transport.address import (
    AddressCandidate,
    format_address,
    host_of,
    is_loopback,
    order_candidates,
    parse_address,
    parse_addresses,
)

ports = st.integers(0, 65535)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost:4000", "localhost", 4000),
        ("10.0.0.7:0", "10.0.0.7", 0),
        ("worker-3.cluster_a.local:65535", "worker-3.cluster_a.local", 65535),
        (":4000", "", 4000),
        ("[::1]:4000", "::1", 4000),
        ("[::]:0", "::", 0),
        ("[fe80::1%eth0]:4000", "fe80::1%eth0", 4000),
        ("[2001:DB8:0:0::1]:1", "2001:db8::1", 1),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)


_REFUSED = """
    host | host: | host:65536 | host:-1 | host:４ | host:04000 | ::1:4000 | [::1] | [::1:4000 | [10.0.0.1]:1 | [zz]:1
    | [fe80::1%]:1 | [fe80::1%a b]:1 | ho st:1 | host/path:1 | x@host:1
"""


@pytest.mark.parametrize("text", ["", "host:1 ", "a" * 300 + ":1", *(text.strip() for text in _REFUSED.split("|"))])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_address(text)


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)), ports)
def test_parsing_undoes_formatting(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> None:
    host, parsed = parse_address(format_address(str(address), port))
    assert parsed == port
    mapped = getattr(address, "ipv4_mapped", None)
    assert ipaddress.ip_address(host) == (mapped or address)


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        host, port = parse_address(text)
    except UsageError:
        return
    assert parse_address(format_address(host, port)) == (host, port)


def test_a_mapped_ipv4_address_is_shown_as_what_it_is() -> None:
    assert format_address("::ffff:10.0.0.7", 80) == "10.0.0.7:80"


def test_several_addresses_are_separated_by_commas() -> None:
    assert parse_addresses("a:1, [::1]:2") == [("a", 1), ("::1", 2)]


def _ordered(*addresses: str, same_host: bool = False, networks: tuple[str, ...] = ()) -> list[str]:
    candidates = [AddressCandidate("tls", address) for address in addresses]
    known = [ipaddress.ip_network(network) for network in networks]
    ordered = order_candidates(candidates, schemes=["tls"], networks=known, same_host=same_host)
    return [candidate.address for candidate in ordered]


def test_a_shared_network_comes_before_others_and_link_local_last() -> None:
    found = _ordered("[fe80::1%eth0]:1", "name:1", "8.8.8.8:1", "10.0.0.7:1", networks=("10.0.0.0/24",))
    assert found == ["10.0.0.7:1", "8.8.8.8:1", "name:1", "[fe80::1%eth0]:1"]


def test_loopback_is_for_peers_on_this_host_only() -> None:
    assert _ordered("10.0.0.7:1", "127.0.0.1:1", "[::1]:1", "localhost:1", same_host=True)[0] == "127.0.0.1:1"
    assert _ordered("10.0.0.7:1", "127.0.0.1:1", "[::1]:1", "localhost:1") == ["10.0.0.7:1"]


def test_addresses_that_name_nobody_are_left_out() -> None:
    assert _ordered("0.0.0.0:1", "[::]:1", "224.0.0.1:1", "10.0.0.7:1") == ["10.0.0.7:1"]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:0", "[::1]:1", "localhost:1"])
def test_loopback_is_known_by_number_and_by_name(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["10.0.0.1:1", "[fe80::1]:1", "host:1", "", "segment-7"])
def test_what_may_lead_elsewhere_is_no_loopback(address: str) -> None:
    assert not is_loopback(address)


def test_only_host_and_port_have_a_host() -> None:
    assert (host_of("[::1]:7"), host_of(":7"), host_of("segment-7")) == ("::1", "", None)


def test_equals_keep_their_order_and_come_once() -> None:
    assert _ordered("8.8.8.8:1", "9.9.9.9:1", "8.8.8.8:1") == ["8.8.8.8:1", "9.9.9.9:1"]


def test_the_order_of_schemes_counts_first_and_unknown_ones_are_left_out() -> None:
    candidates = [
        AddressCandidate("tls", "10.0.0.7:1"),
        AddressCandidate("teleport", "x"),
        AddressCandidate("quic", "name:1"),
    ]
    found = order_candidates(candidates, schemes=["shm", "quic", "tls"])
    assert [candidate.scheme for candidate in found] == ["quic", "tls"]
