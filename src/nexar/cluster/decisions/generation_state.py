"""What SuccessorMachine knows of one generation or build, and the rules about a single one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nexar.cluster.decisions.change_history import ClosedCommunicator
from nexar.cluster.decisions.membership_events import NoProgress
from nexar.cluster.decisions.successor_events import (
    AbortBuild,
    BuildFailure,
    BuildId,
    GenerationKey,
    Interrupt,
    Outcome,
    QuorumLost,
    RecoveryTimedOut,
    RevokedBy,
    SetOutcome,
    SuccessorAction,
    Superseded,
    Terminated,
)
from nexar.cluster.membership import Change, Membership
from nexar.types import NodeId, Rank


class FailedBuild(NamedTuple):
    """The last build of a successor."""

    epoch: int  # of the target, which determines its members
    until: float | None  # when it is given up; None: it is given up
    missing: tuple[NodeId, ...] = ()


@dataclass(slots=True)
class OpenedGeneration:
    """A generation without a successor that this node's user has not closed."""

    key: GenerationKey
    membership: Membership
    nodes: frozenset[NodeId]
    ancestors: tuple[GenerationKey, ...]  # newest first; released ones included
    target: Membership | None  # the next generation, if a change concerns this one
    interrupted: bool = False
    outcome: Outcome | None = None
    closed_by: set[NodeId] = field(default_factory=set)  # members whose users closed it
    failed: FailedBuild | None = None  # the last build of its successor, if it failed
    build: BuildId | None = None  # of its successor

    @property
    def gives_up_at(self) -> float | None:
        """When the current target is given up; None if it has not failed, or is given up already."""
        if self.build is not None or self.failed is None or not self._is_current(self.failed):
            return None
        return self.failed.until

    @property
    def is_given_up(self) -> bool:
        return self.failed is not None and self.failed.until is None and self._is_current(self.failed)

    def _is_current(self, failed: FailedBuild) -> bool:
        return self.target is not None and failed.epoch == self.target.epoch


@dataclass(slots=True)
class SupersededGeneration:
    """A generation with a successor, and what happened on the way to the newest one."""

    membership: Membership
    completed: int | None
    lost: dict[Rank, str] = field(default_factory=dict)
    agreed: bool = True  # so far every departure was willing


@dataclass(slots=True)
class Build:
    """An unfinished build."""

    communicator: int
    membership: Membership
    nodes: frozenset[NodeId]
    old: ClosedCommunicator | None  # the generation to replace
    until: float
    aborted: BuildFailure | None = None


def nodes_of(membership: Membership) -> frozenset[NodeId]:
    """Its members."""
    return frozenset(member.node for member in membership.members)


def ranks_of(membership: Membership, nodes: Iterable[NodeId]) -> tuple[Rank, ...]:
    """In ascending order, without nodes that are not members."""
    return tuple(sorted(rank for node in nodes if (rank := membership.rank_of(node)) is not None))


def interrupt(each: OpenedGeneration) -> list[SuccessorAction]:
    """Once for each generation."""
    if each.interrupted:
        return []
    each.interrupted = True
    return [Interrupt(each.key)]


def abort(number: BuildId, build: Build, failure: BuildFailure | None) -> list[SuccessorAction]:
    """Once for each build; nothing if there is no failure."""
    if failure is None or build.aborted is not None:
        return []
    build.aborted = failure
    return [AbortBuild(number, failure)]


def set_outcome(each: OpenedGeneration, outcome: Outcome) -> list[SuccessorAction]:
    """Nothing if the present outcome is final or counts more."""
    if not _replaces(each.outcome, outcome):
        return []
    each.outcome = outcome
    return [SetOutcome(each.key, outcome)]


def _replaces(old: Outcome | None, new: Outcome) -> bool:
    """Superseded is not among them: a superseded generation is not open any more."""
    match old:
        case None | QuorumLost() | RecoveryTimedOut():
            return True
        case RevokedBy():
            return isinstance(new, Terminated) or (isinstance(new, RevokedBy) and new.closed)
        case _:
            return False


def closer_in(target: Membership, each: OpenedGeneration) -> RevokedBy | None:
    """The outcome if a member of the target closed this generation: no successor with that member is built."""
    for rank, member in enumerate(each.membership.members):
        if member.node in each.closed_by and target.rank_of(member.node) is not None:
            reason = f"rank {rank} has closed it, and there is no successor without that rank"
            return RevokedBy(rank, reason, closed=True)
    return None


def stall_outcome(membership: Membership, stall: NoProgress) -> Outcome:
    """Missing votes mean that a majority is reachable but does not finish."""
    if stall.missing_votes:
        return RecoveryTimedOut(ranks_of(membership, stall.missing_votes))
    return QuorumLost(ranks_of(membership, stall.alive), stall.needed, ranks_of(membership, stall.left))


def supersede(
    each: SupersededGeneration, key: GenerationKey, target: Membership, changes: Sequence[Change]
) -> Superseded:
    """Add these changes, up to the successor `key`, to what happened before. Returns the new outcome."""
    for change in changes:
        each.lost |= change.causes(each.membership)
        each.agreed = each.agreed and all(departure.willing for departure in change.left)
    before = nodes_of(each.membership)
    joined = tuple(rank for rank, member in enumerate(target.members) if member.node not in before)
    return Superseded(key, dict(sorted(each.lost.items())), joined, each.completed, each.agreed)
