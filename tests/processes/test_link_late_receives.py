"""Receives that are posted while their messages arrive: what has landed is moved over, what has not follows."""

import zlib

import pytest

from nexar.links.link import Link
from nexar_tools.bare_nodes import LinkedNode
from nexar_tools.peer_process import PeerProcess
from tests.processes.scale import schemes, sized
from tests.processes.talk import noise, post, receive, say

ROUNDS, BURST, SIZE = sized(60, 2000), 50, 100_000


def receive_bursts(node: LinkedNode, link: Link, rounds: int) -> None:
    """While receives are posted one by one, payloads come in: some are here, some half, some not at all."""
    checksum = int.from_bytes(receive(node, link.peer, 3), "little")
    for _ in range(rounds):
        operations = [post(node, link.peer, 1) for _ in range(BURST)]
        node.wait(*operations)
        say(link, 2, b"go on")
        assert all(zlib.crc32(operation.into) == checksum for operation in operations[:: BURST // 5])


@pytest.mark.full
@schemes("shm", "quic", "tls")
def test_payloads_are_moved_whole_to_receives_that_come_while_they_arrive(scheme: str) -> None:
    data = noise(SIZE)
    with PeerProcess(receive_bursts, [ROUNDS], schemes=[scheme]) as peer:
        say(peer.link, 3, zlib.crc32(data).to_bytes(4, "little"))
        for _ in range(ROUNDS):
            peer.node.wait(*(say(peer.link, 1, data) for _ in range(BURST)))
            receive(peer.node, peer.link.peer, 2)
