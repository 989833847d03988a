"""The communicator's methods for remote procedure calls."""

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
    """Encodes arguments and results as `send_object` does."""

    def encode(self, value: object, *, pickle: bool) -> Sequence[memoryview]:
        return encode_object(value, pickle=pickle)

    def decode(self, pieces: Sequence[memoryview], *, pickle: bool) -> Any:
        return decode_object(pieces, pickle=pickle)


VALUES: Final = ObjectValues()


class Remote:
    """Another rank, with its served functions as methods: `remote.evaluate(3)`."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[str | int, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._call = call

    def call(self, function: str | int, /, *arguments: Any, **named: Any) -> Any:
        """Call a function by name or id."""
        return self._call(function_name(function), arguments, named)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # looked up by Python, not by the user
            raise AttributeError(name)
        return partial(self.call, name)


class CallRequest(Request):
    """A started remote call. Its timeout runs from the start."""

    __slots__ = ("_begun",)

    def __init__(self, *facts: Any) -> None:
        super().__init__(*facts)
        self._begun = monotonic()

    def _waited(self) -> float:
        return monotonic() - self._begun


class RpcCallMethods(ABC):
    """Calls of functions that other ranks serve."""

    _group: Group
    _remote_calls: RemoteCalls

    @abstractmethod
    def _deadline(self, timeout: Any) -> float: ...

    @abstractmethod
    def _call(self, work: PendingCollective, timeout: float) -> Any:
        """Wait for the call, or let it run in the background."""

    def on(self, rank: Rank, *, timeout: float | None = None, pickle: bool = False) -> Remote:
        """Return a proxy for a rank: `comm.on(1).evaluate(step=3)` calls the function that rank 1 registered with
        `comm.serve` and returns its result. `comm.on(1).call("name", …)` takes any name or id.

        `timeout` covers the whole call, on both sides; default: the setting `rpc_timeout`. Arguments and results: any
        value that `send_object` can send; with `pickle=True`, here and in `serve`, nearly any value. A call raises
        UnknownFunction, RemoteError (with the remote traceback), RpcTimeout, RpcOverloaded, RpcCancelled or PeerLost.
        """
        self._deadline(timeout)  # fail here, not at the call
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
    if isinstance(error, OperationTimeout):
        return RpcTimeout(**target.facts, timeout=target.seconds)
    if isinstance(error, Cancelled):
        return RpcCancelled(**target.facts)
    return error


class RpcServeMethods(ABC):
    """Functions that this rank serves."""

    _remote_calls: RemoteCalls

    @abstractmethod
    def _check_serving(self) -> None:
        """Raise the reason why functions cannot be served."""

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
        """Register a function that all ranks can call; return it. Forms: `@comm.serve`, `@comm.serve("name")`,
        `@comm.serve(name="name", id=7)`, `comm.serve(function)`. Replaces an earlier function of that name or id.

        The function may be `async def`; others run in threads, at most `rpc_concurrency` at once. It may make remote
        calls. `pickle=True` accepts pickled arguments: reading them runs code that the caller chose.

        The newest successor serves it. If that is closed, this raises UsageError; if it ended, its error (Revoked,
        Expelled, …).
        """
        if function is not None and not isinstance(function, str):
            return self._register(name, id, pickle, function)
        return partial(self._register, name if function is None else function, id, pickle)

    def _register(self, name: str | None, number: int | None, pickle: bool, function: F) -> F:
        self._check_serving()
        self._remote_calls.registry.add(function, name, number, pickle=pickle)
        return function
