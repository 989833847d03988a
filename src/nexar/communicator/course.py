"""The changes of the world as they were chosen, and what they mean for one communicator of it."""

from __future__ import annotations

from typing import Final

from nexar.cluster.change import Change, following
from nexar.cluster.membership import Membership
from nexar.communicator.branch import Branch
from nexar.errors import LinkClosed, NexarError, PeerLost
from nexar.group import Group
from nexar.transport.foreign_text import several_lines
from nexar.types import NodeId

_MOST_CHANGES: Final = 1024
"""As many are remembered: a communicator that is being made may stand on an older membership, not on one so old."""


class Course:
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

    def after(self, branch: Branch) -> Membership | None:
        """Who is in its successor; None: nothing that was chosen concerns it."""
        return branch.next_membership(self.world, self._changes)

    def following(self, communicator: int, membership: Membership) -> Membership | None:
        """Likewise, of any generation of a communicator."""
        return following(communicator, membership, self.world, self._changes)

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
        return next((several_lines(each.cause) for each in told), "it is no member any more")

    def between(self, old: int, new: int) -> list[Change]:
        """Those that lead from one epoch to another."""
        return [change for change in self._changes if old < change.epoch <= new]

    def end_of(self, group: Group) -> NexarError | None:
        """Why what is still being made will not be: a change concerns it, or it lacks a member."""
        if self.overtakes(group):
            return overtaken()
        return self.loss_in(group.membership)

    def overtakes(self, group: Group) -> bool:
        """Whether a change concerns what is still being made."""
        return self.following(group.communicator, group.membership) is not None


def overtaken() -> LinkClosed:
    """What whoever makes a generation hears that nobody is to make any more."""
    return LinkClosed(owner="the communicator that was being made")
