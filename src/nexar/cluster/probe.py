"""Does a member live? Asked at once, wherever something hints that it does not.

Three witnesses are heard side by side. Its *system* says by refusing connections that nobody listens there any more: so
its process has ended. Its *Python code* answers a Ping on the link. Its *transport*, where that is QUIC, goes on
acknowledging although its Python code is stuck: that is life too. A connection that its system takes does not prove
life, for it does so for a stopped process as well; and for one that is just ending, so a connection that is reset at
once is tried again. But such a process is not dead: it may get too little CPU to answer, so it has more time. What was
on its way when it died may still come in: packets count only when they come again after a while.
"""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

from nexar.cluster.decisions.failure_detector import IF_SLOW
from nexar.cluster.knock import Knock
from nexar.cluster.membership import Member
from nexar.cluster.node import Node
from nexar.cluster.pings import Pings
from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.types import format_seconds
from nexar.wire.messages import Ping

__all__ = ["ENDED", "Pings", "probe"]

ENDED: Final = "its process has ended"
"""How a cause begins after which nothing more is to be tried."""

_GLANCE: Final = 0.05
"""Seconds between two looks at the packets, and between two Pings."""
_MOMENT: Final = 0.02
"""Seconds that a connection must last to be no farewell of a process that ends."""


def probe(
    node: Node,
    member: Member,
    link: Link | None,
    pings: Pings,
    deadline: float,
    *,
    packets: bool = True,
    patience: float = 0.0,
) -> str | None:
    """Why this member cannot be reached; None: it lives, or nothing says that it does not. Returns at the deadline
    (time.monotonic) at the latest, `patience` seconds later for a process that exists (its system takes connections,
    or packets come), and at once when the node closes. Blocks; any thread but the driving one.

    `packets`: they are enough; else its Python code has to answer, for who cannot tell how long it has been stuck.
    Where there is no link to ask on, a system that takes connections is the best answer: who wants more dials.
    """
    if link is not None and link.failure is not None:
        link = None
    with _Probe(node, member, link, pings, packets=packets) as asked:
        return asked.run(deadline, patience)


class _Probe:
    """One question. A `with` block."""

    def __init__(self, node: Node, member: Member, link: Link | None, pings: Pings, *, packets: bool) -> None:
        self._node = node
        self._packets = packets
        self._link = link
        self._pings = pings
        self._addresses = node.ways_to(member).get("tls", ())  # those that lead to us are left out there
        self._peer = member.node
        self._begin = time.monotonic()
        self._stack = ExitStack()
        self._knocks: list[Knock] = []
        self._answered = False  # written by the driving thread
        self._number = 0
        self._heard: float | None = None  # at the last glance
        self._packets_came = False
        self._glanced = self._begin

    def __enter__(self) -> Self:
        with self._stack as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._bell, self._ears = socket.socketpair()
            for end in (self._bell, self._ears):
                stack.enter_context(end)
                end.setblocking(False)
            self._selector.register(self._ears, selectors.EVENT_READ)
            self._number = self._pings.expect(self._peer, self._pong)
            stack.callback(self._pings.forget, self._number)
            stack.enter_context(self._node.recall.waking(self._ring))
            for address in self._addresses:
                self._knocks.append(stack.enter_context(Knock(address, self._selector)))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # -- the driving thread, or who closes the node --------------------------------------------------------

    def _pong(self) -> None:
        self._answered = True
        self._ring()

    def _ring(self) -> None:
        try:
            self._bell.send(b"!")
        except OSError:
            return  # it rings already, or nobody listens any more

    # -- who asks ------------------------------------------------------------------------------------------

    def run(self, deadline: float, patience: float) -> str | None:
        """The answer."""
        self._ask()
        while not self._lives():
            cause = self._cause()
            now = time.monotonic()
            left = deadline + (patience if self._exists else 0.0) - now
            if cause is not None or left <= 0:
                return cause or self._silence(now)
            self._wait(min(left, _MOMENT if self._link is None else _GLANCE))
        return None

    @property
    def _exists(self) -> bool:
        """Whether something shows that there is a process, be it stopped, stuck or slow."""
        return self._packets_came or any(knock.stands for knock in self._knocks)

    def _ask(self) -> None:
        """A link that was lost meanwhile is nobody to ask."""
        if self._link is not None:
            try:
                self._link.send_control(Ping(self._number))
            except NexarError:
                self._link = None

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.fileobj is self._ears:
                self._ears.recv(64)
            else:
                key.data()

    def _lives(self) -> bool:
        if self._answered or self._node.recall.made:
            return True
        if self._link is None:
            lasting = any(knock.lasts(_MOMENT) for knock in self._knocks)
            return lasting or not self._knocks
        return self._shows_life(self._link)

    def _shows_life(self, link: Link) -> bool:
        """Packets that came between two glances, the first of which is behind us."""
        now = time.monotonic()
        if "quic" not in link.schemes or now < self._glanced + _GLANCE:
            return False
        before, self._heard, self._glanced = self._heard, link.heard_bytes(), now
        self._ask()
        came = before is not None and self._heard != before and link.failure is None
        self._packets_came = self._packets_came or came
        return came and self._packets

    def _cause(self) -> str | None:
        """Why it is gone, if that is certain by now."""
        if not self._knocks or not all(knock.failed for knock in self._knocks):
            return None
        where = ", ".join(self._addresses)
        if all(knock.refused for knock in self._knocks):
            return f"{ENDED} (connection refused at {where})"
        if self._link is not None:
            return None
        reasons = "; ".join(f"{knock.address}: {knock.failed}" for knock in self._knocks)
        return f"it cannot be reached ({reasons})"

    def _silence(self, now: float) -> str:
        waited = f"no answer for {format_seconds(now - self._begin)}"
        if any(knock.stands for knock in self._knocks):
            return f"{waited}, though its system takes connections: its process is stopped or stuck{IF_SLOW}"
        return waited
