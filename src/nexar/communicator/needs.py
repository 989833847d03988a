"""Members that somebody here needs, on which communicator.

Who has closed leaves the world quietly, and the communicators that have it go on. Whoever needs it all the same wants a
successor of that communicator. What is wanted is forgotten with each change of the world, which may come for other
reasons and not concern that communicator: so it is remembered here, and asked for again until there is one.
"""

from __future__ import annotations

from typing import NamedTuple

from nexar.cluster.membership import Membership
from nexar.communicator.course import Course
from nexar.types import NodeId


class _Need(NamedTuple):
    membership: Membership
    nodes: set[NodeId]


class Needs:
    """Of one node. Under the lock of who has it."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._open: dict[int, _Need] = {}  # by communicator: of its newest generation

    def add(self, communicator: int, membership: Membership, node: NodeId) -> None:
        """A call on this generation needs this member. Nothing, if that generation is over anyway."""
        if self._course.following(communicator, membership) is not None:
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
        is_member = self._course.world.rank_of
        self._open = {
            each: need for each, need in self._open.items() if self._course.following(each, need.membership) is None
        }
        return tuple(
            sorted(each for each, need in self._open.items() if any(is_member(node) is None for node in need.nodes))
        )

    def forget(self, communicator: int) -> None:
        """Nobody here uses it any more."""
        self._open.pop(communicator, None)
