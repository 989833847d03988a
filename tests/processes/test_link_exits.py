"""An interpreter that ends with live links: no hang, no crash, nothing left, and the peer notices at once."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from nexar.errors import NexarError, PeerLost
from nexar.links.link import Link
from nexar_tools.bare_nodes import LinkedNode
from nexar_tools.peer_protocol import PeerStop
from tests.processes.scale import MIB, measured, schemes
from tests.processes.star import Ray, Star
from tests.processes.talk import CARELESS, echo, receive, round_trip, say, source_of_zeros


def do_nothing(node: LinkedNode, link: Link) -> None:
    """The simplest careless program."""


def leave_everything_open(node: LinkedNode, link: Link) -> None:
    """A thread that waits, one that talks, and a transfer under way."""
    threading.Thread(target=_until_the_end, args=(receive, node, link.peer, 1, 600), daemon=True).start()
    threading.Thread(target=_until_the_end, args=(echo, node, link), daemon=True).start()
    for _ in range(20):
        say(link, 2, source_of_zeros(64 * MIB))


def _until_the_end(function: Callable[..., Any], *arguments: Any) -> None:
    with suppress(NexarError):  # the node is closed
        function(*arguments)


def leave(ray: Ray) -> float:
    """Let the process end; seconds that it took."""
    begin = time.monotonic()
    ray.result()
    ray.peer.order(PeerStop(), begin + 10)
    assert ray.peer.process.wait(10) is not None, "the interpreter does not end"
    return time.monotonic() - begin


def lose(node: LinkedNode, link: Link, lost: list[float]) -> None:
    with pytest.raises(PeerLost):
        receive(node, link.peer, 3)
    lost.append(time.monotonic())


@pytest.mark.parametrize("function", [do_nothing, leave_everything_open])
@schemes("shm", "quic", "tls")
def test_an_interpreter_ends_with_live_links(scheme: str, function: Any, record_property: Any) -> None:
    lost: list[float] = []
    with Star([scheme]) as star:
        ray = star.start(function, node_class=CARELESS)
        waiter = threading.Thread(target=lose, args=(star.node, ray.link, lost))
        waiter.start()
        if function is leave_everything_open:
            round_trip(star.node, ray.link)
        took = leave(ray)
        ended = time.monotonic()
        waiter.join(20)
        assert ray.peer.process.exit_code == 0, ray.peer.process.stderr()
        assert ray.peer.process.stderr() == ""
    measured(record_property, scheme=scheme, exit_s=round(took, 2), noticed_ms=round((lost[0] - ended) * 1e3, 1))
    assert lost[0] - ended < 1
