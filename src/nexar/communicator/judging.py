"""What a call raises that ended because its communicator is over: with what to go on, or why there is nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy

from nexar.cluster.membership import Membership
from nexar.communicator.branch import Branch
from nexar.communicator.course import Course
from nexar.communicator.fate import Fate
from nexar.communicator.needs import Needs
from nexar.config import Config
from nexar.errors import LinkClosed, NexarError, PeerLost, Revoked
from nexar.group import Group
from nexar.types import NodeId


class Judging:
    """What a lineage says to calls. Any thread."""

    _config: Config
    _changed: threading.Condition
    _course: Course
    _needs: Needs
    _closed: bool
    _end: Callable[[Group], NexarError] | None
    missed: Callable[[NodeId, str], None]
    """Told that somebody here needs a member that cannot be reached."""
    renew: Callable[[tuple[int, ...], int], None]
    """Told that these communicators want a successor, in the world of this epoch. Must not block."""

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
        node = _member(branch, error)
        if node is None or self._config.recovery_policy != "manual":
            return error
        self.missed(node, getattr(error, "cause", "it left"))  # what the user asks for is to be without it
        return PeerLost(
            rank=branch.membership.rank_of(node),
            node=node,
            address=getattr(error, "address", None),
            cause=getattr(error, "cause", "it left"),
            operation=getattr(error, "operation", None),
            remedy="comm.shrink() gives the next communicator, without it",
        )

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
        node = _member(branch, error) if self._config.recovery_policy == "automatic" else None
        if node is None:
            return False
        self.need(branch.communicator, branch.membership, node, getattr(error, "cause", "it left"))
        return True

    # -- who is needed -----------------------------------------------------------------------------------------

    def need(self, communicator: int, membership: Membership, node: NodeId, cause: str) -> None:
        """Somebody here needs this member of this generation, and cannot reach it. If it is lost, the others agree on
        that; if it has left the world already, this communicator gets a successor without it. Never blocks.
        """
        with self._changed:
            self._needs.add(communicator, membership, node)
        self.missed(node, cause)
        self._ask_again()

    def gone_from(self, branch: Branch) -> dict[NodeId, str]:
        """Members of it that are none of the world any more, and why."""
        with self._changed:
            return self._course.gone_from(branch.membership)

    def wait_for_following(self, communicator: int, membership: Membership, deadline: float) -> Membership | None:
        """Who goes on after this generation of it, if something that concerns it is chosen in time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._course.following(communicator, membership) or self._closed or self._end is not None,
                max(0.0, deadline - time.monotonic()),
            )
            return None if self._end is not None else self._course.following(communicator, membership)

    def _ask_again(self) -> None:
        """For what is needed and not chosen yet."""
        with self._changed:
            unmet, epoch = self._needs.unmet(), self._course.world.epoch
        if unmet:
            self.renew(unmet, epoch)


def _member(branch: Branch, error: BaseException) -> NodeId | None:
    """The member that it names as lost; None: it names none. Where this side has closed a link, the member at its other
    end had left the world: while a communicator is open nothing else closes one.
    """
    if not isinstance(error, (PeerLost, LinkClosed)):
        return None
    node = error.node
    if node is None and error.rank is not None and error.rank < branch.group.size:
        node = branch.membership.members[error.rank].node
    return node if node in branch.nodes else None
