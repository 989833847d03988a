"""Two hosts, with a network of their own between them: two and two ranks form, whatever the network lets through."""

import pytest

from nexar_tools.network_namespaces import NetworkNamespaces
from nexar_tools.transports import why_unavailable
from tests.processes.nexar_command import INTRODUCE, Nexar, await_ticket, introductions

pytestmark = pytest.mark.netns

NEAR = {scheme for scheme in ("shm", "quic", "tls") if why_unavailable(scheme) is None}
NEAR = NEAR - {"tls"} if "quic" in NEAR else NEAR
needs_quic = pytest.mark.skipif(why_unavailable("quic") is not None, reason=str(why_unavailable("quic")))


def form(network, folder):
    """The commands of docs/howto/launch.md, "Several hosts, with a ticket"; and what the ranks say."""
    first, second = (place.prefix for place in network.places)
    with Nexar("seed", "--size", 4, "--ticket-file", "ticket", cwd=folder, prefix=first) as seed:
        await_ticket(folder / "ticket", seed)
        run = ("run", "-n", 2, "--ticket-file", "ticket", INTRODUCE, "--barrier")
        with Nexar(*run, cwd=folder, prefix=first) as here, Nexar(*run, cwd=folder, prefix=second) as there:
            found = introductions(here, there)
        assert seed.end() == 0, seed.stderr
    return found


def check(found, between):
    """Two hosts of two ranks; `between` is what connects ranks of different hosts."""
    assert sorted(found) == [0, 1, 2, 3]
    hosts = [found[rank]["host"] for rank in range(4)]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    for rank, facts in found.items():
        assert (facts["RANK"], facts["local_rank"], facts["local_size"]) == (str(rank), rank % 2, 2)
        assert facts["hosts"] == hosts
        for peer, schemes in facts["links"].items():
            assert set(schemes) == (NEAR if int(peer) == rank ^ 1 else {between}), (rank, peer)


@needs_quic
def test_they_form_by_quic(tmp_path):
    with NetworkNamespaces() as network:
        check(form(network, tmp_path), "quic")


@needs_quic
def test_they_form_where_only_udp_passes(tmp_path):
    with NetworkNamespaces() as network:
        for number in range(2):
            network.drop(number, protocol="tcp")
        check(form(network, tmp_path), "quic")


def test_they_form_where_only_tcp_passes(tmp_path):
    with NetworkNamespaces() as network:
        for number in range(2):
            network.drop(number, protocol="udp")
        check(form(network, tmp_path), "tls")


@needs_quic
def test_they_form_where_there_is_only_ipv6(tmp_path):
    with NetworkNamespaces(ipv4=False) as network:
        check(form(network, tmp_path), "quic")


@needs_quic
def test_they_form_where_a_second_interface_leads_nowhere(tmp_path):
    with NetworkNamespaces(dead_end=True) as network:
        check(form(network, tmp_path), "quic")


@pytest.mark.full
def test_they_form_where_a_second_interface_leads_nowhere_and_only_tcp_passes(tmp_path):
    with NetworkNamespaces(dead_end=True) as network:
        for number in range(2):
            network.drop(number, protocol="udp")
        check(form(network, tmp_path), "tls")
