"""Makes the communicators of one node: the first, and those that are split off it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from nexar.cluster.change import WORLD
from nexar.cluster.membership import Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.opening import EAGER_WORLD, open_all
from nexar.collectives.assembly import Assembly
from nexar.collectives.journal import Journal
from nexar.collectives.recorder import KEPT, TRACED
from nexar.collectives.trace_part import PartWriter
from nexar.communicator.branch import Branch
from nexar.communicator.settling import ANYTHING, Completed, settle
from nexar.communicator.sharing import Sharing, may_share
from nexar.communicator.whereabouts import Whereabouts
from nexar.config import Config
from nexar.errors import PeerLost
from nexar.group import Group
from nexar.topology.neighbors import FULL_MESH
from nexar.transport.foreign_text import several_lines
from nexar.types import NodeId


class Maker:
    """Of one node. Any thread."""

    def __init__(self, node: Node, mesh: Mesh, config: Config) -> None:
        self.config = config
        self._node = node
        self._mesh = mesh
        self._whereabouts = Whereabouts(node.progress)

    def lose(self, node: NodeId, cause: str) -> None:
        """This node is no member any more: whoever still waits for it, on a communicator that has it, is told. Whatever
        it said before can still be received; where some of that may still be on its way, the end of its link tells.
        """
        if self._mesh.leavers.has(node):
            return
        router = self._mesh.router
        with router.lock:
            router.lose(node, PeerLost(node=node, cause=several_lines(cause)))
        router.outbox.flush()
        self._node.progress.kick()  # who waits may lead, and sleep

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
            directory = self.config.trace_dir
            kept = KEPT if directory is None else TRACED
            journal = Journal(group, kept=kept, beside=self._whereabouts.beside)
            self._whereabouts.add(journal)
            undo.callback(self._whereabouts.remove, journal)
            if directory is not None:
                undo.callback(PartWriter(directory, group, journal).write)
            undo.callback(journal.close)
            arena, shared = None, False
            topology = self.config.topology if communicator == WORLD else FULL_MESH  # of a part it is found out
            if may_share(membership, topology):
                sharing = Sharing(group, deadline)
                arena = sharing.agree(journal)
                shared = sharing.shared
                undo.callback(sharing.close)
            assembly = Assembly(group, self.config, journal, arena, shared=shared)
            undo.callback(assembly.scratch.close)
            return Branch(assembly, undo.pop_all().close), least
