"""Communicators that this node's user has closed, and the others may still hold.

Closing is local. But when a member is lost the others make a successor, and would wait in it for this node until they
give up. So what was closed is remembered, and when a change concerns it, its members are told who takes no part.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from nexar.cluster.change import Change
from nexar.cluster.membership import Membership
from nexar.communicator.branch import Branch

_KEPT: Final = 1024
"""The newest: who closes more than that lets the others wait for the oldest."""


class Absence(NamedTuple):
    """This node takes no part in successors of this generation."""

    communicator: int
    membership: Membership


class Absences:
    """Of one node. Under the lock of who has it."""

    def __init__(self) -> None:
        self._closed: OrderedDict[int, Absence] = OrderedDict()  # by communicator: only its newest has successors

    def add(self, branch: Branch) -> Absence:
        """Its user has closed it."""
        absence = Absence(branch.communicator, branch.membership)
        self._closed[branch.communicator] = absence
        self._closed.move_to_end(branch.communicator)
        while len(self._closed) > _KEPT:
            self._closed.popitem(last=False)
        return absence

    def touched(self, change: Change) -> list[Absence]:
        """Those that others make a successor of by this change."""
        return [each for each in self._closed.values() if change.touches(each.communicator, _nodes(each))]


def _nodes(absence: Absence) -> frozenset[int]:
    return frozenset(member.node for member in absence.membership.members)
