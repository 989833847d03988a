"""The remote calls of one communicator, both ways: made here, and served here."""

from __future__ import annotations

from functools import partial
from typing import Final

from nexar.config import Config
from nexar.errors import LinkClosed, NexarError
from nexar.group import Group
from nexar.links.matching import Matching
from nexar.links.router import Notice, NoticeTarget
from nexar.rpc.call_channel import ANSWER, CALL, CallChannel, CallSender, call_channel_id
from nexar.rpc.caller import Caller, ValueCodec
from nexar.rpc.registry import Registry
from nexar.rpc.server import Server
from nexar.types import NodeId
from nexar.wire.control import CommunicatorClosed


class RemoteCalls:
    """Made with its communicator, so that every call finds somebody who answers, if only "no such function here". Costs
    nothing until it is used: threads are made for the first call that comes.

    Ends with its group; `close` waits for its threads. It is the exchange's desk.
    """

    def __init__(self, group: Group, values: ValueCodec, config: Config, registry: Registry | None = None) -> None:
        """`registry`: functions that are served from the start, and shared with whoever has it."""
        self.timeout: Final = config.rpc_timeout
        """Of calls that say none, in seconds."""
        router = group.router
        self._group = group
        self.registry: Final = Registry() if registry is None else registry
        post = CallSender(group, self)
        self.caller: Final = Caller(router.lock, post, values)
        self._server: Final = Server(
            router.lock, router.deferred_io, post, values, self.registry,
            limit=config.rpc_concurrency, name=f"nexar-{group.communicator}",
        )  # fmt: skip
        matching = group.matching
        self._channel: Final = router.open(
            call_channel_id(group.communicator), matching.generation, matching.members, make=partial(CallChannel, self)
        )
        post.channel = self._channel
        router.notices.open(self._channel.communicator, self._channel.generation, self._noticed)
        self._forget: Final = router.tell_of_ends(self._group_ended)
        with router.lock:
            over = group.router.find(group.communicator, matching.generation) is not matching
        if over:  # before we could hear of it
            self._end(_over(group))

    def close(self) -> None:
        """After its group. Idempotent."""
        self._forget()
        self._end(_over(self._group))
        self._server.close()

    def _group_ended(self, matching: Matching, error: NexarError) -> None:
        """See Router.tell_of_ends. Callers are told first, so the exchange ends only after this."""
        if matching is self._group.matching:
            self._server.end(f"the communicator was closed there ({error})")
            self._group.router.deferred_io.add(self._end, error)

    def _noticed(self, speaker: NoticeTarget, notice: Notice) -> None:
        """See Notices.open."""
        if isinstance(notice, CommunicatorClosed):
            with self._group.router.lock:
                self.caller.unheard(speaker.peer, notice.number)

    def _end(self, error: NexarError) -> None:
        self._group.router.notices.close(self._channel.communicator, self._channel.generation)
        self._group.router.close(self._channel, error)
        self._server.tell()
        self._group.progress.wake()  # who waits for a call may lead, and sleep

    # -- Desk: under the node's lock -------------------------------------------------------------------

    def expects(self, source: NodeId, space: int, number: int) -> str | None:
        """See Desk."""
        if space == CALL:
            return self._server.expects(source, number)
        wanted = space == ANSWER and self.caller.expects(source, number)
        return None if wanted else "nobody waits for this answer"

    def took(self, source: NodeId, space: int, number: int, body: memoryview) -> None:
        """See Desk."""
        if space == CALL:
            self._server.called(source, number, body)
        elif space == ANSWER:
            self.caller.answered(source, number, body)

    def missed(self, source: NodeId, space: int, number: int, error: BaseException) -> None:
        """See Desk."""
        (self._server if space == CALL else self.caller).missed(source, number, error)

    def lost(self, source: NodeId, error: NexarError) -> None:
        """See Desk."""
        self.caller.lost(source, error)
        self._server.lost(source)

    def ended(self, error: NexarError) -> None:
        """See Desk."""
        self.caller.end(error)
        self._server.end(str(error))


def _over(group: Group) -> NexarError:
    return LinkClosed(owner=f"the communicator of rank {group.rank}")
