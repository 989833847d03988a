"""Errors of one operation."""

from collections.abc import Sequence

from nexar.errors.base import NexarError, facts, list_ranks
from nexar.types import AwaitedPeer, Rank, format_seconds


@facts
class Cancelled(NexarError):
    """The operation was cancelled by its owner; the link stays usable."""

    operation: str = "the operation"
    reason: str = ""

    def _message(self) -> str:
        return f"{self.operation} was cancelled{f': {self.reason}' if self.reason else ''}; its buffers are free again"


@facts
class OperationTimeout(NexarError, TimeoutError):
    """An operation did not finish by its deadline. Its buffers are detached; the link stays usable."""

    operation: str
    waiting_for: Sequence[AwaitedPeer] | str
    """Who had not answered; a text where nobody in particular is to blame."""
    timeout: float

    def _message(self) -> str:
        waiting = self.waiting_for
        missing = waiting if isinstance(waiting, str) else "; ".join(str(peer) for peer in waiting)
        return (
            f"{self._called()} did not finish in {format_seconds(self.timeout)}, waiting for {missing}; "
            f"look there first, or allow more time ({self._remedy()})"
        )

    def _called(self) -> str:
        return self.operation

    def _remedy(self) -> str:
        return "timeout="


@facts
class CollectiveTimeout(OperationTimeout):
    """A collective made no progress until its deadline."""

    sequence: int

    def _called(self) -> str:
        return f"{self.operation} #{self.sequence}"

    def _remedy(self) -> str:
        return "NEXAR_BARRIER_TIMEOUT_SECS" if self.operation == "barrier" else "NEXAR_COLLECTIVE_TIMEOUT_SECS"


@facts
class CollectiveMismatch(NexarError):
    """Ranks of one communicator called different things as their nth collective. The communicator is revoked."""

    expected: str
    """The call on this rank, e.g. `all_reduce(sum, float32[4])`."""
    found: str
    ranks: Sequence[Rank]
    """Who made the other call."""
    sequence: int | None = None

    def _message(self) -> str:
        number = "" if self.sequence is None else f" #{self.sequence}"
        return (
            f"collective{number} differs: {self.expected} here, {self.found} on {list_ranks(self.ranks)}; "
            "every rank must make the same calls in the same order, with the same dtype and count"
        )
