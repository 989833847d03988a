import socket
from ipaddress import ip_interface
from types import SimpleNamespace

import psutil
import pytest

from nexar.cluster.addresses import candidate_addresses
from nexar.cluster.interfaces import read_interfaces


def entry(family, address, netmask):
    return SimpleNamespace(family=family, address=address, netmask=netmask)


@pytest.fixture
def system(monkeypatch):
    """A system with these interfaces."""
    addresses = {
        "eth0": [
            entry(socket.AF_INET, "10.0.0.7", "255.255.255.0"),
            entry(socket.AF_INET6, "fd00::7", "ffff:ffff:ffff:ffff::"),
            entry(socket.AF_INET6, "fe80::7%eth0", "ffff:ffff:ffff:ffff::"),
            entry(17, "02:fc:00:00:00:01", None),
        ],
        "ppp0": [entry(socket.AF_INET, "10.8.0.2", None)],
        "gone": [entry(socket.AF_INET, "10.9.0.2", None)],
    }
    states = {"eth0": SimpleNamespace(mtu=9000, isup=True), "ppp0": SimpleNamespace(mtu=1400, isup=False)}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)


@pytest.mark.usefixtures("system")
def test_interfaces_are_read_with_their_networks():
    ethernet, dialup = read_interfaces()
    assert (ethernet.name, ethernet.mtu_bytes, ethernet.up) == ("eth0", 9000, True)
    assert ethernet.addresses == tuple(ip_interface(text) for text in ("10.0.0.7/24", "fd00::7/64", "fe80::7/64"))
    assert (dialup.name, dialup.up, dialup.addresses) == ("ppp0", False, (ip_interface("10.8.0.2/32"),))


def test_this_host_can_be_reached_on_loopback():
    told = candidate_addresses(read_interfaces(), "0.0.0.0:4000", schemes=["quic"])
    assert told["quic"][-1] == "127.0.0.1:4000"
