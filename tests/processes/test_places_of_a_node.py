"""What a node finds out about where it is, on hosts made of network namespaces."""

import json
import subprocess
import sys

import pytest

from nexar.cluster.host import host_id
from nexar.config import Config
from nexar_tools.network_namespaces import NetworkNamespaces

pytestmark = pytest.mark.netns

CODE = """
import json
from nexar.cluster.addresses import candidate_addresses
from nexar.cluster.host import host_id
from nexar.cluster.host import read_interfaces
from nexar.config import Config
told = candidate_addresses(read_interfaces(), "[::]:4000", schemes=["quic"])["quic"]
print(json.dumps([host_id(Config()), told]))
"""


def look(network: NetworkNamespaces, number: int) -> tuple[str, list[str]]:
    command = [*network.place(number).prefix, sys.executable, "-c", CODE]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    host, reported = json.loads(said)
    return host, reported


def test_each_namespace_is_a_host_of_its_own_and_publishes_its_own_addresses():
    with NetworkNamespaces() as network:
        (first, reported), (second, also_published) = look(network, 0), look(network, 1)
        hosts = [network.place(0).host, network.place(0, ipv6=True).host]
        assert look(network, 0)[0] == first
    assert len({first, second, host_id(Config())}) == 3
    assert reported[:2] == [f"{hosts[0]}:4000", f"[{hosts[1]}]:4000"]
    assert not set(reported[:2]) & set(also_published)
    assert reported[-2:] == ["127.0.0.1:4000", "[::1]:4000"]
