"""A link whose other end is another process, over every transport: the harness and the ground floor together."""

import pytest

from nexar.errors import PeerLost
from nexar.wire.frame import Space
from nexar_tools.peer_process import PeerPair, PeerProcess
from nexar_tools.transports import why_unavailable

SIZES = (8, 65_536, 3_000_001)


def echo(node, link, count):
    """Send back what comes, that many times."""
    for _ in range(count):
        receive = node.matching.post(None, source=link.peer, space=Space.UNTAGGED, tag=0)
        node.wait(receive)
        node.wait(link.post_send(0, receive.into))
    return count


def send_ten(node, link):
    node.wait(*[link.post_send(0, memoryview(bytes([number]) * 100)) for number in range(10)])


def receive_ten(node, link):
    received = []
    for _ in range(10):
        receive = node.matching.post(None, source=link.peer, space=Space.UNTAGGED, tag=0)
        node.wait(receive)
        received.append(receive.into[0])
    return received


def wait_for_ever(node, link):
    node.wait(node.matching.post(None, source=link.peer, space=Space.UNTAGGED, tag=0), timeout=50)


@pytest.fixture(params=["quic", "tls", "tcp", "shm"])
def scheme(request):
    reason = why_unavailable(request.param)
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")
    return request.param


@pytest.mark.parametrize("peer_dials", [False, True])
def test_a_peer_process_echoes_over_a_link(scheme, peer_dials):
    with PeerProcess(echo, [len(SIZES)], schemes=[scheme], peer_dials=peer_dials) as peer:
        for size in SIZES:
            sent, back = memoryview(bytes(range(256)) * (size // 256 + 1))[:size], memoryview(bytearray(size))
            receive = peer.node.matching.post(back, source=peer.peer_node, space=Space.UNTAGGED, tag=0)
            peer.node.wait(receive, peer.link.post_send(0, sent))
            assert back == sent
        assert peer.result() == len(SIZES)


def test_two_peer_processes_talk_while_their_parent_only_listens(scheme):
    with PeerPair(send_ten, receive_ten, schemes=[scheme]) as pair:
        assert pair.results() == (None, list(range(10)))


def test_several_transports_make_one_link():
    schemes = [scheme for scheme in ("shm", "quic", "tls") if why_unavailable(scheme) is None]
    with PeerProcess(echo, [1], schemes=schemes) as peer:
        back = memoryview(bytearray(8))
        receive = peer.node.matching.post(back, source=peer.peer_node, space=Space.UNTAGGED, tag=0)
        peer.node.wait(receive, peer.link.post_send(0, memoryview(b"8 bytes!")))
        assert back == b"8 bytes!"
        assert {name.split(".")[0] for name in peer.link.stats() if "." in name} == set(schemes)


@pytest.mark.parametrize("scheme", ["tls", "shm"])
def test_a_link_is_lost_when_its_peer_is_killed(scheme):
    reason = why_unavailable(scheme)
    if reason is not None:
        pytest.skip(reason)
    with PeerProcess(wait_for_ever, schemes=[scheme]) as peer:
        receive = peer.node.matching.post(None, source=peer.peer_node, space=Space.UNTAGGED, tag=0)
        peer.kill()
        with pytest.raises(PeerLost):
            peer.node.wait(receive, timeout=20)
