"""Errors of a remote call, raised at the caller."""

from collections.abc import Sequence

from nexar.errors.base import NexarError, facts, quote
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

    registered: Sequence[str] = ()
    """What it does serve; an id stands behind its name."""

    def _message(self) -> str:
        from difflib import get_close_matches  # noqa: PLC0415 - only who mistypes a name pays for it

        close = get_close_matches(self.function, [each.partition(" (id ")[0] for each in self.registered], n=3)
        meant = f" (did you mean {' or '.join(close)}?)" if close else ""
        there = f"rank {self.rank} serves {', '.join(self.registered) or 'nothing'}"
        return f"{self._call}: no such function there{meant}; {there}; register it with @comm.serve before calling"


@facts
class RemoteError(RpcError):
    """The function ran and raised."""

    traceback: str

    def _message(self) -> str:
        return quote(f"{self._call} raised; its traceback:\n{self.traceback}")


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

    reason: str = ""

    def _message(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"{self._call} was cancelled{reason}; it may have run"
