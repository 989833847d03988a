"""The remote calls of one communicator: those it makes and those it serves."""

from __future__ import annotations

from functools import partial
from typing import Final

from nexar.config import Config
from nexar.errors import LinkClosed, NexarError
from nexar.group import Group
from nexar.links.link import Link
from nexar.links.matching import Matching
from nexar.links.router import Notice
from nexar.rpc.call_channel import ANSWER, CALL, CallChannel, CallSender, call_channel_id
from nexar.rpc.caller import Caller, ValueCodec
from nexar.rpc.registry import Registry
from nexar.rpc.server import Server
from nexar.types import NodeId
from nexar.wire.control import CommunicatorClosed


class RemoteCalls:
    """Created with its communicator, so that every call is answered, at least with "unknown function". Starts no thread
    before the first call. Ends with its group; `close` waits for its threads.
    """

    def __init__(self, group: Group, values: ValueCodec, config: Config, registry: Registry | None = None) -> None:
        """`registry`: may be shared."""
        self.timeout: Final = config.rpc_timeout  # default timeout of calls, in seconds
        router = group.router
        self._group = group
        self.registry: Final = Registry() if registry is None else registry
        sender = CallSender(group, self)
        self.caller: Final = Caller(router.lock, sender, values)
        self._server: Final = Server(
            router.lock, router.deferred_io, sender, values, self.registry,
            limit=config.rpc_concurrency, name=f"nexar-{group.communicator}",
        )  # fmt: skip
        matching = group.matching
        # A change may replace the generation before its communicator is made.
        self._channel: Final = router.open(
            call_channel_id(group.communicator), matching.generation, matching.members, make=partial(CallChannel, self),
            may_be_over=True,
        )  # fmt: skip
        sender.channel = self._channel
        router.notices.open(self._channel.communicator, self._channel.generation, self._noticed)
        self._unsubscribe: Final = router.on_generation_end(self._group_ended)
        with router.lock:
            ended = group.router.find(group.communicator, matching.generation) is not matching
        if ended:  # it ended before we were subscribed
            self._end(_closed_error(group))

    def close(self) -> None:
        """Call after the group is closed. Idempotent."""
        self._unsubscribe()
        self._end(_closed_error(self._group))
        self._server.close()

    def _group_ended(self, matching: Matching, error: NexarError) -> None:
        # Callers are answered first, so the channel ends only after this.
        if matching is self._group.matching:
            self._server.end(f"the communicator was closed there ({error})")
            self._group.router.deferred_io.add(self._end, error)

    def _noticed(self, source: Link, notice: Notice) -> None:
        if isinstance(notice, CommunicatorClosed):
            with self._group.router.lock:
                self.caller.communicator_closed(source.peer, notice.number)

    def _end(self, error: NexarError) -> None:
        self._group.router.notices.close(self._channel.communicator, self._channel.generation)
        self._group.router.close(self._channel, error)
        self._server.stop()
        self._group.progress.wake()  # a thread that waits for a call may be the sleeping driver

    # -- called by the channel under the node's lock, by the driver: I/O goes into DeferredIO -------------

    def expects(self, source: NodeId, space: int, number: int) -> str | None:
        """A large message is announced. None: `took` or `missed` follows; otherwise why it is refused."""
        if space == CALL:
            return self._server.expects(source, number)
        wanted = space == ANSWER and self.caller.expects(source, number)
        return None if wanted else "no call waits for this answer"

    def took(self, source: NodeId, space: int, number: int, body: memoryview) -> None:
        if space == CALL:
            self._server.called(source, number, body)
        elif space == ANSWER:
            self.caller.answered(source, number, body)

    def missed(self, source: NodeId, space: int, number: int, error: BaseException) -> None:
        """An announced message will not come."""
        (self._server if space == CALL else self.caller).missed(source, number, error)

    def lost(self, source: NodeId, error: NexarError) -> None:
        """Nothing more arrives from this node."""
        self.caller.lost(source, error)
        self._server.lost(source)

    def ended(self, error: NexarError) -> None:
        self.caller.end(error)
        self._server.end(str(error))


def _closed_error(group: Group) -> NexarError:
    return LinkClosed(owner=f"the communicator of rank {group.rank}")
