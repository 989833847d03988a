"""State of SuccessorMachine: changes, needed members, closed communicators, early notices, generations, builds. Pure.

Every memory has a bound. The oldest entries are dropped; each class states why that is safe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

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
    RevokeReceived,
    SetOutcome,
    SuccessorAction,
    Superseded,
    Terminated,
)
from nexar.cluster.membership import Change, Membership, next_generation
from nexar.types import NodeId, Rank
from nexar.wire.text import foreign_lines

MAX_CHANGES: Final = 1024
MAX_CLOSED: Final = 1024
MAX_FOLLOWING: Final = 256
MAX_EARLY: Final = 64


NextGeneration: TypeAlias = Callable[[int, Membership, Membership, Sequence[Change]], Membership | None]
"""A function with the arguments and result of `next_generation`."""


class ChangeHistory:
    """Decided changes of the world, the newest MAX_CHANGES.

    `next_generation` does not need older ones: a generation that one of them concerned was replaced or given up long
    ago, and the others have no successor by them.
    """

    def __init__(self, world: Membership, next_generation: NextGeneration = next_generation) -> None:
        self.world = world  # the newest membership
        self._next_generation = next_generation
        self._changes: list[Change] = []
        # The generations asked about since the last change, by communicator, with the answer: it takes time in
        # proportion to the members, and one event asks several times.
        self._following: dict[int, tuple[Membership, Membership | None]] = {}

    def add(self, change: Change, after: Membership) -> None:
        self.world = after
        self._following.clear()
        self._changes.append(change)
        del self._changes[:-MAX_CHANGES]

    def __len__(self) -> int:
        return len(self._changes)

    def following(self, communicator: int, membership: Membership) -> Membership | None:
        """The next generation; None if no change concerns this one."""
        known = self._following.get(communicator)
        if known is None or known[0] is not membership:
            if len(self._following) >= MAX_FOLLOWING:
                self._following.clear()
            found = self._next_generation(communicator, membership, self.world, self._changes)
            known = self._following[communicator] = (membership, found)
        return known[1]

    def gone_from(self, membership: Membership) -> dict[NodeId, str]:
        """Its members that left the world, and why."""
        present = self.world.nodes
        if membership.nodes <= present:
            return {}  # usually
        return {node: self._cause_of(node) for node in membership.nodes if node not in present}

    def loss_in(self, membership: Membership) -> tuple[NodeId, str] | None:
        """The first member that left the world, and why. A generation is built only with all its members."""
        return next(iter(self.gone_from(membership).items()), None)

    def between(self, old: int, new: int) -> list[Change]:
        """Changes after epoch `old`, up to and including epoch `new`."""
        return [change for change in self._changes if old < change.epoch <= new]

    def _cause_of(self, node: NodeId) -> str:
        departures = (each for change in reversed(self._changes) for each in change.left if each.node == node)
        return next((foreign_lines(each.cause) for each in departures), "it is no longer a member")


class _Need(NamedTuple):
    membership: Membership
    nodes: set[NodeId]


class NeededMembers:
    """Members that calls need, for the newest generation of each communicator.

    A communicator of a member that left quietly continues until a call needs that member. Every change of the world
    drops requests for a renewal, so the need is kept here and requested again until a change concerns the communicator.
    """

    def __init__(self, history: ChangeHistory) -> None:
        self._history = history
        self._needs: dict[int, _Need] = {}  # by communicator

    def add(self, communicator: int, membership: Membership, node: NodeId) -> None:
        if self._history.following(communicator, membership) is not None:
            return
        known = self._needs.get(communicator)
        if known is None or known.membership.epoch < membership.epoch:
            self._needs[communicator] = _Need(membership, {node})
        elif known.membership.epoch == membership.epoch:
            known.nodes.add(node)

    def unmet(self) -> tuple[int, ...]:
        """Communicators that need a node outside the world and that no change concerns, in ascending order."""
        following, is_member = self._history.following, self._history.world.rank_of
        self._needs = {each: need for each, need in self._needs.items() if following(each, need.membership) is None}
        unmet = (each for each, need in self._needs.items() if any(is_member(node) is None for node in need.nodes))
        return tuple(sorted(unmet))

    def forget(self, communicator: int) -> None:
        self._needs.pop(communicator, None)


class ClosedCommunicator(NamedTuple):
    """This node takes no part in successors of this generation."""

    communicator: int
    membership: Membership

    @property
    def key(self) -> GenerationKey:
        return GenerationKey(self.communicator, self.membership.epoch)


class ClosedCommunicators:
    """Communicators that this node's user closed, the newest MAX_CLOSED.

    Other members wait for this node in a successor until they are told. For a dropped entry they wait until their
    timeout.
    """

    def __init__(self) -> None:
        # By communicator: only the newest generation of one has successors.
        self._closed: OrderedDict[int, ClosedCommunicator] = OrderedDict()

    def __len__(self) -> int:
        return len(self._closed)

    def add(self, communicator: int, membership: Membership) -> None:
        self._closed[communicator] = ClosedCommunicator(communicator, membership)
        self._closed.move_to_end(communicator)
        while len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)

    def is_closed(self, key: GenerationKey) -> bool:
        """This generation or a newer one."""
        found = self._closed.get(key.communicator)
        return found is not None and key.epoch <= found.membership.epoch

    def concerned(self, change: Change) -> list[ClosedCommunicator]:
        """Those that would get a successor by this change."""
        return [
            each
            for each in self._closed.values()
            if change.concerns(each.communicator, [member.node for member in each.membership.members])
        ]


class EarlyNotices:
    """Notices about generations that are not open here, for the newest MAX_EARLY of them.

    A generation may be revoked before this node has built it. Notices are kept by sender and kind, so none hides that
    of another sender.
    """

    def __init__(self) -> None:
        self._notices: dict[GenerationKey, dict[tuple[NodeId, bool], RevokeReceived]] = {}

    def __len__(self) -> int:
        return len(self._notices)

    def add(self, notice: RevokeReceived) -> None:
        self._notices.setdefault(notice.key, {})[notice.sender, notice.closed] = notice
        while len(self._notices) > MAX_EARLY:
            del self._notices[next(iter(self._notices))]

    def take(self, key: GenerationKey) -> list[RevokeReceived]:
        """Those about this generation, and closing notices about any generation of its communicator."""
        about = self._notices.pop(key, {})
        others = (each for other, each in self._notices.items() if other.communicator == key.communicator)
        return [*about.values(), *(notice for each in others for notice in each.values() if notice.closed)]


# -- generations and builds


class FailedBuild(NamedTuple):
    """The last build of a successor."""

    epoch: int  # of the target, which determines its members
    until: float | None  # when it is given up; None: it is given up
    missing: tuple[NodeId, ...] = ()
    renew_at: float | None = None  # when a renewal is requested, which gives it another chance; None: never


class Renewal(NamedTuple):
    """Another chance for a target with these members."""

    nodes: frozenset[NodeId]
    until: float  # when the first target was to be given up


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
    renewal: Renewal | None = None  # requested because the last build failed

    @property
    def gives_up_at(self) -> float | None:
        """When the current target is given up; None if it has not failed, or is given up already."""
        if self.build is not None or self.failed is None or not self._is_current(self.failed):
            return None
        return self.failed.until

    @property
    def due(self) -> float | None:
        """When something must be done about the failed target; None: nothing."""
        if self.gives_up_at is None or self.failed is None or self.failed.renew_at is None:
            return self.gives_up_at
        return min(self.gives_up_at, self.failed.renew_at)

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
    parent: GenerationKey | None = None  # a first build: the generation on which it was asked for
    abort_at: float | None = None  # set when the parent has ended


def nodes_of(membership: Membership) -> frozenset[NodeId]:
    """Its members."""
    return frozenset(membership.nodes)


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
    """Superseded is not among them: a superseded generation is no longer open."""
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
    before = each.membership.nodes
    joined = tuple(rank for rank, node in enumerate(target.nodes) if node not in before)
    return Superseded(key, dict(sorted(each.lost.items())), joined, each.completed, each.agreed)
