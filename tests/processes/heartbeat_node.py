"""A process that sends heartbeats, and then holds the GIL for a while."""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from nexar.links.link import Link
from nexar.wire.control import Beat, CurrentCall, Message, Pong
from nexar_tools.bare_nodes import LinkedNode

INTERVAL = 0.1
DOING = (CurrentCall(0, "all_reduce", 1234),)


class HeartbeatNode(LinkedNode):
    """Gives the heartbeats that it receives to whom the test wants."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.on_heartbeat: Callable[[int, Beat], None] = lambda *_: None  # written by the test
        self.held = threading.Event()
        super().__init__(*args, on_control=self._heard, **kwargs)

    def _heard(self, link: Link, message: Message) -> None:
        """A Pong is the order to hold the GIL."""
        if isinstance(message, Pong):
            self.held.set()
        elif isinstance(message, Beat):
            self.on_heartbeat(link.peer, message)


def send_heartbeats_and_hold(node: HeartbeatNode, link: Link, seconds: float) -> None:
    """Send heartbeats until asked to hold the GIL; hold it; then send them for ever."""
    while not node.held.wait(INTERVAL):
        link.send_control(Beat(1, DOING))
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL keeps the GIL, which CDLL would release
    while True:
        link.send_control(Beat(1, DOING))
        time.sleep(INTERVAL)
