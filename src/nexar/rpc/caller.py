"""The calling side: calls that wait for their answers, and what becomes of an answer."""

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
from nexar.rpc.exchange import CALL
from nexar.rpc.post import Post
from nexar.transport.foreign_text import several_lines
from nexar.types import AwaitedPeer, NodeId, Rank
from nexar.wire.calls import Body, What, call, decode, encode

_WITHDRAW: Final = encode(Body(What.WITHDRAW))


class Values(Protocol):
    """How arguments and results become bytes."""

    def encode(self, value: object, *, pickle: bool) -> Sequence[memoryview]:
        """UsageError for what cannot be sent."""

    def decode(self, pieces: Sequence[memoryview], *, pickle: bool) -> Any:
        """ValueError for what is no value, UsageError for a pickled one where `pickle` is False."""


class Whom(NamedTuple):
    """Whom a call is for, and how it is made."""

    rank: Rank
    node: NodeId
    function: str | int
    seconds: float
    """From the call to its answer."""
    pickle: bool

    @property
    def facts(self) -> dict[str, Any]:
        """Of every error of the call."""
        return {"rank": self.rank, "function": str(self.function)}

    @property
    def name(self) -> str:
        """As errors call it."""
        return f"remote call {self.function} on rank {self.rank}"


class Pending(Operation):
    """A call without an answer yet. Once it is done without error, `body` holds what came."""

    __slots__ = ("_caller", "body", "number", "sent", "whom")

    body: memoryview
    """Set when it is done."""

    def __init__(self, caller: Caller, lock: threading.Lock, number: int, whom: Whom) -> None:
        super().__init__(lock)
        self._caller = caller
        self.number = number
        self.whom = whom
        self.sent: Operation | None = None  # written by who makes the call

    @property
    def name(self) -> str:
        """As errors call it."""
        return self.whom.name

    def awaited(self) -> AwaitedPeer:
        """Who was called."""
        return AwaitedPeer(rank=self.whom.rank, node=self.whom.node, missing="its answer")

    def cancel(self) -> None:
        """Whatever comes is dropped; and who runs the function is told that nobody waits for it."""
        self._caller.withdraw(self)


class Caller:
    """Of one communicator. Any thread, but for what says otherwise."""

    def __init__(self, lock: threading.Lock, post: Post, values: Values) -> None:
        """`lock`: the node's."""
        self._lock = lock
        self._post = post
        self._values = values
        self._numbers = count(1)  # next() is atomic
        self._pending: dict[int, Pending] = {}  # under the lock
        self._over: NexarError | None = None  # why nothing can be called any more; under the lock

    def call(
        self, whom: Whom, arguments: Sequence[Any], named: dict[str, Any], deadline: float
    ) -> Generator[Sequence[Operation], None, Any]:
        """What yields the operations that it waits for, and returns the function's result. Close it to give up.

        UsageError now for arguments that cannot be sent.
        """
        pieces = self._values.encode([list(arguments), named], pickle=whom.pickle)
        try:
            row = call(whom.function, whom.seconds, pieces, pickled=whom.pickle)
        except ValueError as error:
            raise UsageError(
                f"the arguments of {whom.name} take {error}; pass large arrays with send() and recv()"
            ) from error
        return self._run(whom, row, deadline)

    def _run(self, whom: Whom, row: memoryview, deadline: float) -> Generator[Sequence[Operation], None, Any]:
        pending = self._begin(whom)
        try:
            pending.sent = self._send(whom, pending.number, row, deadline)
            if not pending.done or pending.error is not None:
                yield (pending,)
        finally:
            pending.cancel()
        return self._result(whom, pending.body)

    def _send(self, whom: Whom, number: int, row: memoryview, deadline: float) -> Operation:
        try:
            return self._post.send(whom.node, CALL, number, row, deadline)
        except (PeerLost, LinkClosed) as error:
            raise _blamed(error, whom) from error

    def _begin(self, whom: Whom) -> Pending:
        pending = Pending(self, self._lock, next(self._numbers), whom)
        with self._lock:
            if self._over is not None:
                raise copy(self._over)
            self._pending[pending.number] = pending
        return pending

    def withdraw(self, pending: Pending) -> None:
        """See Pending.cancel. Never blocks."""
        sent = pending.sent
        with self._lock:
            waited = not pending.done
            if waited:
                self._pending.pop(pending.number, None)
                pending.finish(Cancelled(operation=pending.name))
        if sent is not None:
            if waited:
                self._post.answer(pending.whom.node, CALL, pending.number, _WITHDRAW)
            sent.cancel()

    # -- under the node's lock -------------------------------------------------------------------------

    def expects(self, source: NodeId, number: int) -> bool:
        """Is an answer with this number waited for, from there?"""
        pending = self._pending.get(number)
        return pending is not None and pending.whom.node == source

    def answered(self, source: NodeId, number: int, body: memoryview) -> None:
        """One that nobody waits for is dropped."""
        if self.expects(source, number):
            pending = self._pending.pop(number)
            pending.body = body
            pending.finish()

    def missed(self, source: NodeId, number: int, error: BaseException) -> None:
        """The answer was announced, and did not come."""
        if self.expects(source, number):
            self._pending.pop(number).finish(error)

    def unheard(self, source: NodeId, number: int) -> None:
        """The communicator was closed there before the call came."""
        if self.expects(source, number):
            pending = self._pending.pop(number)
            pending.finish(RpcCancelled(**pending.whom.facts, reason="the communicator is closed there"))

    def lost(self, source: NodeId, error: NexarError) -> None:
        """No answer comes from there any more."""
        for number, pending in list(self._pending.items()):
            if pending.whom.node == source:
                del self._pending[number]
                pending.finish(_blamed(error, pending.whom))

    def end(self, error: NexarError) -> None:
        """No answer comes from anywhere any more."""
        self._over = self._over or error
        for pending in self._pending.values():
            pending.finish(error)
        self._pending.clear()

    # -- answers ---------------------------------------------------------------------------------------

    def _result(self, whom: Whom, row: memoryview) -> Any:
        try:
            body = decode(row)
            if body.what == What.RETURNED:
                return self._values.decode(body.pieces, pickle=whom.pickle)
        except UsageError:  # a pickled value that this rank did not ask for: no fault of the sender
            raise
        except ValueError as error:
            what = f"its answer to {whom.name} cannot be read: {error}"
            raise PeerMisbehaved(rank=whom.rank, node=whom.node, what=what) from error
        raise _error_of(whom, body)


def _error_of(whom: Whom, body: Body) -> NexarError:
    if body.what == What.UNKNOWN:
        return UnknownFunction(**whom.facts, registered=tuple(several_lines(body.text).splitlines()))
    if body.what == What.OVERLOADED:
        return RpcOverloaded(**whom.facts, limit=body.number)
    if body.what == What.EXPIRED:
        return RpcTimeout(**whom.facts, timeout=whom.seconds)
    if body.what == What.CANCELLED:
        return RpcCancelled(**whom.facts, reason=several_lines(body.text))
    return RemoteError(**whom.facts, traceback=several_lines(body.text))


def _blamed(error: NexarError, whom: Whom) -> NexarError:
    """The same loss, with the rank that the peer has here, and what it interrupted."""
    if isinstance(error, PeerLost):
        cause, address = error.cause, error.address
        return PeerLost(rank=whom.rank, node=whom.node, address=address, cause=cause, operation=whom.name)
    if isinstance(error, LinkClosed):
        return LinkClosed(rank=whom.rank, node=whom.node, address=error.address, operation=whom.name, owner=error.owner)
    return error
