"""Sends calls and answers to the nodes of one group."""

from __future__ import annotations

import logging
from time import monotonic
from typing import Final

from nexar.errors import NexarError
from nexar.group import Group
from nexar.links.matching import Matching
from nexar.links.operation import FINISHED, Operation
from nexar.links.sending import About
from nexar.rpc.exchange import Desk, exchange_id
from nexar.types import NodeId

_log = logging.getLogger(__name__)


class Post:
    """Of one communicator. Any thread, not under the node's lock."""

    def __init__(self, group: Group, desk: Desk) -> None:
        self._group = group
        self._desk = desk
        self._communicator: Final = exchange_id(group.communicator)
        self.exchange: Matching | None = None
        """Where the group's calls meet: what is sent when that is over passes for nobody else's. Written once, before
        anybody calls."""

    def send(self, node: NodeId, space: int, number: int, row: memoryview, deadline: float) -> Operation:
        """Opens the link if there is none yet, until the deadline. A long row is used until it is sent: leave it alone.

        Raises why it cannot be sent.
        """
        group = self._group
        if node != group.node.id:
            link = group.mesh.link(node, deadline)
            about = About(space=space, tag=number)
            return link.post_send(self._communicator, row, about=about, matching=self.exchange)
        group.progress.check()
        with group.router.lock:
            self._desk.took(node, space, number, memoryview(bytearray(row)))  # its own copy, as on every other way
        group.router.outbox.flush()
        group.progress.kick()  # who waits for it may lead, and sleep: nothing else would wake it
        return FINISHED

    def leave(self) -> None:
        """A function has ended. If it has waited for something of ours it led, and leads no more: somebody has to look
        for the next call before the progress thread would by itself.
        """
        self._group.progress.leave_behind()

    def answer(self, node: NodeId, space: int, number: int, row: memoryview) -> None:
        """To somebody who has a link to us, or had one: then nobody waits for it any more. Never blocks."""
        try:
            self.send(node, space, number, row, monotonic())
        except NexarError as error:
            _log.debug("nobody is there any more to hear about call %d: %s", number, error)
