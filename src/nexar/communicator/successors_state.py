"""State behind Successors: chosen changes, needed members, closed communicators, failed builds and build threads.

Needed members: the communicators of a member that closed continue until a call needs it. Each change of the world
forgets the request for a successor, so it is kept here and repeated. Closed communicators: at a loss the others would
wait for this node in the successor, so they are told. Failed builds: not repeated with the same members in the same
epoch, because the others gave up too. Build threads: at most MAX_BUILDS, lowest ids first on every member, so no two
members wait for each other in different builds.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from nexar.cluster.membership import Change, Membership, next_generation
from nexar.communicator.generation import Generation
from nexar.errors import LinkClosed, NexarError, OperationTimeout, PeerError, PeerLost
from nexar.group import Group
from nexar.types import NodeId
from nexar.wire.text import foreign_lines

# No communicator that is being made is based on an older membership.
_MAX_CHANGES: Final = 1024


class ChangeHistory:
    """Chosen changes of the world. The owner's lock guards it."""

    def __init__(self, world: Membership) -> None:
        # the newest membership
        self.world = world
        self._changes: list[Change] = []  # the newest since this node joined

    def add(self, change: Change, after: Membership) -> None:
        self.world = after
        self._changes.append(change)
        del self._changes[:-_MAX_CHANGES]

    def after(self, generation: Generation) -> Membership | None:
        return generation.next_membership(self.world, self._changes)

    def following(self, communicator: int, membership: Membership) -> Membership | None:
        return next_generation(communicator, membership, self.world, self._changes)

    def gone_from(self, membership: Membership) -> dict[NodeId, str]:
        gone = [member.node for member in membership.members if self.world.rank_of(member.node) is None]
        return {node: self._cause_of(node) for node in gone}

    def loss_in(self, membership: Membership) -> PeerLost | None:
        """A generation needs all its members."""
        for node, cause in self.gone_from(membership).items():
            return PeerLost(rank=membership.rank_of(node), node=node, cause=cause)
        return None

    def _cause_of(self, node: NodeId) -> str:
        told = (each for change in reversed(self._changes) for each in change.left if each.node == node)
        return next((foreign_lines(each.cause) for each in told), "it is no member any more")

    def between(self, old: int, new: int) -> list[Change]:
        return [change for change in self._changes if old < change.epoch <= new]

    def end_of(self, group: Group) -> NexarError | None:
        """Why a build cannot succeed: a change concerns it, or a member is lost."""
        if self.overtakes(group):
            return build_overtaken()
        return self.loss_in(group.membership)

    def overtakes(self, group: Group) -> bool:
        return self.following(group.communicator, group.membership) is not None


def build_overtaken() -> LinkClosed:
    """Return the error of a build overtaken by a change."""
    return LinkClosed(owner="the communicator that was being made")


class _Need(NamedTuple):
    membership: Membership
    nodes: set[NodeId]


class NeededMembers:
    """Members that calls need, by communicator. The owner's lock guards it."""

    def __init__(self, history: ChangeHistory) -> None:
        self._history = history
        self._open: dict[int, _Need] = {}  # by communicator: of its newest generation

    def add(self, communicator: int, membership: Membership, node: NodeId) -> None:
        if self._history.following(communicator, membership) is not None:
            return
        known = self._open.get(communicator)
        if known is None or known.membership.epoch < membership.epoch:
            self._open[communicator] = _Need(membership, {node})
        elif known.membership.epoch == membership.epoch:
            known.nodes.add(node)

    def unmet(self) -> tuple[int, ...]:
        """Communicators that need a departed node and have no chosen successor."""
        is_member = self._history.world.rank_of
        self._open = {
            each: need for each, need in self._open.items() if self._history.following(each, need.membership) is None
        }
        return tuple(
            sorted(each for each, need in self._open.items() if any(is_member(node) is None for node in need.nodes))
        )

    def forget(self, communicator: int) -> None:
        self._open.pop(communicator, None)


# The newest; for older ones the others wait until their timeout.
_MAX_CLOSED: Final = 1024


class ClosedCommunicator(NamedTuple):
    """This node takes no part in successors of this generation."""

    communicator: int
    membership: Membership


class ClosedCommunicators:
    """Communicators that this node's user closed. The owner's lock guards it."""

    def __init__(self) -> None:
        self._closed: OrderedDict[int, ClosedCommunicator] = (
            OrderedDict()
        )  # by communicator: only its newest has successors

    def add(self, generation: Generation) -> ClosedCommunicator:
        absence = ClosedCommunicator(generation.communicator, generation.membership)
        self._closed[generation.communicator] = absence
        self._closed.move_to_end(generation.communicator)
        while len(self._closed) > _MAX_CLOSED:
            self._closed.popitem(last=False)
        return absence

    def touched(self, change: Change) -> list[ClosedCommunicator]:
        return [each for each in self._closed.values() if change.concerns(each.communicator, _nodes(each))]


def _nodes(absence: ClosedCommunicator) -> frozenset[int]:
    return frozenset(member.node for member in absence.membership.members)


class _FailedBuild(NamedTuple):
    target: Membership
    # time to give up; None: given up
    until: float | None
    missing: tuple[NodeId, ...]


class FailedBuilds:
    """Last failed build of each generation. The owner's lock guards it."""

    def __init__(self) -> None:
        self._failed: dict[Generation, _FailedBuild] = {}

    def failed(
        self, generation: Generation, target: Membership, until: float, missing: tuple[NodeId, ...] = ()
    ) -> None:
        """Given up at `until` unless another membership comes."""
        self._failed[generation] = _FailedBuild(target, until, missing)

    def is_due(self, generation: Generation, target: Membership, now: float) -> bool:
        found = self._failed.get(generation)
        return found is None or found.target != target or (found.until is not None and now >= found.until)

    def give_up(self, generation: Generation, target: Membership) -> bool:
        """False if it was not tried before."""
        found = self._failed.get(generation)
        if found is None or found.target != target:
            return False
        self._failed[generation] = found._replace(until=None)
        return True

    def is_given_up(self, generation: Generation, target: Membership) -> bool:
        found = self._failed.get(generation)
        return found is not None and found.target == target and found.until is None

    def missing(self, generation: Generation) -> tuple[NodeId, ...]:
        found = self._failed.get(generation)
        return () if found is None else found.missing

    def pause(self, now: float) -> float | None:
        ends = [found.until for found in self._failed.values() if found.until is not None]
        return max(0.0, min(ends) - now) if ends else None

    def forget(self, generation: Generation) -> None:
        self._failed.pop(generation, None)


def members_missed_in(error: Exception, target: Membership, generation: Generation) -> tuple[NodeId, ...]:
    """Members that a failed build missed; all others if unknown."""
    found: set[NodeId | None] = set()
    if isinstance(error, PeerError):
        found.add(error.node)
    elif isinstance(error, OperationTimeout) and not isinstance(error.waiting_for, str):
        found.update(peer.node for peer in error.waiting_for)
    others = tuple(each.node for each in target.members if each.node != generation.me)
    return tuple(node for node in others if node in found) or others


MAX_BUILDS: Final = 16


class BuildThreads:
    """Threads that make successors and end by themselves. The owner's lock guards all but `close`."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._threads: dict[Generation, threading.Thread] = {}

    @property
    def is_full(self) -> bool:
        return len(set(self._threads.values())) >= MAX_BUILDS

    def is_at(self, generation: Generation) -> bool:
        return generation in self._threads

    def start(self, generation: Generation, make: Callable[[], None]) -> None:
        """Call `make`, which must not raise, in a thread without the lock."""

        def run() -> None:
            try:
                make()
            finally:
                with self._changed:
                    mine = threading.current_thread()
                    self._threads = {each: thread for each, thread in self._threads.items() if thread is not mine}
                    self._changed.notify_all()

        name = f"nexar-successor-{generation.communicator}"
        thread = self._threads[generation] = threading.Thread(target=run, name=name, daemon=True)
        thread.start()

    def take(self, successor: Generation) -> None:
        """Assign it to the current thread: its hand-over comes before its own successor."""
        self._threads[successor] = threading.current_thread()

    def close(self) -> None:
        """Wait for all threads, once no more are started. Idempotent."""
        with self._changed:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join()
