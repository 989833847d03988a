"""Errors on the way in."""

from collections.abc import Mapping, Sequence

from nexar.errors.base import NexarError, facts, fitted, headed
from nexar.types import format_seconds


@facts
class JoinRefused(NexarError, ConnectionError):
    """The seed answered, and said no."""

    reason: str
    address: str | None = None
    expelled: int = 0
    """This node was a member until this epoch, when the others went on without it; 0: that is not the reason."""
    nobody_left: bool = False
    """Every member has left or died: nobody is left who could let this node in."""

    def _message(self) -> str:
        return headed(f"the seed{f' at {self.address}' if self.address else ''} refused this node", self.reason)


@facts
class SeedUnreachable(NexarError, ConnectionError):
    """Nobody answered at any address of the seed, or somebody did who is not the seed."""

    addresses: Sequence[str]
    attempts: int
    cause: str
    timeout: float | None = None
    """All of it has passed; None: waiting longer would have changed nothing."""
    remedy: str = (
        "check that the seed runs, advertises this address (NEXAR_ADVERTISE) and has its port open for UDP and TCP"
    )
    answered: str = ""
    """Where a seed answered that does not know the credential; empty: none did."""
    credential: str = "ticket"
    """What this node has: `ticket` or `token`."""

    def _message(self) -> str:
        if self.answered:
            first = f"a seed answered at {self.answered}, but it does not know this {self.credential}"
            return f"{first}\n{self.cause}\n{self.remedy}"
        span = "" if self.timeout is None else f" in {format_seconds(self.timeout)}"
        tried = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        addresses = ", ".join(self.addresses) or "any address"
        return fitted(
            f"no seed at {addresses} after {tried}{span} (last: {self.cause}); {self.remedy}",
            fitted(f"no seed at {addresses} after {tried}{span}", f"no seed after {tried}{span}", f"at {addresses}"),
            f"last: {self.cause}",
            self.remedy,
        )


@facts
class FormationTimeout(NexarError, TimeoutError):
    """The cluster did not form in time, or it cannot form; then `reason` says why. Raised on every rank."""

    joined: Sequence[str]
    """Who came, as text."""
    expected: int
    refused: Mapping[str, str]
    """Who was turned away, and why."""
    timeout: float
    reason: str = ""
    """What made it fail; empty: the time was up."""

    def _message(self) -> str:
        refused = "; ".join(f"{who}: {why}" for who, why in self.refused.items()) or "nobody"
        facts = (
            f"{len(self.joined)} of {self.expected} nodes joined in {format_seconds(self.timeout)}\n"
            f"joined: {', '.join(self.joined) or 'nobody'}; refused: {refused}"
        )
        if self.reason:
            return f"{headed('the cluster did not form', self.reason)}\n{facts}"
        return f"{facts}\nstart the missing ones or raise NEXAR_FORMATION_TIMEOUT_SECS"
