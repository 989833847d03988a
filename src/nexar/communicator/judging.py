"""What a call raises that ended because its communicator is over: with what to go on, or why there is nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy

from nexar.communicator.branch import Branch
from nexar.communicator.fate import Fate
from nexar.config import Config
from nexar.errors import LinkClosed, NexarError, PeerLost, Revoked
from nexar.types import NodeId


class Judging:
    """What a lineage says to calls. Any thread."""

    _config: Config
    missed: Callable[[NodeId, str], None]

    def judge(self, branch: Branch, error: BaseException) -> BaseException:
        """What a call on this branch has to raise that ended with this error. Under the automatic policy it waits
        until the survivors have agreed, if that is what it takes; never longer than `recovery_timeout` and a little.
        """
        fate = self.fate_after(branch, error)
        if fate is None:
            return self._advised(branch, error)
        if not fate.done:
            with suppress(NexarError):  # it is looked at below
                branch.group.wait((fate,), time.monotonic() + 1.5 * self._config.recovery_timeout)
        return copy(fate.error) if fate.error is not None else error

    def _advised(self, branch: Branch, error: BaseException) -> BaseException:
        """Under the manual policy the user has to ask for the successor."""
        if self._config.recovery_policy != "manual" or not isinstance(error, PeerLost):
            return error
        member = _member(branch, error)
        return error if member is None else error.advising("comm.shrink() gives the next communicator, without it")

    def fate_after(self, branch: Branch, error: BaseException) -> Fate | None:
        """What a call has to wait for that ended with this error; None if that is all there is to say."""
        consequence = isinstance(error, (PeerLost, Revoked, LinkClosed))
        if not consequence or not (branch.fate.done or self._concerns(branch, error)):
            return None
        return branch.fate

    def _concerns(self, branch: Branch, error: BaseException) -> bool:
        """Whether there will be a fate to wait for; if nobody has seen to it yet, this does."""
        if branch.interrupted:
            return True
        if not isinstance(error, PeerLost) or self._config.recovery_policy != "automatic":
            return False
        node = _member(branch, error)
        if node is None:
            return False
        self.missed(node, error.cause)
        return True


def _member(branch: Branch, error: PeerLost) -> NodeId | None:
    """The member that it names; None: it names none."""
    node = error.node
    if node is None and error.rank is not None and error.rank < branch.group.size:
        node = branch.membership.members[error.rank].node
    return node if node in branch.nodes else None
