"""My conversation with one peer in one communicator: order, credit, and sends that wait for it.

A flow lives no longer than the carrier that bore it. When that breaks, frames may be lost, so the flow is over for
good; the communicator's next generation gets a new one.
"""

from __future__ import annotations

from collections import deque

from nexar.links.credit import ReceiveCredit, SendCredit
from nexar.links.matching import Matching
from nexar.links.send import Send
from nexar.wire.frame import Frame


class Flow:
    """State of one (link, communicator, generation). Changes under the node's lock."""

    __slots__ = ("expected", "generation", "held", "matching", "message", "received", "sent", "take_whole", "waiting")

    def __init__(self, matching: Matching, send_credit_bytes: int, receive_credit_bytes: int) -> None:
        self.matching = matching
        self.generation = matching.generation
        self.sent = SendCredit(send_credit_bytes)
        self.take_whole = self.sent.take_whole  # bound once: asked for every message
        self.received = ReceiveCredit(receive_credit_bytes)
        self.message = 0  # number of the next message I send
        self.expected = 0  # number of the next message to deliver
        self.held: dict[int, tuple[Frame, bytes]] = {}  # came before their turn: threads and carriers may overtake
        self.waiting: deque[Send] = deque()  # sends without credit even for an envelope
