from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address, ip_interface, ip_network

import pytest

from nexar.cluster.addresses import (
    MAX_ADDRESSES,
    Interface,
    add_seen_address,
    candidate_addresses,
    dial_order,
    own_ip_addresses,
    own_networks,
)
from nexar.errors import ConfigError

DUAL = "[::]:4000"


def interface(name: str, *addresses: str, up: bool = True) -> Interface:
    return Interface(name, tuple(ip_interface(address) for address in addresses), 1500, up)


LOOPBACK = interface("lo", "127.0.0.1/8", "::1/128")
DOCKER = interface("docker0", "172.17.0.1/16", "fe80::42/64")
ETHERNET = interface("eth0", "10.0.0.7/24", "fd00::7/64", "fe80::7/64")
SECOND = interface("eth1", "192.168.5.7/24")
ZEROCONF = interface("usb0", "169.254.3.4/16")
DOWN = interface("eth9", "10.9.9.9/24", up=False)
HOST = (LOOPBACK, DOCKER, ETHERNET, SECOND, ZEROCONF, DOWN)

LOCAL = ["127.0.0.1", "[::1]"]


def hosts(*interfaces: Interface, listening: str = DUAL, **settings: str | None) -> list[str]:
    reported = candidate_addresses(interfaces or HOST, listening, schemes=["quic", "tls"], **settings)
    assert reported["quic"] == reported["tls"]
    assert all(address.endswith(":4000") for address in reported["quic"])
    return [address.removesuffix(":4000") for address in reported["quic"]]


def test_ordinary_addresses_come_first_bridges_then_link_local_and_loopback_last():
    assert hosts() == ["10.0.0.7", "192.168.5.7", "[fd00::7]", "172.17.0.1", "169.254.3.4", *LOCAL]


def test_a_socket_of_ipv4_only_is_published_with_ipv4_only():
    assert hosts(LOOPBACK, ETHERNET, listening="0.0.0.0:4000") == ["10.0.0.7", "127.0.0.1"]


def test_a_socket_bound_to_one_address_is_published_with_that_alone():
    assert hosts(listening="10.0.0.7:4000") == ["10.0.0.7"]
    assert hosts(listening="127.0.0.1:4000") == ["127.0.0.1"]
    assert hosts(listening="[fd00::7]:4000") == ["[fd00::7]"]


@pytest.mark.parametrize(
    ("iface", "expected"),
    [
        ("eth0", ["10.0.0.7", "[fd00::7]"]),
        ("docker0", ["172.17.0.1"]),
        ("10.0.0.7", ["10.0.0.7"]),
        ("192.168.0.0/16", ["192.168.5.7"]),
        ("fd00::/8", ["[fd00::7]"]),
        ("lo", []),
        ("^eth0", ["192.168.5.7", "172.17.0.1", "169.254.3.4"]),
        ("^eth-of-another-host", ["10.0.0.7", "192.168.5.7", "[fd00::7]", "172.17.0.1", "169.254.3.4"]),
    ],
)
def test_an_interface_is_chosen_by_name_address_or_network_or_left_out(iface, expected):
    assert hosts(iface=iface) == [*expected, *LOCAL]


def test_loopback_can_be_left_out_too():
    assert hosts(LOOPBACK, SECOND, iface="^lo") == ["192.168.5.7"]


@pytest.mark.parametrize("iface", ["eth7", "10.1.0.0/16", "8.8.8.8"])
def test_an_interface_that_is_not_there_is_refused_with_those_that_are(iface):
    with pytest.raises(ConfigError) as refused:
        hosts(iface=iface)
    assert refused.value.variable == "NEXAR_IFACE"
    assert refused.value.value == iface
    for known in HOST:
        assert known.name in refused.value.allowed


def test_an_interface_that_is_down_is_refused_with_that_reason():
    with pytest.raises(ConfigError, match="eth9 is down or has no address"):
        hosts(iface="eth9")


TOLD = ("10.0.0.7:4000", "192.168.5.7:4000", "[fd00::7]:4000", "127.0.0.1:4000", "[::1]:4000")


@pytest.mark.parametrize("seen", ["192.168.5.7", "[fd00::7]", "10.0.0.7"])
def test_what_the_seed_saw_goes_first_if_it_is_among_those_published(seen):
    found = add_seen_address({"quic": TOLD, "tls": TOLD[1:]}, f"{seen}:55555")
    assert found["quic"] == (f"{seen}:4000", *(address for address in TOLD if address != f"{seen}:4000"))
    assert set(found["tls"]) == {*TOLD[1:], f"{seen}:4000"}


def test_what_the_seed_saw_goes_behind_those_published_and_before_loopback_if_it_is_a_routers():
    assert add_seen_address({"tls": TOLD}, "203.0.113.9:55555")["tls"] == (*TOLD[:3], "203.0.113.9:4000", *TOLD[3:])


@pytest.mark.parametrize("seen", ["127.0.0.1:5", "[::1]:5", "[fe80::7%eth0]:5", "unknown:5", "no address"])
def test_what_the_seed_saw_is_ignored_where_it_means_nothing(seen):
    assert add_seen_address({"tls": TOLD}, seen) == {"tls": TOLD}


def test_what_the_seed_saw_is_nothing_to_addresses_of_another_form():
    assert add_seen_address({"other": ("a place",), "none": ()}, "203.0.113.9:5") == {"other": ("a place",), "none": ()}


def test_what_is_to_be_advertised_is_advertised_and_nothing_else():
    assert hosts(advertise="node-7, 203.0.113.1,fd00::1") == [
        "node-7", "203.0.113.1", "[fd00::1]", *LOCAL
    ]  # fmt: skip


def test_an_advertised_address_may_have_a_port_of_its_own():
    reported = candidate_addresses(HOST, DUAL, schemes=["quic"], advertise="gate:81,[fd00::1]:82")["quic"]
    assert reported[:2] == ("gate:81", "[fd00::1]:82")


@pytest.mark.parametrize(
    "advertise",
    ["no host", "a:b:c", "host:port", "host:99999", ",", ":5", "10.0.0.1:0", "0.0.0.0", "::", "224.0.0.1", "999.1.1.1"],
)
def test_what_cannot_be_advertised_is_refused(advertise):
    with pytest.raises(ConfigError) as refused:
        hosts(advertise=advertise)
    assert refused.value.variable == "NEXAR_ADVERTISE"


def test_a_host_of_many_addresses_publishes_the_most_promising_and_loopback():
    many = interface("eth0", *(f"10.0.{number}.1/24" for number in range(200)))
    assert len(hosts(LOOPBACK, many)) == MAX_ADDRESSES
    assert hosts(LOOPBACK, many)[-2:] == LOCAL


def test_an_address_on_two_interfaces_is_published_once():
    assert hosts(ETHERNET, interface("bond0", "10.0.0.7/24")) == ["10.0.0.7", "[fd00::7]"]


def test_networks_that_say_something_are_those_of_ordinary_interfaces():
    assert own_networks(HOST) == [IPv4Network("10.0.0.0/24"), IPv6Network("fd00::/64"), IPv4Network("192.168.5.0/24")]


def test_every_address_is_our_own():
    numbers = own_ip_addresses(HOST)
    assert IPv4Address("172.17.0.1") in numbers
    assert len(numbers) == 10


ADVERTISED = {
    "tls": ("10.0.0.7:1", "192.168.5.7:1", "172.17.0.1:1", "127.0.0.1:1"),
    "quic": ("10.0.0.7:1", "192.168.5.7:1", "172.17.0.1:1", "127.0.0.1:1"),
    "shm": ("shm://000000000000000b:00@/tmp/x",),
}
SCHEMES = ("shm", "quic", "tls")


def test_a_peer_on_this_host_is_dialed_through_memory_or_on_loopback_first():
    order = dial_order(ADVERTISED, schemes=SCHEMES, same_host=True, own=[ip_address("10.0.0.7")])
    assert list(order) == ["shm", "quic", "tls"]
    assert order["quic"][0] == "127.0.0.1:1"
    assert "10.0.0.7:1" in order["quic"]


def test_a_peer_elsewhere_is_dialed_on_a_network_that_both_are_on_first():
    order = dial_order(ADVERTISED, schemes=SCHEMES, same_host=False, networks=[ip_network("192.168.5.0/24")])
    assert list(order) == ["quic", "tls"]
    assert order["tls"] == ("192.168.5.7:1", "10.0.0.7:1", "172.17.0.1:1")


def test_an_address_of_ours_is_not_dialed_to_reach_somebody_else():
    order = dial_order(ADVERTISED, schemes=SCHEMES, same_host=False, own=[ip_address("172.17.0.1")])
    assert order["quic"] == ("10.0.0.7:1", "192.168.5.7:1")


def test_a_peer_that_has_no_other_addresses_than_ours_shares_our_network_whatever_its_host_is_called():
    own = [ip_address(host) for host in ("10.0.0.7", "192.168.5.7", "172.17.0.1", "127.0.0.1")]
    order = dial_order(ADVERTISED, schemes=SCHEMES, same_host=False, own=own)
    assert list(order) == ["quic", "tls"]
    assert order["quic"][0] == "127.0.0.1:1"


def test_a_peer_that_has_only_addresses_of_ours_is_on_our_network_under_another_host_id():
    own = [ip_address(text) for text in ("10.0.0.7", "192.168.5.7", "172.17.0.1", "127.0.0.1")]
    order = dial_order(ADVERTISED, schemes=SCHEMES, same_host=False, own=own)
    assert list(order) == ["quic", "tls"]
    assert order["tls"][0] == "127.0.0.1:1"


def test_a_scheme_without_addresses_is_left_out():
    order = dial_order(
        {"quic": (), "tls": ("[fd00::1]:1",), "carrier-pigeon": ("roof",)}, schemes=SCHEMES, same_host=False
    )
    assert order == {"tls": ("[fd00::1]:1",)}
