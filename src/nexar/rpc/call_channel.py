"""The channel of remote calls and answers: a matching without posted receives, and its sender.

It has its own id, hence its own order and credit: calls never wait behind messages that no rank receives. A large
message is transferred only if the handler wants it.
"""

from __future__ import annotations

import logging
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from nexar.errors import Cancelled, NexarError
from nexar.group import Group
from nexar.links.matching import Matching
from nexar.links.messages import Message, MessageState, Origin, Receive, key_of
from nexar.links.operation import FINISHED, Operation
from nexar.links.sending import MessageHeader
from nexar.types import NodeId
from nexar.wire.frame import Frame, Space
from nexar.wire.rpc import MAX_BODY_BYTES

if TYPE_CHECKING:
    from nexar.rpc.remote_calls import RemoteCalls

_BIT: Final = 1 << 63  # communicator ids have 63 bits


def call_channel_id(communicator: int) -> int:
    """Channel id of a communicator's calls."""
    return communicator | _BIT


class _AcceptAny(Receive):
    __slots__ = ()

    def accepts(self, frame: Frame) -> bool:
        return True


class CallChannel(Matching):
    """Every method runs under the node's lock."""

    def __init__(self, handler: RemoteCalls, *facts: Any, **members: Any) -> None:
        super().__init__(*facts, **members)
        self._handler = handler

    def arrive(self, origin: Origin, source: int, frame: Frame, shape: tuple[int, ...], data: memoryview) -> bool:
        self._handler.took(source, frame.space, frame.tag, memoryview(bytearray(data)))
        return True

    def announce(self, origin: Origin, source: int, frame: Frame, shape: tuple[int, ...]) -> Message:
        key = key_of(source, frame)
        refusal = f"{frame.length} bytes are too long for a remote call" if frame.length > MAX_BODY_BYTES else None
        refusal = refusal or self._handler.expects(source, frame.space, frame.tag)
        if refusal is not None:
            message = self._register(origin, key, frame, shape)
            self._deferred_io.add(
                self._refuse, message, refusal
            )  # deferred: the link must know the message before it can refuse it
            return message
        self._order += 1
        receive = _AcceptAny(self, key, None, 0)
        receive.order = self._order
        self._posted.add(receive)
        receive.when_done(partial(self._receive_done, receive, source, frame))
        return super().announce(origin, source, frame, shape)

    def _receive_done(self, receive: Receive, source: NodeId, frame: Frame) -> None:
        if receive.error is None and receive.into is not None:
            self._handler.took(source, frame.space, frame.tag, receive.into)
            return
        error = receive.error or Cancelled(operation=receive.name)
        self._handler.missed(source, frame.space, frame.tag, error)
        message = self._waiting.first(receive.key)
        if message is not None:  # there was no memory for it
            self._deferred_io.add(self._refuse, message, str(error))

    def _refuse(self, message: Message, reason: str) -> None:
        # Call without the lock.
        with self.lock:
            if message.state is not MessageState.FINISHED:
                message.origin.refuse(message, reason)
                self._drop(message)

    def withdraw(self, message: Message) -> None:
        """The receive must end, since the next message has another number."""
        receive = message.receive
        super().withdraw(message)
        if receive is not None and not receive.done and receive.message is None:
            self._posted.remove(receive)
            receive.finish(Cancelled(operation=receive.name, reason="its sender cancelled it"))

    def lose(self, source: int, error: NexarError) -> None:
        super().lose(source, error)
        if self.admits(source):
            self._handler.lost(source, error)

    def close(self, error: NexarError) -> None:
        super().close(error)
        self._handler.ended(error)


CALL: Final = int(Space.CALL)
ANSWER: Final = int(Space.ANSWER)

_log = logging.getLogger(__name__)


class CallSender:
    """Sends calls and answers. Any thread; not under the node's lock."""

    def __init__(self, group: Group, handler: RemoteCalls) -> None:
        self._group = group
        self._handler = handler
        self._communicator: Final = call_channel_id(group.communicator)
        # Written once, before the first call. A send after its end then belongs to no other channel.
        self.channel: Matching | None = None

    def send(self, node: NodeId, space: int, number: int, row: memoryview, deadline: float) -> Operation:
        """Opens the link if needed, until the deadline. Do not change a long row until it is sent."""
        group = self._group
        if node != group.node.id:
            link = group.mesh.link(node, deadline)
            about = MessageHeader(space=space, tag=number)
            return link.post_send(self._communicator, row, about=about, matching=self.channel)
        group.progress.check()
        with group.router.lock:
            self._handler.took(node, space, number, memoryview(bytearray(row)))  # a copy, as over every link
        group.router.deferred_io.flush()
        group.progress.wake()  # the waiting thread may be the sleeping driver: nothing else would wake it
        return FINISHED

    def function_ended(self) -> None:
        """If the function's thread was the driver, another thread must look for the next call before the progress
        thread would.
        """
        self._group.progress.drive_in_background()

    def answer(self, node: NodeId, space: int, number: int, row: memoryview) -> None:
        """Without a link the caller is gone. Never blocks."""
        try:
            self.send(node, space, number, row, monotonic())
        except NexarError as error:
            _log.debug("the caller of call %d is gone: %s", number, error)
