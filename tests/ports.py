"""Ports for servers that a test starts a moment later."""

import random
import socket
from contextlib import ExitStack

_PORTS = range(20_000, 32_000)  # below those that systems give to connections and to sockets bound to port 0
_random = random.SystemRandom()  # tests in other processes must not draw the same ports


def free_port(count: int = 1) -> int:
    """The first of `count` neighbouring ports that are free for TCP and UDP, at every address."""
    while True:
        first = _random.choice(_PORTS)
        if all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with ExitStack() as sockets:
        try:
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                sockets.enter_context(socket.socket(type=kind)).bind(("", port))
        except OSError:
            return False
    return True
