"""One dial of one member, by the thread that wants the link: connect, introduce ourselves, share memory if possible."""

from __future__ import annotations

import logging
import threading
import time

from nexar.cluster.introduction import Dialed
from nexar.cluster.membership import Member
from nexar.cluster.node import Node
from nexar.links.link import Link
from nexar.transport.base import Carrier, CarrierLost, ConnectRefused, Expected
from nexar.types import Rank, format_node
from nexar.wire.messages import Declined, Introduce, Introduced

_log = logging.getLogger(__name__)


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
        self._answered = threading.Event()
        self._answer: Introduced | Declined | CarrierLost | None = None  # written by the driving thread, once

    def run(self, deadline: float) -> None:
        """Raises DialFailed or Superseded."""
        carrier = self._connect(deadline)
        if not self._answered.wait(max(0.0, deadline - time.monotonic())):
            carrier.abort("no answer to the introduction")
            raise DialFailed("it accepted the connection and did not answer")
        answer = self._answer
        if isinstance(answer, Introduced):
            self._share_memory(self._check(carrier, answer), deadline)
        elif isinstance(answer, Declined):
            raise Superseded if answer.superseded else DialFailed(f"it declined: {answer.reason}")
        else:
            raise DialFailed(f"the connection broke at once: {answer.reason if answer else 'for no reason'}")

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
        if isinstance(answer, Introduced) and self._claims_rightly(answer):
            self._link.adopt(carrier)
        self._answer = answer
        self._answered.set()

    def _claims_rightly(self, answer: Introduced) -> bool:
        return (answer.rank, answer.epoch) == self._claim

    def _check(self, carrier: Carrier, answer: Introduced) -> str:
        if not self._claims_rightly(answer):
            rank, epoch = self._claim
            wrong = f"it claims rank {answer.rank} at epoch {answer.epoch}, and should have {rank} at epoch {epoch}"
            carrier.abort(wrong)
            raise DialFailed(wrong)
        return answer.shared_memory

    def _share_memory(self, address: str, deadline: float) -> None:
        """One more carrier, the fastest, if it can be had."""
        if not address:
            return
        try:
            self._link.adopt(self._node.connect_memory(address, self._member.node, deadline))
        except OSError as error:
            node = format_node(self._member.node)
            _log.info("no shared memory with node %s, the network serves instead: %s", node, error)
