"""Successors that were tried in vain, and how long another change is waited for that gives another chance.

Law: what failed is not tried again with the same members in the same epoch; the others have given it up as well.
"""

from __future__ import annotations

from nexar.cluster.membership import Membership
from nexar.communicator.branch import Branch


class Attempts:
    """The last one of each branch that failed. Under the lock of who has it."""

    def __init__(self) -> None:
        self._failed: dict[Branch, tuple[Membership, float | None]] = {}  # until when it is waited; None: no longer

    def failed(self, branch: Branch, target: Membership, until: float) -> None:
        """This successor was not made. Give it up at that time, unless another is to be made."""
        self._failed[branch] = target, until

    def is_due(self, branch: Branch, target: Membership, now: float) -> bool:
        """Whether to make this successor, or to give it up."""
        tried, until = self._failed.get(branch, (None, None))
        return tried != target or (until is not None and now >= until)

    def give_up(self, branch: Branch, target: Membership) -> bool:
        """Whether this one was tried before. Then nobody waits for it any more."""
        if self._failed.get(branch, (None, None))[0] != target:
            return False
        self._failed[branch] = target, None
        return True

    def is_given_up(self, branch: Branch, target: Membership) -> bool:
        """Whether nobody waits for this one any more: it takes another change."""
        return self._failed.get(branch) == (target, None)

    def pause(self, now: float) -> float | None:
        """Seconds until the first is to be given up; None: nobody waits."""
        ends = [until for _, until in self._failed.values() if until is not None]
        return max(0.0, min(ends) - now) if ends else None

    def forget(self, branch: Branch) -> None:
        """It has a successor, or needs none."""
        self._failed.pop(branch, None)
