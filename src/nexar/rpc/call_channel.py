"""Where remote calls and answers arrive: a matching that asks nobody to post receives.

It has a number of its own beside its communicator's, and so its own flows: calls have their own order and credit, and
never wait behind messages that nobody takes. Whatever arrives goes to the desk at once; of what is only announced the
desk says first whether it wants it, so nothing is held that nobody asked for.

Sends calls and answers to the nodes of one group.
"""

from __future__ import annotations

import logging
from functools import partial
from time import monotonic
from typing import Any, Final, Protocol

from nexar.errors import Cancelled, NexarError
from nexar.group import Group
from nexar.links.matching import Matching
from nexar.links.messages import Message, MessageState, Origin, Receive, key_of
from nexar.links.operation import FINISHED, Operation
from nexar.links.sending import MessageHeader
from nexar.types import NodeId
from nexar.wire.frame import Frame, Space
from nexar.wire.rpc import MAX_BODY_BYTES

_BIT: Final = 1 << 63  # ids of communicators have 63 bits


def call_channel_id(communicator: int) -> int:
    """The number under which the calls of a communicator travel."""
    return communicator | _BIT


class CallHandler(Protocol):
    """Who is told. All of it happens under the node's lock, on the driving thread: I/O goes into the outbox."""

    def expects(self, source: NodeId, space: int, number: int) -> str | None:
        """A large message is announced. None: it is wanted, and `took` or `missed` follows; else why not."""

    def took(self, source: NodeId, space: int, number: int, body: memoryview) -> None:
        """A message has arrived."""

    def missed(self, source: NodeId, space: int, number: int, error: BaseException) -> None:
        """What was announced, and expected, will not come."""

    def lost(self, source: NodeId, error: NexarError) -> None:
        """This node will say no more."""

    def ended(self, error: NexarError) -> None:
        """Nothing comes any more."""


class _AcceptAny(Receive):
    """Takes whatever was announced."""

    __slots__ = ()

    def accepts(self, frame: Frame) -> bool:
        """Its desk has said yes."""
        return True


class CallChannel(Matching):
    """The calls of one generation of one communicator. As for Matching, everything runs under the node's lock."""

    def __init__(self, handler: CallHandler, *facts: Any, **members: Any) -> None:
        """`facts`, `members`: see Matching."""
        super().__init__(*facts, **members)
        self._handler = handler

    def arrive(self, origin: Origin, source: int, frame: Frame, shape: tuple[int, ...], data: memoryview) -> bool:
        """A whole message. It is taken in any case."""
        self._handler.took(source, frame.space, frame.tag, memoryview(bytearray(data)))
        return True

    def announce(self, origin: Origin, source: int, frame: Frame, shape: tuple[int, ...]) -> Message:
        """An envelope."""
        key = key_of(source, frame)
        refusal = f"{frame.length} bytes are too long for a remote call" if frame.length > MAX_BODY_BYTES else None
        refusal = refusal or self._handler.expects(source, frame.space, frame.tag)
        if refusal is not None:
            message = self._register(origin, key, frame, shape)
            self._deferred_io.add(
                self._refuse, message, refusal
            )  # not now: the link has to know it before it can refuse it
            return message
        self._order += 1
        receive = _AcceptAny(self, key, None, 0)
        receive.order = self._order
        self._posted.add(receive)
        receive.when_done(partial(self._landed, receive, source, frame))
        return super().announce(origin, source, frame, shape)

    def _landed(self, receive: Receive, source: NodeId, frame: Frame) -> None:
        if receive.error is None and receive.into is not None:
            self._handler.took(source, frame.space, frame.tag, receive.into)
            return
        error = receive.error or Cancelled(operation=receive.name)
        self._handler.missed(source, frame.space, frame.tag, error)
        message = self._waiting.first(receive.key)
        if message is not None:  # there was no memory for it
            self._deferred_io.add(self._refuse, message, str(error))

    def _refuse(self, message: Message, reason: str) -> None:
        """Without the lock."""
        with self.lock:
            if message.state is not MessageState.FINISHED:
                message.origin.refuse(message, reason)
                self._drop(message)

    def withdraw(self, message: Message) -> None:
        """The sender takes it back. Who was to receive it must not go on waiting: the next one has another number."""
        receive = message.receive
        super().withdraw(message)
        if receive is not None and not receive.done and receive.message is None:
            self._posted.remove(receive)
            receive.finish(Cancelled(operation=receive.name, reason="its sender took it back"))

    def lose(self, source: int, error: NexarError) -> None:
        """See Matching."""
        super().lose(source, error)
        if self.admits(source):
            self._handler.lost(source, error)

    def close(self, error: NexarError) -> None:
        """See Matching."""
        super().close(error)
        self._handler.ended(error)


CALL: Final = int(Space.CALL)
ANSWER: Final = int(Space.ANSWER)

_log = logging.getLogger(__name__)


class CallSender:
    """Of one communicator. Any thread, not under the node's lock."""

    def __init__(self, group: Group, handler: CallHandler) -> None:
        self._group = group
        self._handler = handler
        self._communicator: Final = call_channel_id(group.communicator)
        self.channel: Matching | None = None
        """Where the group's calls meet: what is sent when that is over passes for nobody else's. Written once, before
        anybody calls."""

    def send(self, node: NodeId, space: int, number: int, row: memoryview, deadline: float) -> Operation:
        """Opens the link if there is none yet, until the deadline. A long row is used until it is sent: leave it alone.

        Raises why it cannot be sent.
        """
        group = self._group
        if node != group.node.id:
            link = group.mesh.link(node, deadline)
            about = MessageHeader(space=space, tag=number)
            return link.post_send(self._communicator, row, about=about, matching=self.channel)
        group.progress.check()
        with group.router.lock:
            self._handler.took(node, space, number, memoryview(bytearray(row)))  # its own copy, as on every other way
        group.router.deferred_io.flush()
        group.progress.wake()  # who waits for it may lead, and sleep: nothing else would wake it
        return FINISHED

    def leave(self) -> None:
        """A function has ended. If it has waited for something of ours it led, and leads no more: somebody has to look
        for the next call before the progress thread would by itself.
        """
        self._group.progress.leave_behind()

    def answer(self, node: NodeId, space: int, number: int, row: memoryview) -> None:
        """To somebody who has a link to us, or had one: then nobody waits for it any more. Never blocks."""
        try:
            self.send(node, space, number, row, monotonic())
        except NexarError as error:
            _log.debug("nobody is there any more to hear about call %d: %s", number, error)
