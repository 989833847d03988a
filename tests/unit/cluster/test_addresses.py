from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_interface

import pytest

from nexar.cluster.addresses import MAX_ADDRESSES, Interface, add_seen, candidate_addresses, own_networks, own_numbers
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
    told = candidate_addresses(interfaces or HOST, listening, schemes=["quic", "tls"], **settings)
    assert told["quic"] == told["tls"]
    assert all(address.endswith(":4000") for address in told["quic"])
    return [address.removesuffix(":4000") for address in told["quic"]]


def test_ordinary_addresses_come_first_bridges_then_link_local_and_loopback_last():
    assert hosts() == ["10.0.0.7", "192.168.5.7", "[fd00::7]", "172.17.0.1", "169.254.3.4", *LOCAL]


def test_a_socket_of_ipv4_only_is_told_by_ipv4_only():
    assert hosts(LOOPBACK, ETHERNET, listening="0.0.0.0:4000") == ["10.0.0.7", "127.0.0.1"]


def test_a_socket_bound_to_one_address_is_told_by_that_alone():
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
def test_what_the_seed_saw_goes_first_if_it_is_among_those_told(seen):
    found = add_seen({"quic": TOLD, "tls": TOLD[1:]}, f"{seen}:55555")
    assert found["quic"] == (f"{seen}:4000", *(address for address in TOLD if address != f"{seen}:4000"))
    assert set(found["tls"]) == {*TOLD[1:], f"{seen}:4000"}


def test_what_the_seed_saw_goes_behind_those_told_and_before_loopback_if_it_is_a_routers():
    assert add_seen({"tls": TOLD}, "203.0.113.9:55555")["tls"] == (*TOLD[:3], "203.0.113.9:4000", *TOLD[3:])


@pytest.mark.parametrize("seen", ["127.0.0.1:5", "[::1]:5", "[fe80::7%eth0]:5", "unknown:5", "no address"])
def test_what_the_seed_saw_is_ignored_where_it_tells_nothing(seen):
    assert add_seen({"tls": TOLD}, seen) == {"tls": TOLD}


def test_what_the_seed_saw_is_nothing_to_addresses_of_another_form():
    assert add_seen({"other": ("a place",), "none": ()}, "203.0.113.9:5") == {"other": ("a place",), "none": ()}


def test_what_is_to_be_advertised_is_advertised_and_nothing_else():
    assert hosts(advertise="node-7, 203.0.113.1,fd00::1") == [
        "node-7", "203.0.113.1", "[fd00::1]", *LOCAL
    ]  # fmt: skip


def test_an_advertised_address_may_have_a_port_of_its_own():
    told = candidate_addresses(HOST, DUAL, schemes=["quic"], advertise="gate:81,[fd00::1]:82")["quic"]
    assert told[:2] == ("gate:81", "[fd00::1]:82")


@pytest.mark.parametrize(
    "advertise",
    ["no host", "a:b:c", "host:port", "host:99999", ",", ":5", "10.0.0.1:0", "0.0.0.0", "::", "224.0.0.1", "999.1.1.1"],
)
def test_what_cannot_be_advertised_is_refused(advertise):
    with pytest.raises(ConfigError) as refused:
        hosts(advertise=advertise)
    assert refused.value.variable == "NEXAR_ADVERTISE"


def test_a_host_of_many_addresses_tells_the_most_promising_and_loopback():
    many = interface("eth0", *(f"10.0.{number}.1/24" for number in range(200)))
    assert len(hosts(LOOPBACK, many)) == MAX_ADDRESSES
    assert hosts(LOOPBACK, many)[-2:] == LOCAL


def test_an_address_on_two_interfaces_is_told_once():
    assert hosts(ETHERNET, interface("bond0", "10.0.0.7/24")) == ["10.0.0.7", "[fd00::7]"]


def test_networks_that_say_something_are_those_of_ordinary_interfaces():
    assert own_networks(HOST) == [IPv4Network("10.0.0.0/24"), IPv6Network("fd00::/64"), IPv4Network("192.168.5.0/24")]


def test_every_address_is_our_own():
    numbers = own_numbers(HOST)
    assert IPv4Address("172.17.0.1") in numbers
    assert len(numbers) == 10
