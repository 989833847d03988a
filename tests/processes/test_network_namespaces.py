"""Hosts made of network namespaces: they reach one another, have the MTU asked for, and lose what they should."""

import subprocess
import sys

import pytest

from nexar_tools.network_namespaces import NetworkNamespaces, permitted
from nexar_tools.peer_process import PeerFailed, PeerPair
from nexar_tools.peer_protocol import RAW, ConnectionTerms

pytestmark = [pytest.mark.netns, pytest.mark.full]


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines() if line}


def addresses(node, carrier):
    return [carrier.peer.address, dict(node.addresses_for(carrier.peer.node))]


def test_they_are_permitted_where_this_test_is_not_skipped():
    assert permitted() is None


@pytest.mark.parametrize("ipv6", [False, True])
def test_processes_in_two_namespaces_meet(raw_terms, ipv6):
    with NetworkNamespaces() as network:
        places = (network.place(0, ipv6=ipv6), network.place(1, ipv6=ipv6))
        with PeerPair(addresses, addresses, terms=raw_terms, places=places) as pair:
            left, right = pair.results()
    assert places[1].host in left[0]
    assert places[0].host in right[0]


def test_three_namespaces_reach_one_another(raw_terms):
    with NetworkNamespaces(3) as network:
        places = network.places
        for first, second in ((0, 1), (1, 2), (2, 0)):
            with PeerPair(addresses, addresses, terms=raw_terms, places=(places[first], places[second])) as pair:
                pair.results()


@pytest.mark.parametrize("mtu", [1500, 9000])
def test_the_wire_has_the_mtu_that_was_asked_for(mtu):
    with NetworkNamespaces(mtu=mtu, offload=False) as network:
        shown = _inside(network, 0, "cat", "/sys/class/net/wire/mtu")
    assert shown.stdout.strip() == str(mtu)


def test_nothing_connects_while_the_protocol_is_dropped(raw_terms):
    impatient = ConnectionTerms(schemes=["tls"], node_class=RAW, timeout=3)
    with NetworkNamespaces() as network:
        network.drop(1, protocol="tcp")
        with pytest.raises(PeerFailed), PeerPair(addresses, addresses, terms=impatient, places=network.places) as pair:
            pair.results(timeout=10)
        network.clear(1)
        with PeerPair(addresses, addresses, terms=raw_terms, places=network.places) as pair:
            pair.results()


def test_the_protocol_that_is_not_named_still_passes(raw_terms):
    with NetworkNamespaces() as network:
        network.drop(1, protocol="udp")
        network.lose_bursts(0, burst=1, every=50)
        network.lose(1, percent=1)
        with PeerPair(addresses, addresses, terms=raw_terms, places=network.places) as pair:
            pair.results()


def test_a_node_that_receives_nothing_from_one_receives_from_the_others(raw_terms):
    impatient = ConnectionTerms(schemes=["tls"], node_class=RAW, timeout=3)
    with NetworkNamespaces(3) as network:
        network.deafen(0, 1)
        first, second, third = network.places
        with PeerPair(addresses, addresses, terms=raw_terms, places=(first, third)) as pair:
            pair.results()
        with pytest.raises(PeerFailed), PeerPair(addresses, addresses, terms=impatient, places=(first, second)) as pair:
            pair.results(timeout=10)


def test_a_dead_end_is_listed_before_the_wire_and_leads_nowhere():
    with NetworkNamespaces(dead_end=True) as network:
        listed = _inside(network, 0, "ip", "-4", "-brief", "address").stdout
        assert listed.index("10.66.0.1/16") < listed.index("10.77.0.1/16")
        unanswered = "import socket; socket.create_connection(('10.66.0.2', 1), timeout=0.3)"
        with pytest.raises(subprocess.CalledProcessError) as failed:
            _inside(network, 0, sys.executable, "-c", unanswered)
    assert "TimeoutError" in failed.value.stderr


def test_there_is_no_ipv4_where_none_is_wanted():
    with NetworkNamespaces(ipv4=False) as network:
        assert "10.77" not in _inside(network, 1, "ip", "-brief", "address").stdout


def test_they_are_gone_after_a_failure():
    before = namespaces()

    def fail_inside() -> None:
        with NetworkNamespaces():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert namespaces() == before


def test_they_are_gone_when_building_fails():
    before = namespaces()
    with pytest.raises(OSError, match="mtu"), NetworkNamespaces(mtu=7):
        raise AssertionError("an MTU of 7 was accepted")
    assert namespaces() == before


def _inside(network: NetworkNamespaces, number: int, *command: str) -> subprocess.CompletedProcess[str]:
    prefix = network.place(number).prefix
    return subprocess.run([*prefix, *command], capture_output=True, text=True, check=True)
