"""A connection breaks although both processes live: everything pending raises, and a new dial begins anew."""

import os
import signal
import socket
import stat
import time
from typing import Any

import pytest

from nexar.errors import PeerLost
from nexar.links.link import Link
from nexar.transport.base import Carrier, Expected
from tests.processes.scale import MIB, measured, schemes
from tests.processes.star import Ray, Star
from tests.processes.talk import TalkingNode, echo, end_echo, post, receive, round_trip, say, source_of_zeros

NEVER, UNREAD = 1, 2


def echo_in_two_generations(node: TalkingNode, link: Link) -> list[int]:
    """Echo until the connection breaks, then echo in the next generation; how many each time."""
    unread = say(link, UNREAD, source_of_zeros(64 * MIB))
    first = echo(node, link)
    with pytest.raises(PeerLost):
        receive(node, link.peer, NEVER)
    with pytest.raises(PeerLost):
        node.wait(unread)
    node.matching = node.router.open(0, 1)
    return [first, echo(node, link)]


def shut_sockets() -> int:
    """Shut every connection of this process, as a network would that forgot them; returns how many there were."""
    return sum(_shut(int(name)) for name in os.listdir("/proc/self/fd"))


def _shut(descriptor: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # a listening one, or the descriptor of the listing
        return False
    return True


def break_connection(star: Star, ray: Ray, scheme: str) -> None:
    if scheme == "quic":  # nothing to shut: let the peer be silent for too long
        ray.signal(signal.SIGSTOP)
        assert star.node.lost.wait(10)
        ray.signal(signal.SIGCONT, expendable=False)
    else:
        assert shut_sockets()


def dial(star: Star, ray: Ray, scheme: str, deadline: float) -> Carrier:
    return star.node.transports[scheme].connect(ray.addresses[scheme], Expected(ray.number), deadline)


@pytest.mark.full
@schemes("shm", "quic", "tls")
def test_a_broken_connection_is_dialed_again_for_the_next_generation(scheme: str, record_property: Any) -> None:
    with Star([scheme], early_bytes=MIB) as star:
        ray = star.start(echo_in_two_generations)
        node, link = star.node, ray.link
        round_trip(node, link)
        pending = [post(node, ray.number, NEVER), say(link, UNREAD, source_of_zeros(64 * MIB))]
        end_echo(link)
        break_connection(star, ray, scheme)
        for operation in pending:
            with pytest.raises(PeerLost):
                node.wait(operation, timeout=10)
        begin = time.monotonic()
        link.adopt(dial(star, ray, scheme, begin + 10.0))
        measured(record_property, scheme=scheme, redialed_ms=round((time.monotonic() - begin) * 1e3, 1))
        with pytest.raises(PeerLost):
            say(link, 8, b"in the old generation")
        node.matching = node.router.open(0, 1)
        round_trip(node, link)
        end_echo(link)
        assert ray.result() == [1, 1]
