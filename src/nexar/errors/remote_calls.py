"""Errors of a remote call, raised at the caller."""

from nexar.errors.base import NexarError, facts
from nexar.types import Rank, format_seconds


@facts
class RpcError(NexarError):
    """A remote call did not return a value."""

    rank: Rank
    function: str

    def _message(self) -> str:
        return f"{self._call} failed; see the log of rank {self.rank}"

    @property
    def _call(self) -> str:
        return f"remote call {self.function} on rank {self.rank}"


@facts
class UnknownFunction(RpcError):
    """The peer serves no function of that name."""

    def _message(self) -> str:
        return f"{self._call}: no such function there; register it with @comm.serve before calling"


@facts
class RemoteError(RpcError):
    """The function ran and raised."""

    traceback: str

    def _message(self) -> str:
        return f"{self._call} raised; its traceback:\n{self.traceback.rstrip()}"


@facts
class RpcTimeout(RpcError, TimeoutError):
    """No answer by the call's deadline; the function may have run."""

    timeout: float

    def _message(self) -> str:
        return (
            f"{self._call} gave no answer in {format_seconds(self.timeout)}; it may have run; allow more with timeout="
        )


@facts
class RpcOverloaded(RpcError):
    """The peer already runs as many calls as it allows; the function did not run."""

    limit: int

    def _message(self) -> str:
        return f"{self._call} was turned away: {self.limit} calls run there; try later, or raise NEXAR_RPC_CONCURRENCY"


@facts
class RpcCancelled(RpcError):
    """The call was cancelled before it answered."""

    def _message(self) -> str:
        return f"{self._call} was cancelled; it may have run"
