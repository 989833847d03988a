"""One generation of a communicator as collectives and messages see it: ranks instead of nodes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from nexar.cluster.control_loop import DialCancelled
from nexar.cluster.membership import Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.errors import Cancelled, LinkClosed, NexarError, UsageError
from nexar.links.link import Link
from nexar.links.matching import Matching
from nexar.links.messages import Message, Receive, ReceiveKind
from nexar.links.operation import FINISHED, Operation
from nexar.links.sending import PLAIN, MessageHeader
from nexar.transport.base import Redirected
from nexar.types import ANY_SOURCE, AwaitedPeer, NodeId, Rank, real, whole
from nexar.wire.frame import Frame, FrameKind, Space

_EAGER: Final = int(FrameKind.EAGER)
_NOTHING: Final = memoryview(b"")
_CLOSED_NOTICE: Final = MessageHeader(space=Space.CLOSED)
_LONGEST: Final = 1e8  # seconds, three years: "no limit" must be a number that the system can wait for


class Group:
    """Opens links on first use, separates the communicator's tags from all others, and raises at once when the peer of
    an operation is lost. Close it before the mesh.

    The membership may be a part of the mesh's or an older one; ranks are positions in it.
    """

    def __init__(
        self, node: Node, mesh: Mesh, membership: Membership, communicator: int = 0, generation: int = 0
    ) -> None:
        self.node = node
        self.mesh = mesh
        self.progress = node.progress
        self.membership = membership
        self.communicator = communicator
        self._nodes: Final[tuple[NodeId, ...]] = tuple(member.node for member in membership.members)
        self.nodes: Final = frozenset(self._nodes)
        self.size = len(self._nodes)
        rank = membership.rank_of(node.id)
        assert rank is not None  # only members create a group
        self.rank = rank
        self.local_ranks: Final = membership.ranks_on(membership.members[rank].host)  # ranks on this host, ascending
        self.router: Final = mesh.router
        self.matching: Final[Matching] = mesh.router.open(communicator, generation, members=self.nodes)
        self.matching.peers.update(
            (node_id, AwaitedPeer(rank=number, node=node_id)) for number, node_id in enumerate(self._nodes)
        )
        self._local_origin = _LocalOrigin(rank)
        self.parted: Final = itertools.count()  # numbers for messages in parts, each used once; next() is atomic

    def post_send(
        self,
        dest: Rank,
        data: memoryview,
        deadline: float,
        *,
        shape: tuple[int, ...] = (),
        about: MessageHeader = PLAIN,
    ) -> Operation:
        """A small message is copied; a large one is borrowed until the operation is done. Opens the link if needed,
        until the deadline. Raises PeerLost.
        """
        dest = self.check(dest)
        if dest == self.rank:
            return self._send_locally(data, shape, about)
        link = self.mesh.link(self._nodes[dest], deadline)
        return link.post_send(self.communicator, data, shape=shape, about=about, matching=self.matching)

    def post_receive(
        self,
        source: Rank,
        into: memoryview | None,
        *,
        space: int,
        tag: int,
        dtype: int = 0,
        ask: ReceiveKind = Receive,
        retractable: bool = False,
    ) -> Receive:
        """As Matching.post; `source` may be ANY_SOURCE. Never blocks."""
        node = ANY_SOURCE if whole(source) == ANY_SOURCE else self._nodes[self.check(source)]
        return self.matching.post(
            into, source=node, space=space, tag=tag, dtype=dtype, ask=ask, retractable=retractable
        )

    def drain(self, source: Rank, *, tag: int, parts: int) -> None:
        """Discard the remaining parts of a message, until all have come or the sender gave up. Never blocks."""
        deferred_io = self.mesh.router.deferred_io

        def take(left: int) -> None:
            try:
                part = self.post_receive(source, None, space=Space.PART, tag=tag)
            except NexarError:
                return  # no more parts come
            with self.matching.lock:
                part.when_done(lambda: deferred_io.add(continue_with, part, left - 1))
            deferred_io.flush()

        def continue_with(part: Receive, left: int) -> None:
            if part.error is None and part.frame.length and left:
                take(left)

        if parts:
            take(parts)

    def wait(
        self,
        operations: Sequence[Operation],
        deadline: float,
        abort_signal: Operation | None = None,
        *,
        keep: bool = False,
    ) -> None:
        """As Progress.wait."""
        self.progress.wait(operations, deadline, abort_signal, keep=keep)

    def post_open(self, ranks: Iterable[Rank], deadline: float) -> Operation:
        """Open the links to these ranks that were never open. Never blocks; may fail with PeerLost."""
        missing = [rank for rank in ranks if rank != self.rank and self.mesh.find(self._nodes[rank]) is None]
        return BlockingTask(self.node, partial(self.open_links, missing, deadline)) if missing else FINISHED

    def open_links(self, ranks: Iterable[Rank], deadline: float) -> None:
        """Blocks. Raises PeerLost."""
        for rank in ranks:
            if rank != self.rank:
                self.mesh.link(self._nodes[rank], deadline)

    def carried_bytes(self) -> float:
        """Grows while anything moves."""
        return sum(link.heard_bytes() + link.sent_bytes() for link in self.links().values())

    def links(self) -> dict[Rank, Link]:
        """Usable links."""
        opened = self.mesh.links()
        ours = {rank: opened[node] for rank, node in enumerate(self._nodes) if node in opened}
        return {rank: link for rank, link in ours.items() if link.failure is None}

    def speakers(self) -> dict[Rank, Link]:
        """As `links`, with relayed links to ranks that are not neighbours; these need no connection."""
        self.mesh.relay_routes.reach(self._nodes)
        return self.links()

    def rank_of(self, node: NodeId) -> Rank:
        rank = self.membership.rank_of(node)
        assert rank is not None  # the matching admits only members
        return rank

    def check(self, rank: object) -> Rank:
        """Raises UsageError if there is no such rank."""
        number = whole(rank)
        if number is None or not 0 <= number < self.size:
            raise UsageError(f"there is no rank {rank!r}; this communicator has ranks 0 to {self.size - 1}")
        return number

    def leave(self) -> None:
        """Notify linked ranks, after all earlier messages, so that none waits for this rank. Call `close` next. Never
        blocks.
        """
        for link in self.links().values():
            try:
                link.post_send(self.communicator, _NOTHING, about=_CLOSED_NOTICE, matching=self.matching)
            except NexarError:
                continue  # the link is lost or the generation is over: that ends the peer's waits too

    def close(self, error: NexarError | None = None) -> None:
        """Every operation raises `error` (default: closed on this side), now and later. Idempotent."""
        self.router.close(self.matching, error or self.closed_error())
        self.progress.wake()  # a waiting thread may be the sleeping driver

    def closed_error(self) -> LinkClosed:
        """What operations raise after the communicator was closed on this side."""
        return LinkClosed(owner=f"the communicator of rank {self.rank}")

    def _send_locally(self, data: memoryview, shape: tuple[int, ...], about: MessageHeader) -> Operation:
        # Deliver locally what a link would: the message is copied and done.
        self.progress.check()
        frame = Frame(
            kind=_EAGER,
            space=about.space,
            dtype=about.dtype,
            dimensions=len(shape),
            communicator=self.communicator,
            generation=self.matching.generation,
            tag=about.tag,
            sequence=about.sequence,
            step=about.step,
            length=len(data),
            count=about.elements,
        )
        with self.matching.lock:
            error = self.matching.lost(self.node.id)
            if error is None:
                self.matching.arrive(self._local_origin, self.node.id, frame, shape, data)
        if error is not None:
            raise error
        self.router.deferred_io.flush()
        return FINISHED


class BlockingTask(Operation):
    """A task that dials, in a thread of the node's dialer."""

    __slots__ = ("_progress",)

    def __init__(self, node: Node, task: Callable[[], None]) -> None:
        super().__init__(node.progress.lock)
        self._progress = node.progress
        node.dialer.run_in_thread(partial(self._run, task))

    @property
    def name(self) -> str:
        return "the opening of links"

    def awaited(self) -> AwaitedPeer:
        return AwaitedPeer()

    def cancel(self) -> None:
        """The task continues until its deadline."""
        self._finish(Cancelled(operation=self.name))

    def _run(self, task: Callable[[], None]) -> None:
        try:
            task()
        except DialCancelled:
            self.cancel()
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits
            self._finish(error)
        else:
            self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        with self.lock:
            self.finish(error)
        self._progress.wake()  # a waiting thread may be the sleeping driver


class _LocalOrigin:
    """The `Origin` of messages to oneself: they are complete on arrival, so nothing is requested from it."""

    def __init__(self, rank: Rank) -> None:
        self.rank: Rank | None = rank

    def grant(self, message: Message, into: memoryview) -> None: ...

    def redirect(self, message: Message, into: memoryview | None) -> Redirected:
        return Redirected.UNKNOWN

    def refuse(self, message: Message, reason: str) -> None: ...

    def consumed(self, message: Message) -> None: ...


def checked_timeout(timeout: Any) -> float:
    """Seconds above 0, possibly infinite. Raises UsageError."""
    seconds = real(timeout)
    if seconds is None:
        raise UsageError(f"timeout={timeout!r} is not a number; give a number of seconds above 0")
    if not seconds > 0:
        raise UsageError(f"timeout={timeout!r} leaves no time; give a number of seconds above 0")
    return seconds


def deadline_after(timeout: float) -> float:
    """A time of time.monotonic. `timeout` may be infinite."""
    return time.monotonic() + min(timeout, _LONGEST)
