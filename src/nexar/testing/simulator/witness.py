"""The seed of the simulated cluster: a witness, whose vote outlives it, on a disk.

What its shell does, and the product's has to do as well: keep the vote and the membership before anything is said, and
bring members that are behind up to date when they beat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from nexar.cluster.decisions.vote import Vote
from nexar.cluster.decisions.witness import Witness
from nexar.cluster.membership import Membership
from nexar.testing.simulator.inhabitant import Inhabitant
from nexar.testing.simulator.world import PROBE_TIMEOUT, World
from nexar.types import NodeId
from nexar.wire.messages import Chosen

Witnessing: TypeAlias = Callable[[Membership, Vote | None, bool], Witness]
"""How the seed's machine is made: with its vote, if it has kept one, and with the right to vote, if it may."""


def witness(membership: Membership, vote: Vote | None, may_vote: bool) -> Witness:
    """The machine of the product."""
    return Witness(membership, vote=vote, may_vote=may_vote, probe_timeout=PROBE_TIMEOUT)


class SimulatedSeed(Inhabitant):
    """The witness, and its disk."""

    def __init__(self, world: World, node: NodeId, membership: Membership, witnessing: Witnessing) -> None:
        super().__init__(world, node)
        self.may_vote = True
        self._first = membership
        self._witnessing = witnessing
        self._witness = witnessing(membership, None, True)
        self._admitted: frozenset[NodeId] = frozenset()
        self._disk: tuple[Membership, Vote | None] = (membership, None)
        world.laws.enters(node, membership.epoch)

    @property
    def mind(self) -> Witness:
        """See Inhabitant."""
        return self._witness

    def admit(self, node: NodeId) -> None:
        """Somebody waits to come in."""
        self._admitted |= {node}
        self._witness.admitted = self._admitted

    def restart(self, *, with_state: bool) -> None:
        """It comes back; without its state it knows the cluster as it was formed, and may not vote."""
        if self.alive:
            return
        self.alive = True
        self.may_vote = self.may_vote and with_state
        membership, vote = self._disk if with_state else (self._first, None)
        self._world.timeline.record(f"the seed is started again{'' if with_state else ' without its state'}")
        self._world.laws.enters(self.node, membership.epoch)
        self._witness = self._witnessing(membership, vote, self.may_vote)
        self._witness.admitted = self._admitted

    def felt(self, sender: NodeId, epoch: int) -> None:
        """A beat of a member."""
        for number, value in enumerate(self._witness.changes_since(epoch), start=epoch):
            self._world.say(self.node, sender, Chosen((0, number, 0), value))

    def _stepped(self) -> None:
        """On the disk, before it is said."""
        self._disk = (self._witness.membership, self._witness.vote)
