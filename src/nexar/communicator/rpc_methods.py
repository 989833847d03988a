"""Calling functions of other ranks, and serving functions to them, as methods of a few lines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final, TypeVar, overload

from nexar.collectives.requests import PendingCollective
from nexar.communicator.request import Request
from nexar.communicator.serialization import decode_object, encode_object
from nexar.errors import Cancelled, OperationTimeout, RpcCancelled, RpcTimeout
from nexar.group import Group
from nexar.rpc.caller import CallTarget
from nexar.rpc.registry import function_name
from nexar.rpc.remote_calls import RemoteCalls
from nexar.types import Rank

F = TypeVar("F", bound=Callable[..., Any])


class ObjectValues:
    """Arguments and results are what `send_object` can send."""

    def encode(self, value: object, *, pickle: bool) -> Sequence[memoryview]:
        """See Values."""
        return encode_object(value, pickle=pickle)

    def decode(self, pieces: Sequence[memoryview], *, pickle: bool) -> Any:
        """See Values."""
        return decode_object(pieces, pickle=pickle)


VALUES: Final = ObjectValues()


class Remote:
    """Another rank, as something with methods: those that it serves. `remote.evaluate(3)` calls its `evaluate`."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[str | int, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._call = call

    def call(self, function: str | int, /, *arguments: Any, **named: Any) -> Any:
        """Call a function by any name, or by its id."""
        return self._call(function_name(function), arguments, named)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # the language asks for these, not the user
            raise AttributeError(name)
        return partial(self.call, name)


class CallRequest(Request):
    """A call that was started: its time runs from the start, whoever waits for it and when."""

    __slots__ = ("_begun",)

    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self._begun = monotonic()

    def _waited(self) -> float:
        return monotonic() - self._begun


class RpcCallMethods(ABC):
    """Calls of one rank."""

    _group: Group
    _remote_calls: RemoteCalls

    @abstractmethod
    def _deadline(self, timeout: Any) -> float:
        """See Messaging."""

    @abstractmethod
    def _call(self, work: PendingCollective, timeout: float) -> Any:
        """Wait for it, or let it go on by itself."""

    def on(self, rank: Rank, *, timeout: float | None = None, pickle: bool = False) -> Remote:
        """That rank, to call functions of: `comm.on(1).evaluate(step=3)` runs there what rank 1 registered with
        `comm.serve`, and returns its result. Any name, or an id: `comm.on(1).call("name", …)`.

        `timeout` (default: the setting `rpc_timeout`) is for the call as a whole, on both sides. UnknownFunction,
        RemoteError (with the traceback), RpcTimeout, RpcOverloaded, RpcCancelled, PeerLost: each comes at once.
        Arguments and results are what `send_object` can send; `pickle=True` sends nearly everything, if the function
        was served with it too.
        """
        self._deadline(timeout)  # refused here rather than at the call
        return Remote(partial(self._call_function, rank=self._group.check(rank), timeout=timeout, pickle=pickle))

    def _call_function(
        self, function: str | int, arguments: tuple[Any, ...], named: dict[str, Any],
        *, rank: Rank, timeout: float | None, pickle: bool,
    ) -> Any:  # fmt: skip
        remote_calls = self._remote_calls
        deadline = self._deadline(remote_calls.timeout if timeout is None else timeout)
        seconds = deadline - monotonic()
        target = CallTarget(rank, self._group.membership.members[rank].node, function, seconds, pickle)
        run = remote_calls.caller.call(target, arguments, named, deadline)
        return self._call(PendingCollective(run, None, partial(_ended, target), target.name), seconds)


def _ended(target: CallTarget, error: BaseException | None) -> BaseException | None:
    """As an error of a call, where it is one of a wait."""
    if isinstance(error, OperationTimeout):
        return RpcTimeout(**target.facts, timeout=target.seconds)
    if isinstance(error, Cancelled):
        return RpcCancelled(**target.facts)
    return error


class RpcServeMethods(ABC):
    """Functions of one rank, for the others to call."""

    _remote_calls: RemoteCalls

    @abstractmethod
    def _check_serving(self) -> None:
        """Raise why nobody could call it."""

    @overload
    def serve(
        self, function: F, /, *, name: str | None = ..., id: int | None = ..., pickle: bool = ...
    ) -> F: ...  # fmt: skip
    @overload
    def serve(
        self, function: str | None = ..., /, *, name: str | None = ..., id: int | None = ..., pickle: bool = ...
    ) -> Callable[[F], F]: ...  # fmt: skip
    def serve(
        self, function: Any = None, /, *, name: str | None = None, id: int | None = None, pickle: bool = False  # noqa: A002
    ) -> Any:  # fmt: skip
        """Let the other ranks, and this one, call a function: `@comm.serve`, `@comm.serve("name")`,
        `@comm.serve(name="name", id=7)`, `comm.serve(function)`. Registering a name or an id again replaces what it
        stood for. Returns the function.

        It may be `async def`; any other runs in a thread, at most `rpc_concurrency` of them at once. It may call others
        itself. `pickle=True`: callers may send pickled arguments, which run code of their choice when they are read.

        On a communicator whose members have changed it is the newest after it that serves it. Raises why there is none:
        UsageError on one that is closed, Revoked, Expelled, …
        """
        if function is not None and not isinstance(function, str):
            return self._register(name, id, pickle, function)
        return partial(self._register, name if function is None else function, id, pickle)

    def _register(self, name: str | None, number: int | None, pickle: bool, function: F) -> F:
        self._check_serving()
        self._remote_calls.registry.add(function, name, number, pickle=pickle)
        return function
