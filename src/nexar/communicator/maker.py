"""Makes the communicators of one node: the first, and those that are split off it; and closes them all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from nexar.cluster.membership import Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.opening import EAGER_WORLD, open_all
from nexar.collectives.assembly import Assembly
from nexar.collectives.journal import Journal
from nexar.communicator.branch import WORLD, Branch
from nexar.communicator.settling import ANYTHING, Completed, settle
from nexar.communicator.sharing import Sharing, may_share
from nexar.config import Config
from nexar.errors import UsageError
from nexar.group import Group

_CLOSED: Final = object()


class Maker:
    """Of one node. Any thread."""

    def __init__(self, node: Node, mesh: Mesh, config: Config) -> None:
        self.config = config
        self._node = node
        self._mesh = mesh
        self._closed = False  # written by who closes, before it looks at the next
        self._open: dict[Callable[[], None], None] = {}  # what closes each; dict methods are atomic

    def make(
        self,
        membership: Membership,
        communicator: int,
        deadline: float,
        completed: Completed | None = None,
        begun: Callable[[Group], None] | None = None,
    ) -> tuple[Branch, int]:
        """One generation, that of the membership's epoch, together with all its members. `completed`: it succeeds
        another one, and this is what this member has completed in that; what all have is returned. `begun` is told of
        the group: who closes it meanwhile ends the making.

        PeerLost, OperationTimeout: a member did not take part in time; nothing is left behind then.
        """
        with ExitStack() as undo:
            group = Group(self._node, self._mesh, membership, communicator, membership.epoch)
            undo.callback(group.close)
            if begun is not None:
                begun(group)
            if communicator == WORLD and membership.size <= EAGER_WORLD and self._node.meets_strangers:
                open_all(self._mesh, deadline)
            least = ANYTHING if completed is None else settle(group, completed, deadline)
            journal = Journal(group)
            undo.callback(journal.close)
            arena, shared = None, False
            if may_share(membership):
                sharing = Sharing(group, deadline)
                arena = sharing.agree(journal)
                shared = sharing.shared
                undo.callback(sharing.close)
            assembly = Assembly(group, self.config, journal, arena, shared=shared)
            undo.callback(assembly.scratch.close)
            ends = undo.pop_all()

        def close() -> None:
            if self._open.pop(close, _CLOSED) is not _CLOSED:
                ends.close()

        self._open[close] = None
        if self._closed:  # meanwhile; whoever closes has looked before this one was there
            close()
            raise UsageError("this node is closed; make a new one with nexar.init()")
        return Branch(assembly, close), least

    def close(self) -> None:
        """Every communicator. Idempotent."""
        self._closed = True
        for close in list(self._open):
            close()
