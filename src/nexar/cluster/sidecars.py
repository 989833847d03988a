"""Sidecars of the links of one node: opened in the background by who dialed the link, taken by who was dialed.

A sidecar is dialed like a link and introduces itself like one, so it is held to the same certificate, pin, rank and
epoch; its introduction says that it is one. It is never worth waiting for, and its failure harms nobody.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Final

from msgspec.structs import replace

from nexar.cluster.dial import Dial, DialFailed, FaultOf, Superseded
from nexar.cluster.membership import Member
from nexar.cluster.node import Node
from nexar.links.carrier import takes_sidecar
from nexar.links.link import Link
from nexar.transport.base import Carrier
from nexar.types import format_node
from nexar.wire.messages import Introduce, Introduced

_log = logging.getLogger(__name__)

_LONGEST_DIAL: Final = 10.0


class SidecarDial(Dial):
    """One dial of a member to which there is a link. `run` it once."""

    def _reach(self, deadline: float) -> Carrier:
        return self._node.connect_sidecar(self._member, deadline)

    def _adopt(self, carrier: Carrier) -> None:
        self._link.sidecar.adopt(carrier)

    def _go_on(self, answer: Introduced, deadline: float) -> None:
        """There is nothing more to open."""


class Sidecars:
    """Any thread."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._complained = False  # a second warning says nothing new; two threads at once may both give one

    @property
    def offered(self) -> str:
        """What the peer of a link is told."""
        return self._node.sidecar or ""

    def open(self, member: Member, link: Link, introduce: Introduce, offered: str, fault_of: FaultOf) -> None:
        """The sidecar of a link that we dialed, if both ends want the same one and it is of use there. Never blocks."""
        if self.offered == offered and takes_sidecar(self._node.sidecar, link.schemes):
            dial = SidecarDial(self._node, member, link, replace(introduce, sidecar=True), fault_of)
            self._node.dialer.aside(partial(self._run, dial, link))

    def _run(self, dial: SidecarDial, link: Link) -> None:
        try:
            dial.run(time.monotonic() + _LONGEST_DIAL)
        except (DialFailed, Superseded) as failed:
            if not self._node.recall.made and link.failure is None:  # else nobody has any use for it now
                link.sidecar.could_not_be_opened()
                self._complain(link, failed, dial)

    def _complain(self, link: Link, why: Exception, dial: SidecarDial) -> None:
        """Once as a warning. That the peer ended the connection is hardly worth one: most likely it closes."""
        level = logging.INFO if dial.broke else logging.DEBUG if self._complained else logging.WARNING
        self._complained = self._complained or not dial.broke
        node = format_node(link.peer)
        _log.log(level, "no bulk sidecar to node %s, the mesh connection serves alone: %s", node, why)

    def why_not(self, carrier: Carrier, introduce: Introduce) -> str | None:
        """Why a connection that introduces itself so is not wanted; None if it is."""
        if introduce.sidecar and carrier.scheme != self._node.sidecar:
            return f"this node takes {self._node.sidecar or 'no'} sidecars, not {carrier.scheme}"
        if not introduce.sidecar and carrier.scheme == "tcp":
            return "a connection that is not encrypted carries large payloads and nothing else"
        return None
