"""Links over a network that loses packets: everything arrives, in order and unharmed."""

import hashlib
import time
from typing import Any

import pytest

from nexar.links.link import Link
from nexar.testing.linked_node import LinkedNode
from nexar.testing.network_namespaces import NetworkNamespaces
from nexar.testing.peer_process import PeerPair
from tests.processes.scale import MIB, measured, schemes, sized
from tests.processes.talk import noise, receive, say

pytestmark = pytest.mark.netns

SMALL = sized(300, 3000)
LOST_BYTES = 2000
LARGE, LARGE_SIZE = 2, sized(4 * MIB, 64 * MIB)


class PatientNode(LinkedNode):
    """Lets a handshake over TCP take its time: TCP waits seconds before it tries for the third and fourth time."""

    def _listen(self, host: str) -> None:
        if "tls" in self.transports:
            self.transports["tls"]._handshake_timeout = 40.0
        super()._listen(host)


PATIENT = f"{__name__}:{PatientNode.__qualname__}"


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


def run(scheme: str, network: NetworkNamespaces, *arguments: int) -> float:
    """Seconds that the exchange took, with both handshakes."""
    begin = time.monotonic()
    terms: dict[str, Any] = {"schemes": [scheme], "assembly": PATIENT, "timeout": 45}
    with PeerPair(exchange, exchange, arguments, places=network.places, **terms) as pair:
        left, right = pair.results(timeout=45)
    assert left == right[::-1]
    return time.monotonic() - begin


@schemes("quic", "tls")
def test_everything_arrives_although_two_percent_of_the_packets_do_not(scheme: str, record_property: Any) -> None:
    with NetworkNamespaces(offload=False) as network:
        for number in (0, 1):
            network.lose(number, percent=2)
        seconds = run(scheme, network, SMALL, LARGE, LARGE_SIZE)
    measured(record_property, scheme=scheme, seconds=round(seconds, 2))


def lose_bursts_at_first(network: NetworkNamespaces, number: int) -> None:
    """Of each ten packets lose the last three, until so much is lost that the handshake must be over."""
    network._rule(number, "any", f"numgen inc mod 10 >= 7 quota until {LOST_BYTES} bytes drop")


@schemes("quic", "tls")
def test_a_handshake_survives_bursts_of_loss(scheme: str, record_property: Any) -> None:
    with NetworkNamespaces(offload=False) as network:
        for number in (0, 1):
            lose_bursts_at_first(network, number)
        seconds = run(scheme, network, SMALL, LARGE, LARGE_SIZE)
    measured(record_property, scheme=scheme, seconds=round(seconds, 2))
