"""Links over a network that loses packets: everything arrives, in order and unharmed."""

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest

from nexar.links.link import Link
from nexar_tools.bare_nodes import LinkedNode
from nexar_tools.network_namespaces import NetworkNamespaces
from nexar_tools.peer_process import PeerPair
from tests.processes.scale import MIB, measured, schemes, sized
from tests.processes.talk import await_that, noise, receive, say

pytestmark = pytest.mark.netns

SMALL = sized(300, 3000)
LARGE, LARGE_SIZE = 2, sized(4 * MIB, 64 * MIB)
DIAL = 30.0
BURSTS = sized([(0, 0)], [(0, 0), (0, 5), (7, 2), (4, 7), (5, 1)])
"""How many packets of each ten pass, at either end, before three are lost."""


def exchange(node: LinkedNode, link: Link, small: int, large: int, size: int) -> list[str]:
    """Send and receive at once; the hashes of all that was sent and of all that came."""
    messages = [noise(8 + number) for number in range(small)] + [noise(size + number) for number in range(large)]
    sends = [say(link, 1, message) for message in messages]
    came = [receive(node, link.peer, 1) for _ in messages]
    node.wait(*sends)
    say(link, 2, b"that was all")
    receive(node, link.peer, 2)  # or the first to finish would take the last acknowledgements along
    return [_digest(messages), _digest(came)]


def _digest(parts: list[Any]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


@schemes("quic", "tls")
def test_everything_arrives_although_two_percent_of_the_packets_do_not(scheme: str, record_property: Any) -> None:
    begin = time.monotonic()
    with NetworkNamespaces(offload=False) as network:
        lose_two_percent(network)
        arguments = [SMALL, LARGE, LARGE_SIZE]
        with PeerPair(exchange, exchange, arguments, places=network.places, schemes=[scheme], timeout=DIAL) as pair:
            left, right = pair.results(timeout=60)
    assert left == right[::-1]
    measured(record_property, scheme=scheme, seconds=round(time.monotonic() - begin, 2))


def lose_two_percent(network: NetworkNamespaces) -> None:
    for number in (0, 1):
        network.clear(number)
        network.lose(number, percent=2)


def exchange_after_the_faults(node: LinkedNode, link: Link, folder: str, *arguments: int) -> list[str]:
    """Say that we are connected, once a message has passed each way, and go on when the faults have ended."""
    say(link, 3, b"are you there?")
    receive(node, link.peer, 3)
    Path(folder, f"{node.node} is connected").touch()
    await_that(Path(folder, "calmer").exists, "calmer weather", timeout=2 * DIAL)
    return exchange(node, link, *arguments)


@pytest.mark.full
@schemes("quic", "tls")
@pytest.mark.parametrize("bursts", BURSTS)
def test_a_handshake_survives_bursts_of_loss(
    scheme: str, bursts: tuple[int, int], tmp_path: Path, record_property: Any
) -> None:
    """From the first packet to the first message three of ten are lost in a row, both ways; afterwards two percent."""
    arguments = [str(tmp_path), SMALL, LARGE, LARGE_SIZE]
    function = exchange_after_the_faults
    with NetworkNamespaces(offload=False) as network:
        for number, after in enumerate(bursts):
            network.lose_bursts(number, burst=3, every=10, after=after)
        begin = time.monotonic()
        with PeerPair(function, function, arguments, places=network.places, schemes=[scheme], timeout=DIAL) as pair:
            seconds = connected(pair, tmp_path) - begin
            lose_two_percent(network)
            (tmp_path / "calmer").touch()
            left, right = pair.results(timeout=60)
    assert left == right[::-1]
    measured(record_property, scheme=scheme, bursts=bursts, connected_seconds=round(seconds, 2))


def connected(pair: PeerPair, folder: Path) -> float:
    """When both were connected; raises what either failed with."""

    def both() -> bool:
        for peer in pair.peers:
            peer.check()
        return len(list(folder.glob("* is connected"))) == len(pair.peers)

    await_that(both, "both ends to be connected", timeout=2 * DIAL)
    return time.monotonic()
