"""Errors that mean: the members are no longer who they were."""

from collections.abc import Mapping, Sequence
from typing import Any

from nexar.errors.base import NexarError, facts, list_ranks, quote
from nexar.types import Rank, format_seconds


@facts
class MembershipChanged(NexarError):
    """The members changed. `communicator` is the successor: new rank, new size, next epoch."""

    communicator: Any
    """Stays in this process: None in a copy that was pickled."""
    lost: Mapping[Rank, str]
    """Old rank to cause."""
    joined: Sequence[Rank]
    """New ranks."""
    completed_by_all: int | None
    """Sequence of the last operation that finished everywhere."""

    def _message(self) -> str:
        lost = "; ".join(f"rank {rank}: {quote(cause)}" for rank, cause in self.lost.items()) or "nobody"
        joined = list_ranks(self.joined) if self.joined else "nobody"
        done = "no operation" if self.completed_by_all is None else f"operation #{self.completed_by_all}"
        return (
            f"the membership changed (lost: {lost}; joined: {joined}; finished by all: {done}); "
            "go on with the .communicator of this error"
        )

    def _travelling_facts(self) -> dict[str, Any]:
        return {**self.__dict__, "communicator": None}


@facts
class Expelled(NexarError):
    """The others agreed to go on without this node."""

    epoch: int
    reason: str
    rank: Rank | None = None
    elastic: bool = False
    """This cluster is known to let others in."""

    def _message(self) -> str:
        who = "this node" if self.rank is None else f"this node (rank {self.rank})"
        remedy = "start a new process to join again"
        if not self.elastic:
            remedy = "the others go on without it; a new process can join only where the cluster is elastic (--elastic)"
        return f"{who} was expelled in epoch {self.epoch}: {quote(self.reason)}; {remedy}"


@facts
class Revoked(NexarError):
    """The communicator is over, for every member."""

    communicator: str
    reason: str
    rank: Rank | None = None
    """Who revoked it, or closed it."""
    closed: bool = False
    """Nobody revoked it: that rank has closed it, and takes no part in this call, or in a successor after a loss."""

    def _message(self) -> str:
        if self.closed:
            again = "make a new one with split() or group() of the one it came from"
            return f"communicator {self.communicator} is over: {self.reason}; {again}"
        by = "" if self.rank is None else f" by rank {self.rank}"
        return (
            f"communicator {self.communicator} was revoked{by}: {self.reason}; make a new one with shrink() or split()"
        )


@facts
class NoQuorum(NexarError):
    """No majority of the membership can be reached, so nobody here may go on."""

    alive: Sequence[Rank]
    needed: int
    left: Sequence[Rank] = ()
    """Ranks that ended or closed their communicator, of those that cannot be reached."""

    def _message(self) -> str:
        if self.left:
            return (
                f"{list_ranks(self.left)} left, and {list_ranks(self.alive)} alone cannot go on: a majority needs "
                f"{self.needed}\nno rank may end while another one needs it: let all call comm.barrier() at the end"
            )
        return (
            f"only {list_ranks(self.alive)} can be reached, a majority needs {self.needed}; "
            "the other side may be going on: restart this one, or mend the network"
        )


@facts
class RecoveryTimeout(NexarError, TimeoutError):
    """A majority is there, but it did not agree in time."""

    missing_votes: Sequence[Rank]
    timeout: float

    def _message(self) -> str:
        return (
            f"no agreement on the next membership in {format_seconds(self.timeout)}; no vote from "
            f"{list_ranks(self.missing_votes)}; look there, or raise NEXAR_RECOVERY_TIMEOUT_SECS"
        )
