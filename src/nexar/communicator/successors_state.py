"""The changes of the world as they were chosen, and what they mean for one communicator of it.

Members that somebody here needs, on which communicator.

Who has closed leaves the world quietly, and the communicators that have it go on. Whoever needs it all the same wants a
successor of that communicator. What is wanted is forgotten with each change of the world, which may come for other
reasons and not concern that communicator: so it is remembered here, and asked for again until there is one.

Communicators that this node's user has closed, and the others may still hold.

Closing is local. But when a member is lost the others make a successor, and would wait in it for this node until they
give up. So what was closed is remembered, and when a change concerns it, its members are told who takes no part.

Successors that were tried in vain, and how long another change is waited for that gives another chance.

Law: what failed is not tried again with the same members in the same epoch; the others have given it up as well.

Threads that make successors, one for each branch: who waits in one for a member that does not come, or has closed
that communicator, keeps no other waiting.

So many at once, and those with the lowest ids first, on every member: two members that have more to make than that do
not wait for each other in different ones.
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

_MOST_CHANGES: Final = 1024
"""As many are remembered: a communicator that is being made may stand on an older membership, not on one so old."""


class ChangeHistory:
    """Of one node. Under the lock of who has it."""

    def __init__(self, world: Membership) -> None:
        self.world = world
        """The newest membership."""
        self._changes: list[Change] = []  # the newest that were chosen since this node is here

    def add(self, change: Change, after: Membership) -> None:
        """The next one."""
        self.world = after
        self._changes.append(change)
        del self._changes[:-_MOST_CHANGES]

    def after(self, generation: Generation) -> Membership | None:
        """Who is in its successor; None: nothing that was chosen concerns it."""
        return generation.next_membership(self.world, self._changes)

    def following(self, communicator: int, membership: Membership) -> Membership | None:
        """Likewise, of any generation of a communicator."""
        return next_generation(communicator, membership, self.world, self._changes)

    def gone_from(self, membership: Membership) -> dict[NodeId, str]:
        """Members of a generation that are none of the world any more, and why."""
        gone = [member.node for member in membership.members if self.world.rank_of(member.node) is None]
        return {node: self._cause_of(node) for node in gone}

    def loss_in(self, membership: Membership) -> PeerLost | None:
        """Why nobody can make this generation any more: it needs all its members."""
        for node, cause in self.gone_from(membership).items():
            return PeerLost(rank=membership.rank_of(node), node=node, cause=cause)
        return None

    def _cause_of(self, node: NodeId) -> str:
        told = (each for change in reversed(self._changes) for each in change.left if each.node == node)
        return next((foreign_lines(each.cause) for each in told), "it is no member any more")

    def between(self, old: int, new: int) -> list[Change]:
        """Those that lead from one epoch to another."""
        return [change for change in self._changes if old < change.epoch <= new]

    def end_of(self, group: Group) -> NexarError | None:
        """Why what is still being made will not be: a change concerns it, or it lacks a member."""
        if self.overtakes(group):
            return build_overtaken()
        return self.loss_in(group.membership)

    def overtakes(self, group: Group) -> bool:
        """Whether a change concerns what is still being made."""
        return self.following(group.communicator, group.membership) is not None


def build_overtaken() -> LinkClosed:
    """What whoever makes a generation hears that nobody is to make any more."""
    return LinkClosed(owner="the communicator that was being made")


class _Need(NamedTuple):
    membership: Membership
    nodes: set[NodeId]


class NeededMembers:
    """Of one node. Under the lock of who has it."""

    def __init__(self, course: ChangeHistory) -> None:
        self._history = course
        self._open: dict[int, _Need] = {}  # by communicator: of its newest generation

    def add(self, communicator: int, membership: Membership, node: NodeId) -> None:
        """A call on this generation needs this member. Nothing, if that generation is over anyway."""
        if self._history.following(communicator, membership) is not None:
            return
        known = self._open.get(communicator)
        if known is None or known.membership.epoch < membership.epoch:
            self._open[communicator] = _Need(membership, {node})
        elif known.membership.epoch == membership.epoch:
            known.nodes.add(node)

    def unmet(self) -> tuple[int, ...]:
        """Communicators that need somebody who is no member of the world any more, and that nothing chosen so far gives
        a successor.
        """
        is_member = self._history.world.rank_of
        self._open = {
            each: need for each, need in self._open.items() if self._history.following(each, need.membership) is None
        }
        return tuple(
            sorted(each for each, need in self._open.items() if any(is_member(node) is None for node in need.nodes))
        )

    def forget(self, communicator: int) -> None:
        """Nobody here uses it any more."""
        self._open.pop(communicator, None)


_KEPT: Final = 1024
"""The newest: who closes more than that lets the others wait for the oldest."""


class ClosedCommunicator(NamedTuple):
    """This node takes no part in successors of this generation."""

    communicator: int
    membership: Membership


class ClosedCommunicators:
    """Of one node. Under the lock of who has it."""

    def __init__(self) -> None:
        self._closed: OrderedDict[int, ClosedCommunicator] = (
            OrderedDict()
        )  # by communicator: only its newest has successors

    def add(self, generation: Generation) -> ClosedCommunicator:
        """Its user has closed it."""
        absence = ClosedCommunicator(generation.communicator, generation.membership)
        self._closed[generation.communicator] = absence
        self._closed.move_to_end(generation.communicator)
        while len(self._closed) > _KEPT:
            self._closed.popitem(last=False)
        return absence

    def touched(self, change: Change) -> list[ClosedCommunicator]:
        """Those that others make a successor of by this change."""
        return [each for each in self._closed.values() if change.concerns(each.communicator, _nodes(each))]


def _nodes(absence: ClosedCommunicator) -> frozenset[int]:
    return frozenset(member.node for member in absence.membership.members)


class _FailedBuild(NamedTuple):
    target: Membership
    until: float | None
    """When it is given up; None: it was."""
    missing: tuple[NodeId, ...]


class FailedBuilds:
    """The last one of each branch that failed. Under the lock of who has it."""

    def __init__(self) -> None:
        self._failed: dict[Generation, _FailedBuild] = {}

    def failed(
        self, generation: Generation, target: Membership, until: float, missing: tuple[NodeId, ...] = ()
    ) -> None:
        """This successor was not made, because these did not come. Give it up at that time, unless another is to be
        made.
        """
        self._failed[generation] = _FailedBuild(target, until, missing)

    def is_due(self, generation: Generation, target: Membership, now: float) -> bool:
        """Whether to make this successor, or to give it up."""
        found = self._failed.get(generation)
        return found is None or found.target != target or (found.until is not None and now >= found.until)

    def give_up(self, generation: Generation, target: Membership) -> bool:
        """Whether this one was tried before. Then nobody waits for it any more."""
        found = self._failed.get(generation)
        if found is None or found.target != target:
            return False
        self._failed[generation] = found._replace(until=None)
        return True

    def is_given_up(self, generation: Generation, target: Membership) -> bool:
        """Whether nobody waits for this one any more: it takes another change."""
        found = self._failed.get(generation)
        return found is not None and found.target == target and found.until is None

    def missing(self, generation: Generation) -> tuple[NodeId, ...]:
        """Who did not come, the last time."""
        found = self._failed.get(generation)
        return () if found is None else found.missing

    def pause(self, now: float) -> float | None:
        """Seconds until the first is to be given up; None: nobody waits."""
        ends = [found.until for found in self._failed.values() if found.until is not None]
        return max(0.0, min(ends) - now) if ends else None

    def forget(self, generation: Generation) -> None:
        """It has a successor, or needs none."""
        self._failed.pop(generation, None)


def members_missed_in(error: Exception, target: Membership, generation: Generation) -> tuple[NodeId, ...]:
    """Who was waited for in vain, where making this successor ended with this error; if it does not say, anybody may
    have been: all the others.
    """
    found: set[NodeId | None] = set()
    if isinstance(error, PeerError):
        found.add(error.node)
    elif isinstance(error, OperationTimeout) and not isinstance(error.waiting_for, str):
        found.update(peer.node for peer in error.waiting_for)
    others = tuple(each.node for each in target.members if each.node != generation.me)
    return tuple(node for node in others if node in found) or others


MAX_BUILDS: Final = 16


class BuildThreads:
    """Of one node. Under the lock of who has it, but for `close`. Each thread ends by itself."""

    def __init__(self, changed: threading.Condition) -> None:
        """`changed`: the lock, and who is notified when a thread has ended."""
        self._changed = changed
        self._threads: dict[Generation, threading.Thread] = {}

    @property
    def is_full(self) -> bool:
        """No other can be made now."""
        return len(set(self._threads.values())) >= MAX_BUILDS

    def is_at(self, generation: Generation) -> bool:
        """Whether a thread is at this one."""
        return generation in self._threads

    def start(self, generation: Generation, make: Callable[[], None]) -> None:
        """A thread calls `make`, without the lock. It must not raise."""

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
        """The thread that has made it, and calls this, is at it until it ends: it is handed over before it gets a
        successor itself.
        """
        self._threads[successor] = threading.current_thread()

    def close(self) -> None:
        """Wait for all, when nobody starts one any more and all have been told to end. Idempotent."""
        with self._changed:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join()
