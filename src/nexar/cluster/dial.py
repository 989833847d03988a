"""One dial of one member, by the thread that wants the link: connect, introduce ourselves, share memory if possible."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from nexar.cluster.decisions.refusals import brief
from nexar.cluster.introduction import Dialed
from nexar.cluster.membership import Member
from nexar.cluster.node import Node
from nexar.links.link import Link
from nexar.transport.base import Carrier, CarrierLost, ConnectRefused, Expected
from nexar.types import Rank, format_node
from nexar.wire.messages import Declined, Introduce, Introduced

_log = logging.getLogger(__name__)

_A_MOMENT: Final = 5.0


class DialFailed(Exception):
    """It came to nothing. The text is a cause, fit for a PeerLost."""


class Superseded(Exception):
    """Nothing is wrong: the peer's own dial to us has won, and is about to be a link."""


class Dial:
    """`run` it once. The link has its carriers when it returns."""

    def __init__(self, node: Node, member: Member, rank: Rank, link: Link, introduce: Introduce) -> None:
        """`rank` is what the member must claim, at the epoch that we claim."""
        self._node = node
        self._member = member
        self._link = link
        self._introduce = introduce
        self._claim = (rank, introduce.epoch)
        self._lock = threading.Lock()
        self._given_up = False  # under the lock
        self._answered = threading.Event()
        self._answer: Introduced | Declined | CarrierLost | None = None  # written by the driving thread, once

    def run(self, deadline: float) -> None:
        """Raises DialFailed or Superseded; nothing is left open then."""
        carrier = self._connect(deadline)
        if not self._answered.wait(max(0.0, deadline - time.monotonic())) and self._give_up():
            carrier.abort("no answer to the introduction")
            raise DialFailed("it accepted the connection and did not answer")
        self._answered.wait(_A_MOMENT)  # it came just before the deadline, and is being taken
        answer = self._answer
        if isinstance(answer, Introduced) and self._claims_rightly(answer):
            self._share_memory(answer.shared_memory, deadline)
            return
        # Whoever said no may not close its side: what was said is here, so this side waits for nothing.
        carrier.abort("the introduction came to nothing")
        raise self._explain(answer)

    def _give_up(self) -> bool:
        """From now on no answer is taken; False: one is."""
        with self._lock:
            self._given_up = self._answer is None
            return self._given_up

    def _explain(self, answer: Introduced | Declined | CarrierLost | None) -> DialFailed | Superseded:
        if isinstance(answer, Introduced):
            rank, epoch = self._claim
            claim = f"rank {answer.rank} at epoch {answer.epoch}"
            return DialFailed(f"it claims {claim}, and should have rank {rank} at epoch {epoch}")
        if isinstance(answer, Declined):
            return Superseded() if answer.superseded else DialFailed(f"it declined: {brief(answer.reason)}")
        return DialFailed(f"the connection broke at once: {brief(answer.reason) if answer else 'for no reason'}")

    def _connect(self, deadline: float) -> Carrier:
        expected = Expected(self._member.node, self._member.fingerprint)
        try:
            carrier = self._node.dialer.dial(self._node.ways_to(self._member), expected, deadline)
            Dialed(carrier, self._introduce, self._take)
        except (ConnectRefused, CarrierLost) as error:
            raise DialFailed(f"cannot connect: {error.reason}") from error
        except TimeoutError as error:
            raise DialFailed(f"cannot connect: {error}") from error
        return carrier

    def _take(self, carrier: Carrier, answer: Introduced | Declined | CarrierLost) -> None:
        """The driving thread, inside the sink: here the link takes over, or nobody does."""
        with self._lock:
            if self._given_up:
                return
            self._answer = answer
        try:
            if isinstance(answer, Introduced) and self._claims_rightly(answer):
                self._link.adopt(carrier)
        finally:
            self._answered.set()

    def _claims_rightly(self, answer: Introduced) -> bool:
        return (answer.rank, answer.epoch) == self._claim

    def _share_memory(self, address: str, deadline: float) -> None:
        """One more carrier, the fastest, if it can be had."""
        if not address:
            return
        try:
            self._link.adopt(self._node.connect_memory(address, self._member.node, deadline))
        except OSError as error:
            node = format_node(self._member.node)
            _log.info("no shared memory with node %s, the network serves instead: %s", node, error)
