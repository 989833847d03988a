"""The calling side: outstanding calls and their answers."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from copy import copy
from itertools import count
from typing import Any, Final, NamedTuple, Protocol

from nexar.errors import (
    Cancelled,
    LinkClosed,
    NexarError,
    PeerLost,
    PeerMisbehaved,
    RemoteError,
    RpcCancelled,
    RpcOverloaded,
    RpcTimeout,
    UnknownFunction,
    UsageError,
)
from nexar.links.operation import Operation
from nexar.rpc.call_channel import CALL, CallSender
from nexar.types import AwaitedPeer, NodeId, Rank
from nexar.wire.rpc import Body, BodyKind, call, decode, encode
from nexar.wire.text import foreign_lines

_WITHDRAW: Final = encode(Body(BodyKind.WITHDRAW))


class ValueCodec(Protocol):
    """Serialization of arguments and results. A protocol because communicator/, a higher layer, implements it."""

    def encode(self, value: object, *, pickle: bool) -> Sequence[memoryview]:
        """Raises UsageError."""

    def decode(self, pieces: Sequence[memoryview], *, pickle: bool) -> Any:
        """Raises ValueError for invalid bytes, UsageError for an unexpected pickle."""


class CallTarget(NamedTuple):
    """One call's target and options."""

    rank: Rank
    node: NodeId
    function: str | int
    seconds: float  # from the call to its answer
    pickle: bool

    @property
    def facts(self) -> dict[str, Any]:
        return {"rank": self.rank, "function": str(self.function)}

    @property
    def name(self) -> str:
        return f"remote call {self.function} on rank {self.rank}"


class OutstandingCall(Operation):
    """A call in flight. Once done without error, `body` holds the answer."""

    __slots__ = ("_caller", "body", "number", "sent", "target")

    body: memoryview  # set when done

    def __init__(self, caller: Caller, lock: threading.Lock, number: int, target: CallTarget) -> None:
        super().__init__(lock)
        self._caller = caller
        self.number = number
        self.target = target
        self.sent: Operation | None = None  # written by the calling thread

    @property
    def name(self) -> str:
        return self.target.name

    def awaited(self) -> AwaitedPeer:
        return AwaitedPeer(rank=self.target.rank, node=self.target.node, missing="its answer")

    def cancel(self) -> None:
        self._caller.withdraw(self)


class Caller:
    """The calls made by one communicator. Any thread, unless stated otherwise."""

    def __init__(self, lock: threading.Lock, sender: CallSender, values: ValueCodec) -> None:
        """`lock`: the node's."""
        self._lock = lock
        self._sender = sender
        self._values = values
        self._numbers = count(1)  # next() is atomic
        self._pending: dict[int, OutstandingCall] = {}  # under the lock
        self._end_error: NexarError | None = None  # why no call is possible; under the lock

    def call(
        self, target: CallTarget, arguments: Sequence[Any], named: dict[str, Any], deadline: float
    ) -> Generator[Sequence[Operation], None, Any]:
        """Yields operations to wait for and returns the result. Close the generator to give up. Raises UsageError at
        once for arguments that cannot be sent.
        """
        pieces = self._values.encode([list(arguments), named], pickle=target.pickle)
        try:
            row = call(target.function, target.seconds, pieces, pickled=target.pickle)
        except ValueError as error:
            raise UsageError(
                f"the arguments of {target.name} take {error}; pass large arrays with send() and recv()"
            ) from error
        return self._run(target, row, deadline)

    def _run(self, target: CallTarget, row: memoryview, deadline: float) -> Generator[Sequence[Operation], None, Any]:
        pending = self._begin(target)
        try:
            pending.sent = self._send(target, pending.number, row, deadline)
            if not pending.done or pending.error is not None:
                yield (pending,)
        finally:
            pending.cancel()
        return self._result(target, pending.body)

    def _send(self, target: CallTarget, number: int, row: memoryview, deadline: float) -> Operation:
        try:
            return self._sender.send(target.node, CALL, number, row, deadline)
        except (PeerLost, LinkClosed) as error:
            raise _with_target(error, target) from error

    def _begin(self, target: CallTarget) -> OutstandingCall:
        pending = OutstandingCall(self, self._lock, next(self._numbers), target)
        with self._lock:
            if self._end_error is not None:
                raise copy(self._end_error)
            self._pending[pending.number] = pending
        return pending

    def withdraw(self, pending: OutstandingCall) -> None:
        """Never blocks."""
        sent = pending.sent
        with self._lock:
            waited = not pending.done
            if waited:
                self._pending.pop(pending.number, None)
                pending.finish(Cancelled(operation=pending.name))
        if sent is not None:
            if waited:
                self._sender.answer(pending.target.node, CALL, pending.number, _WITHDRAW)
            sent.cancel()

    # -- under the node's lock -------------------------------------------------------------------------

    def expects(self, source: NodeId, number: int) -> bool:
        pending = self._pending.get(number)
        return pending is not None and pending.target.node == source

    def answered(self, source: NodeId, number: int, body: memoryview) -> None:
        if self.expects(source, number):
            pending = self._pending.pop(number)
            pending.body = body
            pending.finish()

    def missed(self, source: NodeId, number: int, error: BaseException) -> None:
        if self.expects(source, number):
            self._pending.pop(number).finish(error)

    def communicator_closed(self, source: NodeId, number: int) -> None:
        if self.expects(source, number):
            pending = self._pending.pop(number)
            pending.finish(RpcCancelled(**pending.target.facts, reason="the communicator is closed there"))

    def lost(self, source: NodeId, error: NexarError) -> None:
        for number, pending in list(self._pending.items()):
            if pending.target.node == source:
                del self._pending[number]
                pending.finish(_with_target(error, pending.target))

    def end(self, error: NexarError) -> None:
        self._end_error = self._end_error or error
        for pending in self._pending.values():
            pending.finish(error)
        self._pending.clear()

    # -- answers ---------------------------------------------------------------------------------------

    def _result(self, target: CallTarget, row: memoryview) -> Any:
        try:
            body = decode(row)
            if body.what == BodyKind.RETURNED:
                return self._values.decode(body.pieces, pickle=target.pickle)
        except UsageError:  # a pickled value that this rank did not allow: not the sender's fault
            raise
        except ValueError as error:
            what = f"its answer to {target.name} cannot be read: {error}"
            raise PeerMisbehaved(rank=target.rank, node=target.node, what=what) from error
        raise _error_of(target, body)


def _error_of(target: CallTarget, body: Body) -> NexarError:
    if body.what == BodyKind.UNKNOWN:
        return UnknownFunction(**target.facts, registered=tuple(foreign_lines(body.text).splitlines()))
    if body.what == BodyKind.OVERLOADED:
        return RpcOverloaded(**target.facts, limit=body.number)
    if body.what == BodyKind.EXPIRED:
        return RpcTimeout(**target.facts, timeout=target.seconds)
    if body.what == BodyKind.CANCELLED:
        return RpcCancelled(**target.facts, reason=foreign_lines(body.text))
    return RemoteError(**target.facts, traceback=foreign_lines(body.text))


def _with_target(error: NexarError, target: CallTarget) -> NexarError:
    # The same loss, with the peer's rank in this communicator and the interrupted call.
    if isinstance(error, PeerLost):
        cause, address = error.cause, error.address
        return PeerLost(rank=target.rank, node=target.node, address=address, cause=cause, operation=target.name)
    if isinstance(error, LinkClosed):
        return LinkClosed(
            rank=target.rank, node=target.node, address=error.address, operation=target.name, owner=error.owner
        )
    return error
