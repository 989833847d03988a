"""Names and addresses of namespaces; making them is tested in tests/processes."""

import ipaddress

from nexar.testing.network_namespaces import NetworkNamespaces


def test_no_two_have_the_same_name():
    first, second = NetworkNamespaces(3), NetworkNamespaces(2)
    assert len({*first.names, *second.names}) == 5


def test_every_namespace_has_private_addresses_of_its_own():
    network = NetworkNamespaces(4)
    hosts = [network.place(number, ipv6=ipv6).host for number in range(4) for ipv6 in (False, True)]
    assert len(set(hosts)) == 8
    assert all(ipaddress.ip_address(host).is_private for host in hosts)


def test_a_place_enters_its_own_namespace():
    network = NetworkNamespaces(2)
    assert [place.prefix for place in network.places] == [("ip", "netns", "exec", name) for name in network.names]


def test_without_ipv4_places_are_reached_by_ipv6():
    assert [ipaddress.ip_address(place.host).version for place in NetworkNamespaces(2, ipv4=False).places] == [6, 6]
