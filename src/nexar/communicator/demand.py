"""Asking for what comes after a communicator, until it is there."""

from __future__ import annotations

import time
from typing import Any, Final

from nexar.cluster.decisions.succession_events import Recover, Wanted
from nexar.cluster.lookout import Lookout
from nexar.cluster.recovery import Recovery
from nexar.communicator.branch import Branch
from nexar.communicator.lineage import Lineage
from nexar.errors import RecoveryTimeout
from nexar.types import Rank

_ASK_AGAIN: Final = 1.0  # seconds
_LOOK_AGAIN: Final = 0.01  # likewise: whoever is looked into is found, or lost, in some milliseconds


class Demand:
    """Of one node. Any thread."""

    def __init__(self, lineage: Lineage, recovery: Recovery, lookout: Lookout) -> None:
        self._lineage = lineage
        self._recovery = recovery
        self._lookout = lookout

    def succeed(self, branch: Branch, deadline: float, timeout: float) -> Any:
        """The communicator after this one: without who is lost; if nobody is, the same members once more."""
        while not self._lineage.is_barred(branch):
            pause = _ASK_AGAIN if self._ask(branch) else _LOOK_AGAIN
            found = self._lineage.wait_for_successor(branch, min(deadline, time.monotonic() + pause))
            if found is not None:
                return found
            if time.monotonic() >= deadline:
                break
        if self._lineage.is_barred(branch) or branch.is_stalled:
            branch.fate.check()
        raise RecoveryTimeout(missing_votes=self.missing(branch), timeout=timeout)

    def missing(self, branch: Branch) -> tuple[Rank, ...]:
        """Whom the next membership, or what is made of it, waits for, so far as is known here: by their ranks."""
        made = self._lineage.missing(branch)
        if made:
            return made
        ranks = {branch.membership.rank_of(node) for node in self._recovery.missing()}
        known = tuple(sorted(rank for rank in ranks if rank is not None))
        return known or tuple(rank for rank in range(branch.group.size) if rank != branch.group.rank)

    def _ask(self, branch: Branch) -> bool:
        """Again and again: what was asked for in one epoch is forgotten in the next, which may come for other reasons
        and not concern this communicator. False: not yet, for whether a member is lost is just being found out, and
        the next is to be without it.
        """
        if branch.successor is not None:
            return True
        if self._lookout.looks_into(branch.nodes):
            return False
        epoch = self._recovery.membership.epoch  # before the look at what has come: a change between them is not missed
        if self._recovery.suspects().keys() & branch.nodes:
            self._recovery.put(Recover())  # also if a successor is being made: with who is lost it comes to nothing
        elif not self._lineage.is_concerned(branch):
            self._recovery.put(Wanted(renewed=(branch.communicator,), epoch=epoch))
        return True
