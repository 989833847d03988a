"""Which transports there are here."""

import sys

import pytest

from nexar.security.authority import Authority
from nexar.security.certificates import Trust
from nexar.transport.sleeper import PollSleeper
from nexar_tools.bare_nodes import RawNode
from nexar_tools.transports import listen_address, make_transports, why_unavailable


def test_what_needs_nothing_is_always_there():
    assert [why_unavailable(scheme) for scheme in ("tls", "tcp", "memory")] == [None, None, None]


def test_without_the_native_package_the_reason_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nexar_native", None)
    assert "nexar-native" in str(why_unavailable("quic"))


def test_on_another_machine_shared_memory_says_what_it_needs(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert "riscv64" in str(why_unavailable("shm"))


AUTHORITY = Authority.create("tests")
TRUST = Trust(AUTHORITY.certificate_pem)


def needed(*schemes):
    for scheme in schemes:
        if (reason := why_unavailable(scheme)) is not None:
            pytest.skip(reason)


@pytest.mark.parametrize("scheme", ["quic", "tls", "tcp"])
def test_a_transport_of_the_network_listens_on_a_free_port_of_either_family(scheme):
    assert listen_address(scheme, "127.0.0.1") == "127.0.0.1:0"
    assert listen_address(scheme, "::1") == "[::1]:0"


@pytest.mark.parametrize("scheme", ["shm", "memory"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_transport_without_ports_chooses_its_address_whatever_the_host(scheme, host):
    assert listen_address(scheme, host) == ""


@pytest.mark.parametrize("schemes", [["tcp", "tls", "memory"], ["shm"], ["tls", "quic"], []])
def test_every_scheme_gets_its_transport_and_all_share_one_sleeper(schemes):
    needed(*schemes)
    transports, sleeper = make_transports(schemes, AUTHORITY.admit(7), TRUST)
    assert {scheme: transport.scheme for scheme, transport in transports.items()} == {name: name for name in schemes}
    assert isinstance(sleeper, PollSleeper) != ("quic" in schemes)
    assert (sleeper is transports.get("quic")) == ("quic" in schemes)
    for transport in transports.values():
        transport.close()
    if isinstance(sleeper, PollSleeper):
        sleeper.close()


@pytest.mark.parametrize("scheme", ["shm", "tls"])
def test_a_raw_node_lives_on_a_host_of_ipv6(scheme):
    needed(scheme)
    with RawNode(AUTHORITY.admit(7), TRUST, [scheme], host="::1") as node:
        assert list(node.addresses_for(8)) == [scheme]
