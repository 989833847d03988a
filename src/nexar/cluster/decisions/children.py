"""What launchers say of their children before the cluster has formed. Pure.

A child that has died is not replaced, so the formation waits in vain for its rank. One that ended well may never have
wanted to come: that is known only when somebody else waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from nexar.cluster.decisions.admission_events import ChildDied, Note
from nexar.cluster.decisions.formation import Formation
from nexar.cluster.decisions.guest import Guest
from nexar.cluster.decisions.refusals import Refusal
from nexar.types import NodeId

_MAX_CAUSE: Final = 4096  # characters of a child's traceback that are noted, the last ones


class Children:
    """Of all launchers."""

    def __init__(self, launchers: Mapping[NodeId, Guest]) -> None:
        """`launchers`: those that are connected."""
        self._launchers = launchers
        self._ended: dict[NodeId, ChildDied] = {}  # by launcher: a child that ended well and had never come

    def ended(self, formation: Formation, guest: Guest, event: ChildDied, *, somebody_waits: bool) -> tuple[Note, bool]:
        """What is to be noted of the end of a child, and whether the formation waits for it in vain. Refusal if it is
        not this guest's. Children without ranks are not waited for.
        """
        if guest.node is None or self._launchers.get(guest.node) is not guest:
            raise Refusal("it reported the end of a child, and is no launcher")
        has_ranks = formation.has_block(guest.node)
        if has_ranks and not formation.is_child(guest.node, event.rank):
            raise Refusal(f"it reported rank {event.rank} as its child, which it is not")
        holder = formation.holder(event.rank) if has_ranks else None
        died = Note("child died", guest.address, holder, event.rank, event.cause[-_MAX_CAUSE:])
        if has_ranks and event.well and not somebody_waits:  # perhaps none wants to come: then nothing has failed
            self._ended[guest.node] = event
            return died, False
        return died, has_ranks

    def forget(self, launcher: NodeId) -> None:
        """Its launcher is gone. Idempotent."""
        self._ended.pop(launcher, None)

    @property
    def missing(self) -> list[ChildDied]:
        """Those that ended well when nobody waited for them."""
        return list(self._ended.values())
