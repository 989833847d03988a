"""Outcomes of generations as exceptions, and exceptions of builds as failures."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from nexar.cluster.decisions.successor_events import (
    BuildFailure,
    BuildFailureKind,
    Outcome,
    QuorumLost,
    RecoveryTimedOut,
    RevokedBy,
    Superseded,
    Terminated,
    TerminationKind,
)
from nexar.cluster.membership import Membership
from nexar.communicator.generation import Generation
from nexar.config import Config
from nexar.errors import (
    Expelled,
    LinkClosed,
    MembershipChanged,
    NexarError,
    NoQuorum,
    OperationTimeout,
    PeerError,
    PeerLost,
    RecoveryTimeout,
    Revoked,
    UsageError,
)
from nexar.links.progress import NODE_CLOSED
from nexar.types import NodeId, Rank

if TYPE_CHECKING:
    from nexar.communicator.communicator import Communicator  # which imports this module

_ABORTED: Final = "the policy is abort, so no rank continues; start the job again"


class LocalRank(NamedTuple):
    """This node in one communicator."""

    rank: Rank
    membership: Membership


def error_of(
    outcome: Outcome, generation: Generation, config: Config, *, successor: Communicator | None = None
) -> NexarError:
    """Return the error that calls on this generation raise. `successor`: its next communicator, if superseded."""
    match outcome:
        case Superseded():
            return _superseded(outcome, generation, config, successor)
        case QuorumLost(alive, needed, left):
            return NoQuorum(alive=list(alive), needed=needed, left=list(left))
        case RecoveryTimedOut(missing):
            return RecoveryTimeout(missing_votes=missing, timeout=config.recovery_timeout)
        case RevokedBy(rank, reason, closed):
            return Revoked(communicator=str(generation.communicator), reason=reason, rank=rank, closed=closed)
        case Terminated():
            return termination_error(outcome, LocalRank(generation.group.rank, generation.membership), config)


def termination_error(cause: Terminated, place: LocalRank, config: Config) -> NexarError:
    """Return the error of calls after this node ended all communicators."""
    match cause.kind:
        case TerminationKind.EXPELLED:
            elastic = config.elastic_enabled
            return Expelled(epoch=cause.epoch, reason=cause.reason, rank=place.rank, elastic=elastic)
        case TerminationKind.ABORTED:
            rank = place.membership.rank_of(cause.node)
            return PeerLost(rank=rank, node=cause.node, cause=cause.reason, remedy=_ABORTED)
        case TerminationKind.NOT_STARTED:
            return build_overtaken()  # `init()` raises why
        case TerminationKind.CLOSED:
            return UsageError(NODE_CLOSED)


def _superseded(
    outcome: Superseded, generation: Generation, config: Config, successor: Communicator | None
) -> NexarError:
    if config.recovery_policy != "manual":
        return MembershipChanged(
            communicator=successor, lost=dict(outcome.lost), joined=outcome.joined, completed_by_all=outcome.completed
        )
    rank = next(iter(outcome.lost), None)
    return PeerLost(
        rank=rank,
        node=None if rank is None else generation.membership.members[rank].node,
        cause="its link was lost" if rank is None else outcome.lost[rank],
        remedy="the others continued: comm.shrink() gives the next communicator",
    )


def build_overtaken() -> LinkClosed:
    """Return the error of a build overtaken by a change."""
    return LinkClosed(owner="the communicator that was being made")


def error_of_failure(failure: BuildFailure, membership: Membership) -> NexarError:
    """Return the error of an aborted or rejected build."""
    if failure.kind is not BuildFailureKind.PEER_LOST:
        return build_overtaken()
    node = failure.nodes[0]
    return PeerLost(rank=membership.rank_of(node), node=node, cause=failure.cause)


def failure_of(error: BaseException) -> BuildFailure:
    """Return why a build failed, and the members that it missed."""
    match error:
        case PeerLost(node=int(node)):
            return BuildFailure(BuildFailureKind.PEER_LOST, (node,), error.cause)
        case LinkClosed():
            return BuildFailure(BuildFailureKind.OVERTAKEN)
        case OperationTimeout():
            peers = () if isinstance(error.waiting_for, str) else error.waiting_for
            return BuildFailure(BuildFailureKind.TIMED_OUT, tuple(each.node for each in peers if each.node is not None))
        case PeerError(node=int(node)):
            return BuildFailure(BuildFailureKind.FAULT, (node,))
    return BuildFailure(BuildFailureKind.FAULT)


def in_ranks_of(generation: Generation, error: BaseException) -> BaseException:
    """Return the error with the rank that its node has in this generation: a link knows only the rank in the world."""
    if not isinstance(error, PeerError | LinkClosed) or error.node not in generation.nodes:
        return error
    rank = generation.membership.rank_of(error.node)
    return error if error.rank == rank else replace(error, rank=rank)


def member_of(generation: Generation, error: BaseException) -> NodeId | None:
    """Return the member that the error names as lost, or None. LinkClosed means that it left the world: nothing else
    closes links of open communicators.
    """
    if not isinstance(error, (PeerLost, LinkClosed)):
        return None
    node = error.node
    if node is None and error.rank is not None and error.rank < generation.group.size:
        node = generation.membership.members[error.rank].node
    return node if node in generation.nodes else None
