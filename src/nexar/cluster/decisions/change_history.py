"""What SuccessorMachine remembers: changes, needed members, closed communicators, early notices. Pure.

Every memory has a bound. The oldest entries are dropped; each class states why that is safe.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from nexar.cluster.decisions.successor_events import GenerationKey, RevokeReceived
from nexar.cluster.membership import Change, Membership, next_generation
from nexar.types import NodeId
from nexar.wire.text import foreign_lines

MAX_CHANGES: Final = 1024
MAX_CLOSED: Final = 1024
MAX_EARLY: Final = 64


class ChangeHistory:
    """Decided changes of the world, the newest MAX_CHANGES: no generation in use is based on an older membership."""

    def __init__(self, world: Membership) -> None:
        self.world = world  # the newest membership
        self._changes: list[Change] = []

    def add(self, change: Change, after: Membership) -> None:
        self.world = after
        self._changes.append(change)
        del self._changes[:-MAX_CHANGES]

    def following(self, communicator: int, membership: Membership) -> Membership | None:
        """The next generation; None if no change concerns this one."""
        return next_generation(communicator, membership, self.world, self._changes)

    def gone_from(self, membership: Membership) -> dict[NodeId, str]:
        """Its members that left the world, and why."""
        gone = [member.node for member in membership.members if self.world.rank_of(member.node) is None]
        return {node: self._cause_of(node) for node in gone}

    def loss_in(self, membership: Membership) -> tuple[NodeId, str] | None:
        """The first member that left the world, and why. A generation is built only with all its members."""
        return next(iter(self.gone_from(membership).items()), None)

    def between(self, old: int, new: int) -> list[Change]:
        """Changes after epoch `old`, up to and including epoch `new`."""
        return [change for change in self._changes if old < change.epoch <= new]

    def _cause_of(self, node: NodeId) -> str:
        departures = (each for change in reversed(self._changes) for each in change.left if each.node == node)
        return next((foreign_lines(each.cause) for each in departures), "it is no member any more")


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

    def add(self, communicator: int, membership: Membership) -> None:
        self._closed[communicator] = ClosedCommunicator(communicator, membership)
        self._closed.move_to_end(communicator)
        while len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)

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
        return list(self._notices.pop(key, {}).values())
