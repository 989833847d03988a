from ipaddress import ip_address, ip_network

from nexar.cluster.dial_order import dial_order

TOLD = {
    "tls": ("10.0.0.7:1", "192.168.5.7:1", "172.17.0.1:1", "127.0.0.1:1"),
    "quic": ("10.0.0.7:1", "192.168.5.7:1", "172.17.0.1:1", "127.0.0.1:1"),
    "shm": ("shm://000000000000000b:00@/tmp/x",),
}
SCHEMES = ("shm", "quic", "tls")


def test_a_peer_on_this_host_is_dialed_through_memory_or_on_loopback_first():
    order = dial_order(TOLD, schemes=SCHEMES, same_host=True, own=[ip_address("10.0.0.7")])
    assert list(order) == ["shm", "quic", "tls"]
    assert order["quic"][0] == "127.0.0.1:1"
    assert "10.0.0.7:1" in order["quic"]


def test_a_peer_elsewhere_is_dialed_on_a_network_that_both_are_on_first():
    order = dial_order(TOLD, schemes=SCHEMES, same_host=False, networks=[ip_network("192.168.5.0/24")])
    assert list(order) == ["quic", "tls"]
    assert order["tls"] == ("192.168.5.7:1", "10.0.0.7:1", "172.17.0.1:1")


def test_an_address_of_ours_is_not_dialed_to_reach_somebody_else():
    order = dial_order(TOLD, schemes=SCHEMES, same_host=False, own=[ip_address("172.17.0.1")])
    assert order["quic"] == ("10.0.0.7:1", "192.168.5.7:1")


def test_a_peer_that_has_no_other_addresses_than_ours_shares_our_network_whatever_its_host_is_called():
    own = [ip_address(host) for host in ("10.0.0.7", "192.168.5.7", "172.17.0.1", "127.0.0.1")]
    order = dial_order(TOLD, schemes=SCHEMES, same_host=False, own=own)
    assert list(order) == ["quic", "tls"]
    assert order["quic"][0] == "127.0.0.1:1"


def test_a_peer_that_has_only_addresses_of_ours_is_on_our_network_under_another_host_id():
    own = [ip_address(text) for text in ("10.0.0.7", "192.168.5.7", "172.17.0.1", "127.0.0.1")]
    order = dial_order(TOLD, schemes=SCHEMES, same_host=False, own=own)
    assert list(order) == ["quic", "tls"]
    assert order["tls"][0] == "127.0.0.1:1"


def test_a_scheme_without_addresses_is_left_out():
    order = dial_order(
        {"quic": (), "tls": ("[fd00::1]:1",), "carrier-pigeon": ("roof",)}, schemes=SCHEMES, same_host=False
    )
    assert order == {"tls": ("[fd00::1]:1",)}
