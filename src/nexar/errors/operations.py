"""Errors of one operation."""

from collections.abc import Mapping, Sequence
from typing import Final

from nexar.errors.base import NexarError, facts, list_ranks
from nexar.types import AwaitedPeer, Rank, format_seconds

_SETTINGS: Final = {"barrier": "BARRIER", "checkpoint": "ELASTIC_CHECKPOINT", "grow": "ELASTIC_CHECKPOINT"}
"""The settings that have to do with calls that have one of their own."""


@facts
class Cancelled(NexarError):
    """The operation was cancelled by its owner, or a collective by one of its ranks; the link stays usable."""

    operation: str = "the operation"
    reason: str = ""
    rank: Rank | None = None
    """Who gave it up, if that was not this rank."""

    def _message(self) -> str:
        by = "" if self.rank is None else f" by rank {self.rank}"
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.operation} was cancelled{by}{reason}; its buffers are free again"


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
        setting = _SETTINGS.get(self.operation, "COLLECTIVE")
        return f"timeout=, or NEXAR_{setting}_TIMEOUT_SECS"


@facts
class CollectiveMismatch(NexarError):
    """Ranks of one communicator called different things as their nth collective. The communicator is revoked."""

    expected: str
    """The call on this rank, e.g. `all_reduce of float32[4], sum`."""
    found: str
    ranks: Sequence[Rank]
    """Who made the other call."""
    sequence: int | None = None
    calls: Mapping[Rank, str] | None = None
    """Who called what, so far as is known here."""

    def _message(self) -> str:
        number = "" if self.sequence is None else f" #{self.sequence}"
        return (
            f"collective{number} differs: {self.expected} here, {self._others()}; "
            "every rank must make the same calls in the same order, with the same dtype, count, op, root and algorithm"
        )

    def _others(self) -> str:
        by_call: dict[str, list[Rank]] = {self.found: list(self.ranks)}
        for rank, call in sorted((self.calls or {}).items()):
            if call != self.expected and rank not in by_call.setdefault(call, []):
                by_call[call].append(rank)
        return ", ".join(f"{call} on {list_ranks(ranks)}" for call, ranks in by_call.items())
