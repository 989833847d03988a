"""The other end of a link, in a real second process; or both ends, in two.

    with PeerProcess("package.module:function", [1000], schemes=["tls"]) as peer:
        peer.node.wait(peer.link.post_send(0, data))
        assert peer.result(timeout=10) == ...

The child calls `function(node, link, *arguments)`; what it returns (anything JSON can say) is the result. What it
raises is raised here, with its traceback. The function must be importable by name; arguments must be JSON-able.
Every wait has a deadline, and when the `with` block is left, the child has ended.

With `raw=True` the function gets (RawNode, Carrier), and so does the parent: the transport alone.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, cast

from nexar.testing.peer import Peer, PeerFailed
from nexar.testing.peer_messages import Assembly, Dial
from nexar.testing.peer_terms import HERE, LINKED, RAW, Cluster, Function, Place, Terms
from nexar.transport.base import Carrier
from nexar.types import NodeId

if TYPE_CHECKING:
    from nexar.links.link import Link

__all__ = ["HERE", "LINKED", "RAW", "PeerFailed", "PeerPair", "PeerProcess", "Place", "Terms"]

_GLANCE = 0.25  # seconds that a wait for the link may go on without a look at the child
_LEFT: Final[NodeId] = 0x11
_RIGHT: Final[NodeId] = 0x22


class PeerProcess:
    """A `with` block in which a second process is connected to this one.

    `peer_dials`: the child opens the connection rather than this side. `place` is the child's; this process listens on
    `host`, by default the child's.
    """

    def __init__(
        self,
        function: Function,
        arguments: Sequence[Any] = (),
        *,
        terms: Terms | None = None,
        peer_dials: bool = False,
        place: Place = HERE,
        host: str | None = None,
        **common: Any,
    ) -> None:
        """`common` are the fields of Terms, which can also be given as one value."""
        self._terms = terms or Terms(**common)
        self._function, self._arguments = function, arguments
        self._place, self._host, self._peer_dials = place, host or place.host, peer_dials
        self._collected = False
        self._stack = ExitStack()
        self.node: Any = None
        """This side's node: a LinkedNode, or what `assembly` named."""
        self.line: Any = None
        """This side's end of the connection, of whatever kind."""

    def __enter__(self) -> Self:
        with self._stack:
            self._open(time.monotonic() + self._terms.timeout)
            self._stack = self._stack.pop_all()
        return self

    def _open(self, deadline: float) -> None:
        cluster = Cluster(self._terms)
        self._peer = peer = Peer(self._place.prefix)
        self._stack.push(peer.part)
        peer.order(cluster.start(_RIGHT, _LEFT, self._place, self._function, self._arguments), deadline)
        self.node = node = cluster.make_node(_LEFT, Place(self._host))
        self._stack.callback(node.close)
        addresses = peer.ready(deadline).addresses
        if self._peer_dials:
            peer.order(Dial(node.addresses_for(_RIGHT)), deadline)
            self.line = self._accept(node, deadline)
        else:
            peer.order(Dial(), deadline)
            self.line = node.connect(_RIGHT, addresses, max(0.0, deadline - time.monotonic()))

    def _accept(self, node: Assembly, deadline: float) -> Any:
        while True:
            try:
                return node.accept(min(_GLANCE, max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                self._peer.glance()
                if time.monotonic() >= deadline:
                    raise

    @property
    def link(self) -> Link:
        """This side's end, where it is a link."""
        return cast("Link", self.line)

    @property
    def carrier(self) -> Carrier:
        """This side's end, where it is a bare carrier."""
        return cast("Carrier", self.line)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._peer.process.pid

    @property
    def peer_node(self) -> NodeId:
        """The child's node id: the source of what it sends."""
        return _RIGHT

    def result(self, timeout: float = 30.0) -> Any:
        """What the child's function returned. Raises PeerFailed, also when it says nothing in time."""
        self._collected = True
        return self._peer.result(time.monotonic() + timeout)

    def stderr(self) -> str:
        """What the child printed so far (its standard output goes there too)."""
        return self._peer.process.stderr()

    def kill(self) -> None:
        """SIGKILL. Its death is then no failure of the test."""
        self._peer.expendable = True
        self._peer.process.signal(signal.SIGKILL)

    def stop(self) -> None:
        """SIGSTOP: it lives, and does nothing. If it is still stopped at the end it is killed, which is no failure."""
        self._peer.expendable = True
        self._peer.process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._peer.expendable = False
        self._peer.process.signal(signal.SIGCONT)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            if not self._collected and not self._peer.expendable:
                self.result(self._terms.timeout)


class PeerPair:
    """A `with` block in which two processes are connected to each other; this one only collects.

    `left` dials. Both are called with the same arguments, `left(node, line, *arguments)` as well as `right`.
    """

    def __init__(
        self,
        left: Function,
        right: Function,
        arguments: Sequence[Any] = (),
        *,
        terms: Terms | None = None,
        places: tuple[Place, Place] = (HERE, HERE),
        **common: Any,
    ) -> None:
        """`common` are the fields of Terms, which can also be given as one value."""
        self._terms = terms or Terms(**common)
        self._functions, self._arguments, self._places = (left, right), arguments, places
        self._stack = ExitStack()
        self._collected = False

    def __enter__(self) -> Self:
        with self._stack:
            self._open(time.monotonic() + self._terms.timeout)
            self._stack = self._stack.pop_all()
        return self

    def _open(self, deadline: float) -> None:
        cluster = Cluster(self._terms)
        self.peers = [self._start(place) for place in self._places]
        left, right = self.peers
        left.order(cluster.start(_LEFT, _RIGHT, self._places[0], self._functions[0], self._arguments), deadline)
        right.order(cluster.start(_RIGHT, _LEFT, self._places[1], self._functions[1], self._arguments), deadline)
        left.ready(deadline)
        addresses = right.ready(deadline).addresses
        right.order(Dial(), deadline)
        left.order(Dial(addresses), deadline)

    def _start(self, place: Place) -> Peer:
        peer = Peer(place.prefix)
        self._stack.push(peer.part)
        return peer

    def results(self, timeout: float = 30.0) -> tuple[Any, Any]:
        """What both functions returned. The first failure is raised at once, with what the other process has to say."""
        self._collected = True
        deadline = time.monotonic() + timeout
        waiting = list(self.peers)
        while waiting:
            said, _, _ = select.select([p.process for p in waiting], [], [], max(0.0, deadline - time.monotonic()))
            for peer in [p for p in waiting if not said or p.process in said]:
                self._collect(peer, deadline)
                waiting.remove(peer)
        left, right = (peer.result(deadline) for peer in self.peers)
        return left, right

    def _collect(self, peer: Peer, deadline: float) -> None:
        try:
            peer.result(deadline)
        except PeerFailed as failure:
            (other,) = (p for p in self.peers if p is not peer)
            if known := other.known_failure():
                failure.add_note(f"meanwhile in the other process: {known}")
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            if not self._collected:
                self.results(self._terms.timeout)
