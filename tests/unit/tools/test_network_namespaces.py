"""Names and addresses of namespaces; making them is tested in tests/processes."""

import ipaddress
from pathlib import Path

from nexar_tools.network_namespaces import NetworkNamespaces


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
    assert [place.prefix[1:] for place in network.places] == [("netns", "exec", name) for name in network.names]
    assert {Path(place.prefix[0]).name for place in network.places} == {"ip"}


def test_its_tools_are_found_where_a_users_search_path_does_not_lead(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    looked = []

    def which(tool, path=None):
        looked.append(path)
        return f"/usr/sbin/{tool}" if path and "/usr/sbin" in path.split(":") and "/sbin" in path.split(":") else None

    monkeypatch.setattr("shutil.which", which)
    assert NetworkNamespaces(1).places[0].prefix[0] == "/usr/sbin/ip"
    assert looked[0] is None


def test_without_ipv4_places_are_reached_by_ipv6():
    assert [ipaddress.ip_address(place.host).version for place in NetworkNamespaces(2, ipv4=False).places] == [6, 6]
