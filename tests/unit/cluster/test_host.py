import os
import re
import socket
import subprocess
import sys
from ipaddress import ip_interface
from types import SimpleNamespace

import psutil
import pytest

from nexar.cluster import host as module
from nexar.cluster.addresses import candidate_addresses
from nexar.cluster.host import host_id, read_interfaces
from nexar.config import Config


def test_the_setting_rules():
    assert host_id(Config(host_id="rack-3")) == "rack-3"


def test_every_process_of_this_host_finds_the_same():
    code = "from nexar.cluster.host import host_id; from nexar.config import Config; print(host_id(Config()))"
    reported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert reported == host_id(Config())
    assert re.fullmatch(r"[0-9a-f]{12}", reported)


@pytest.mark.parametrize("fact", ["boot", "name", "network"])
def test_another_boot_name_or_network_is_another_host(monkeypatch, tmp_path, fact):
    before = host_id(Config())
    (tmp_path / "fact").write_text("another")
    if fact == "boot":
        monkeypatch.setattr(module, "_BOOT", tmp_path / "fact")
    elif fact == "name":
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
    else:
        monkeypatch.setattr(module, "_NETWORK", tmp_path / "fact")
    assert host_id(Config()) != before


def test_a_system_that_reports_less_is_known_by_its_name(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_BOOT", tmp_path / "nothing")
    monkeypatch.setattr(module, "_NETWORK", tmp_path / "nothing")
    assert host_id(Config()) == host_id(Config())
    assert os.path.basename(host_id(Config()))


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
    reported = candidate_addresses(read_interfaces(), "0.0.0.0:4000", schemes=["quic"])
    assert reported["quic"][-1] == "127.0.0.1:4000"
