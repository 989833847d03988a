"""One dial of one member, by the thread that wants the link: connect, introduce ourselves, share memory if possible."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from nexar.cluster.decisions.failure_detector import IF_SLOW
from nexar.cluster.decisions.refusals import brief
from nexar.cluster.introduction import Dialed
from nexar.cluster.membership import Member
from nexar.cluster.node import Node
from nexar.cluster.recall import Recall, Recalled
from nexar.links.link import Link
from nexar.transport.base import Carrier, CarrierLost, ConnectRefused, Expected
from nexar.types import NodeId, format_node
from nexar.wire.messages import Declined, Introduce, Introduced

_log = logging.getLogger(__name__)


FaultOf: TypeAlias = Callable[[NodeId, Introduced], str | None]
"""What is wrong with what a node says of itself; None: nothing."""


class DialFailed(Exception):
    """It came to nothing. The text is a cause, fit for a PeerLost."""


class NoLonger(DialFailed):
    """It says that this node is no member any more."""

    def __init__(self, epoch: int, reason: str) -> None:
        super().__init__(f"it went on without this node in epoch {epoch}: {reason}")
        self.epoch = epoch
        self.reason = reason


class Superseded(Exception):
    """Nothing is wrong: the peer's own dial to us has won, and is about to be a link."""


class Dial:
    """`run` it once. The link has its carriers when it returns."""

    def __init__(self, node: Node, member: Member, link: Link, introduce: Introduce, fault_of: FaultOf) -> None:
        """`fault_of` says what is wrong with what the member claims."""
        self._node = node
        self._member = member
        self._link = link
        self._introduce = introduce
        self._fault_of = fault_of
        self._lock = threading.Lock()  # over the next two
        self._over = False  # from now on no answer is taken
        self.opened = False
        """The link has a carrier."""
        self.recall = Recall()
        """Make it when nobody wants this link any more: the dial ends at once."""
        self._answered = threading.Event()
        self._answer: Introduced | Declined | CarrierLost | None = None  # written by the driving thread, once

    def run(self, deadline: float, connect_by: float | None = None) -> None:
        """Raises DialFailed or Superseded. Whatever it raises: the carrier is the link's (`opened`), or it is gone.

        `connect_by`: until then the connection must be there, if that is before the deadline of the answer.
        """
        carrier = self._connect(deadline if connect_by is None else min(connect_by, deadline))
        try:
            with self._node.recall.waking(self._answered.set), self.recall.waking(self._answered.set):
                self._answered.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self._end(carrier)
        if not self.opened:
            raise self._explain(self._answer)
        if isinstance(self._answer, Introduced):
            self._go_on(self._answer, deadline)

    @property
    def sidecar(self) -> str:
        """The scheme of the sidecar that the peer takes; empty: none, or no answer."""
        return self._answer.sidecar if isinstance(self._answer, Introduced) else ""

    @property
    def broke(self) -> bool:
        """It came to nothing although the peer was reached: it has ended the connection."""
        return isinstance(self._answer, CarrierLost)

    def _end(self, carrier: Carrier) -> None:
        with self._lock:
            self._over = True
        if not self.opened:
            # Whoever said no may not close its side: what was said is here, so this side waits for nothing.
            carrier.abort("the introduction came to nothing")

    def _explain(self, answer: Introduced | Declined | CarrierLost | None) -> DialFailed | Superseded:
        if answer is None:
            return DialFailed(self._recalled() or f"it accepted the connection and did not answer{IF_SLOW}")
        if isinstance(answer, Introduced):
            return DialFailed(self._fault_of(self._member.node, answer) or "it answered too late")
        if isinstance(answer, Declined) and answer.expelled:
            return NoLonger(answer.expelled, brief(answer.reason))
        if isinstance(answer, Declined):
            return Superseded() if answer.superseded else DialFailed(f"it declined: {brief(answer.reason)}")
        return DialFailed(f"the connection broke at once: {brief(answer.reason)}")

    def _connect(self, deadline: float) -> Carrier:
        try:
            carrier = self._reach(deadline)
            Dialed(carrier, self._introduce, self._take)
        except (ConnectRefused, CarrierLost) as error:
            raise DialFailed(f"cannot connect: {error.reason}") from error
        except TimeoutError as error:
            raise DialFailed(f"cannot connect: {error}") from error
        except Recalled as recalled:
            raise DialFailed(self._recalled() or str(recalled)) from recalled
        return carrier

    def _recalled(self) -> str | None:
        """Why nobody wants the link any more; None: somebody does."""
        if self._node.recall.made:
            return str(Recalled())
        return "it is no member any more" if self.recall.made else None

    def _reach(self, deadline: float) -> Carrier:
        """Connect. ConnectRefused, TimeoutError, Recalled."""
        expected = Expected(self._member.node, self._member.fingerprint)
        return self._node.dialer.dial(self._node.ways_to(self._member), expected, deadline, self.recall)

    def _adopt(self, carrier: Carrier) -> None:
        """The peer is who it should be."""
        self._link.adopt(carrier)

    def _go_on(self, answer: Introduced, deadline: float) -> None:
        """The link has its carrier."""
        self._share_memory(answer.shared_memory, deadline)

    def _take(self, carrier: Carrier, answer: Introduced | Declined | CarrierLost) -> None:
        """The driving thread, inside the sink: here the link takes over, or nobody does."""
        with self._lock:  # in one step with the end of the dial: a carrier is never both the link's and aborted
            if self._over:
                return
            self._answer = answer
            if isinstance(answer, Introduced) and self._fault_of(self._member.node, answer) is None:
                self._adopt(carrier)
                self.opened = True
        self._answered.set()

    def _share_memory(self, address: str, deadline: float) -> None:
        """One more carrier, the fastest, if it can be had. An offer of a member that is not on this host is not
        followed: it can only lead to a process that is somebody else's.
        """
        if not address or self._member.host != self._node.host:
            return
        try:
            self._link.adopt(self._node.connect_memory(address, self._member.node, deadline))
        except OSError as error:
            node = format_node(self._member.node)
            _log.info("no shared memory with node %s, the network serves instead: %s", node, error)
