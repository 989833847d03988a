"""The changes of the world as they were chosen, and what they mean for one communicator of it."""

from __future__ import annotations

from typing import Final

from nexar.cluster.change import Change
from nexar.cluster.membership import Membership
from nexar.communicator.branch import WORLD, Branch
from nexar.group import Group

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

    def between(self, old: int, new: int) -> list[Change]:
        """Those that lead from one epoch to another."""
        return [change for change in self._changes if old < change.epoch <= new]

    def overtakes(self, group: Group) -> bool:
        """Whether a change concerns what is still being made."""
        epoch = group.membership.epoch
        if group.communicator == WORLD:
            return self.world.epoch > epoch
        members = group.matching.members or frozenset()
        later = (change for change in self._changes if change.epoch > epoch)
        return any(change.touches(group.communicator, members) for change in later)
