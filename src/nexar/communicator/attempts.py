"""Successors that were tried in vain, and how long another change is waited for that gives another chance.

Law: what failed is not tried again with the same members in the same epoch; the others have given it up as well.
"""

from __future__ import annotations

from typing import NamedTuple

from nexar.cluster.membership import Membership
from nexar.communicator.branch import Branch
from nexar.errors import OperationTimeout, PeerError
from nexar.types import NodeId


class _Failure(NamedTuple):
    target: Membership
    until: float | None
    """When it is given up; None: it was."""
    missing: tuple[NodeId, ...]


class Attempts:
    """The last one of each branch that failed. Under the lock of who has it."""

    def __init__(self) -> None:
        self._failed: dict[Branch, _Failure] = {}

    def failed(self, branch: Branch, target: Membership, until: float, missing: tuple[NodeId, ...] = ()) -> None:
        """This successor was not made, because these did not come. Give it up at that time, unless another is to be
        made.
        """
        self._failed[branch] = _Failure(target, until, missing)

    def is_due(self, branch: Branch, target: Membership, now: float) -> bool:
        """Whether to make this successor, or to give it up."""
        found = self._failed.get(branch)
        return found is None or found.target != target or (found.until is not None and now >= found.until)

    def give_up(self, branch: Branch, target: Membership) -> bool:
        """Whether this one was tried before. Then nobody waits for it any more."""
        found = self._failed.get(branch)
        if found is None or found.target != target:
            return False
        self._failed[branch] = found._replace(until=None)
        return True

    def is_given_up(self, branch: Branch, target: Membership) -> bool:
        """Whether nobody waits for this one any more: it takes another change."""
        found = self._failed.get(branch)
        return found is not None and found.target == target and found.until is None

    def missing(self, branch: Branch) -> tuple[NodeId, ...]:
        """Who did not come, the last time."""
        found = self._failed.get(branch)
        return () if found is None else found.missing

    def pause(self, now: float) -> float | None:
        """Seconds until the first is to be given up; None: nobody waits."""
        ends = [found.until for found in self._failed.values() if found.until is not None]
        return max(0.0, min(ends) - now) if ends else None

    def forget(self, branch: Branch) -> None:
        """It has a successor, or needs none."""
        self._failed.pop(branch, None)


def missed_in(error: Exception, target: Membership, branch: Branch) -> tuple[NodeId, ...]:
    """Who was waited for in vain, where making this successor ended with this error; if it does not say, anybody may
    have been: all the others.
    """
    found: set[NodeId | None] = set()
    if isinstance(error, PeerError):
        found.add(error.node)
    elif isinstance(error, OperationTimeout) and not isinstance(error.waiting_for, str):
        found.update(peer.node for peer in error.waiting_for)
    others = tuple(each.node for each in target.members if each.node != branch.me)
    return tuple(node for node in others if node in found) or others
