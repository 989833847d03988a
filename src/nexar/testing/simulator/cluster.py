"""The people of a simulation: who is there, who dies, who comes, who goes.

How a run must end. When nothing goes wrong any more, and a majority of the present membership lives:

- all its living members are in its epoch, and nobody in it is dead;
- no two of them are cut off from each other;
- every living node that is not in it knows that it was expelled, or that it has lost its majority.

When the majority is lost for good, its living members must know that.

The present membership is the newest that anybody alive is in: what only the dead knew binds nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Final

from nexar.cluster.decisions.membership_events import ChangeRequested, PeerLossFound, ResignRequested
from nexar.cluster.membership import Departure, Member, Membership, PinnedNode
from nexar.testing.simulator.laws import ReferenceElectorate
from nexar.testing.simulator.nodes import MachineFactory, SeedVoterFactory, SimulatedMember, SimulatedSeed
from nexar.testing.simulator.world import SimulationContext
from nexar.types import NodeId

SEED: Final[NodeId] = 1_000_000
_ASKS_EVERY: Final = 0.5
"""Seconds between two questions of a joiner whether it is in."""


def first_membership(nodes: int, random: Random, *, has_seed: bool) -> Membership:
    """The cluster as it was formed. Ids and ranks have different orders, as in life."""
    order = list(range(1, nodes + 1))
    random.shuffle(order)
    seed = PinnedNode(SEED, _fingerprint(SEED)) if has_seed else None
    return Membership("simulated", 1, tuple(map(described_member, order)), seed=seed)


def described_member(node: NodeId) -> Member:
    """A member as the membership knows it."""
    return Member(node, f"host-{node}", _fingerprint(node), {"tls": ("10.0.0.1:1",)})


def _fingerprint(node: NodeId) -> bytes:
    return node.to_bytes(32, "big")


class SimulatedCluster:
    """Members, joiners, the seed."""

    def __init__(
        self,
        world: SimulationContext,
        machine_factory: MachineFactory,
        voter_factory: SeedVoterFactory,
        *,
        asked: bool = False,
    ) -> None:
        """`asked`: members recover only when their user asks for it."""
        self.world = world
        self.members: dict[NodeId, SimulatedMember] = {}
        """Everybody who ever was, or wanted to be, a member."""
        self.seed: SimulatedSeed | None = None
        self._machine_factory = machine_factory
        self._voter_factory = voter_factory
        self._asked = asked

    def form(self, clock: Callable[[], tuple[float, float]]) -> None:
        """Bring the first membership to life. `clock` draws the rate and offset of a node's clock."""
        first = self.world.laws.last
        for member in first.members:
            self._appear(member.node, clock()).begin(first)
        if first.seed is not None:
            self.seed = SimulatedSeed(self.world, first.seed.node, first, self._voter_factory)
            self.world.nodes[first.seed.node] = self.seed

    def _appear(self, node: NodeId, clock: tuple[float, float]) -> SimulatedMember:
        appeared = SimulatedMember(
            self.world, node, self._machine_factory, rate=clock[0], ahead=clock[1], asked=self._asked
        )
        self.members[node] = self.world.nodes[node] = appeared
        return appeared

    # -- who is there

    @property
    def last(self) -> Membership:
        """Of the highest epoch that was chosen."""
        return self.world.laws.last

    def running(self) -> list[SimulatedMember]:
        """The members of the last membership that run, by rank."""
        found = (self.members[member.node] for member in self.last.members)
        return [member for member in found if member.running]

    def is_calm(self) -> bool:
        """Whether a collective of all members could be finished now: everybody runs, in one epoch, on open ways."""
        last = self.last
        everybody = (self.members[member.node] for member in last.members)
        return not self.world.network.partitions and all(
            each.running and each.epoch == last.epoch for each in everybody
        )

    # -- who goes

    def crash(self, node: NodeId, *, silent: bool = False) -> None:
        """A process ends. Unless its whole host is gone, the kernel tells those who hold a line to it."""
        member = self.members[node]
        if not member.alive:
            return
        member.die("with its host" if silent else "killed")
        if not silent:
            self._tell(member, "its process has ended", willing=False)

    def leave(self, node: NodeId) -> None:
        """A process says goodbye and ends."""
        member = self.members[node]
        if member.running:
            member.die("it leaves")
            self._tell(member, "it has left", willing=True)

    def _tell(self, gone: SimulatedMember, cause: str, *, willing: bool) -> None:
        """Those who hold a line to it: its watchers if it died, everybody if it said so itself."""
        others = [each.node for each in self.last.members] if willing else gone.lines()
        for other in others:
            listener = self.members[other]
            if other != gone.node and self.world.network.open(gone.node, other):
                seconds = 0.001 + self.world.random.random() * 0.03 + self.world.network.lag(other)
                self.world.timeline.after(seconds, _losing(listener, PeerLossFound(gone.node, cause, willing)))

    def resign(self, node: NodeId) -> None:
        """A member asks the others to go on without it."""
        self.members[node].happens(ResignRequested("it wants to"))

    def release(self, nodes: Iterable[NodeId]) -> None:
        """All members have agreed, in a collective, that these leave."""
        self._want(ChangeRequested(left=tuple(Departure(node, "released", willing=True) for node in nodes)))

    # -- who comes

    def join(self, count: int, clock: Callable[[], tuple[float, float]]) -> None:
        """All members have agreed, in a collective, to let some newcomers in."""
        first = len(self.members) + 1
        nodes = range(first, first + count)
        for node in nodes:
            self.world.laws.admitted.add(node)
            joiner = self._appear(node, clock())
            if self.seed is not None:
                self.seed.admit(node)
            self._ask(joiner, [member.node for member in self.last.members])
        self._want(ChangeRequested(joined=tuple(described_member(node) for node in nodes)))

    def _want(self, wish: ChangeRequested) -> None:
        """Each tells its own machine, when its call returns: unless the communicator that agreed is over by then."""
        epoch = self.last.epoch
        for member in self.running():
            self.world.timeline.after(self.world.random.random() * 0.05, _wanting(member, wish, epoch))

    def _ask(self, joiner: SimulatedMember, known: list[NodeId]) -> None:
        """Ask some members again and again, until one of them says yes, or that it is over."""
        if not joiner.alive or joiner.membership_machine is not None or joiner.is_expelled:
            return
        for node in self.world.random.sample(known, min(3, len(known))):
            if joiner.running and self.world.reaches(joiner.node, node) and self._answers(joiner, self.members[node]):
                return
        self.world.timeline.after(_ASKS_EVERY, lambda: self._ask(joiner, known))

    def _answers(self, joiner: SimulatedMember, member: SimulatedMember) -> bool:
        membership_machine = member.membership_machine
        if membership_machine is None or member.is_expelled:
            return False
        if membership_machine.membership.rank_of(joiner.node) is not None:
            joiner.begin(membership_machine.membership)
            return True
        removed = self.world.laws.removed.get(joiner.node)
        joiner.is_expelled = removed is not None and removed <= member.epoch
        return joiner.is_expelled


def _losing(member: SimulatedMember, event: PeerLossFound) -> Callable[[], None]:
    def lose() -> None:
        if (
            member.membership_machine is not None
            and member.membership_machine.membership.rank_of(event.node) is not None
        ):
            member.happens(event)

    return lambda: member.when_running(lose)


def _wanting(member: SimulatedMember, wish: ChangeRequested, epoch: int) -> Callable[[], None]:
    def want() -> None:
        if member.epoch == epoch and not member.is_expelled:
            member.happens(wish)

    return lambda: member.when_running(want)


def unmet_conditions(cluster: SimulatedCluster) -> Iterator[str]:
    """What is not yet as it must be in the end. Nothing: the cluster has settled."""
    present = present_membership(cluster)
    if present is None:
        return
    if majority_lives(cluster, present):
        yield from _of_members(cluster, present)
    else:
        yield from _of_the_stuck(cluster, present)
    yield from _of_strangers(cluster, present)


def present_membership(cluster: SimulatedCluster) -> Membership | None:
    """The newest that a living node is in; None: there is nobody left."""
    epochs = [each.epoch for each in cluster.members.values() if each.alive and each.epoch and not each.is_expelled]
    return cluster.world.laws.memberships[max(epochs)] if epochs else None


def majority_lives(cluster: SimulatedCluster, present: Membership) -> bool:
    """Whether a membership can still decide what comes next: one of its members lives and reaches a majority of the
    votes that are left.
    """
    electorate, network = ReferenceElectorate.of(present), cluster.world.network
    votes = [node for node in electorate.voters if _votes(cluster, node)]
    if len(votes) < electorate.majority or not network.cuts:
        return len(votes) >= electorate.majority
    living = (member.node for member in present.members if cluster.members[member.node].alive)
    return any(sum(network.both_ways(node, vote) for vote in votes) >= electorate.majority for node in living)


def _votes(cluster: SimulatedCluster, node: NodeId) -> bool:
    member = cluster.members.get(node)
    if member is not None:
        return member.alive
    return cluster.seed is not None and cluster.seed.alive and cluster.seed.may_vote


def _of_members(cluster: SimulatedCluster, present: Membership) -> Iterator[str]:
    members = {each.node: cluster.members[each.node] for each in present.members}
    for node, member in members.items():
        if not member.alive:
            yield f"node {node} is dead, and a member of epoch {present.epoch}"
        elif member.epoch != present.epoch:
            yield f"node {node} is in epoch {member.epoch}, and a member of epoch {present.epoch}"
    for one, other in sorted(cluster.world.network.cuts):
        if one in members and other in members:
            yield f"nodes {one} and {other} cannot reach each other, and are members of epoch {present.epoch}"


def _of_the_stuck(cluster: SimulatedCluster, present: Membership) -> Iterator[str]:
    for each in present.members:
        member = cluster.members[each.node]
        if member.alive and not _knows(member):
            yield f"node {each.node} does not know that the majority of epoch {member.epoch} is lost"


def _of_strangers(cluster: SimulatedCluster, present: Membership) -> Iterator[str]:
    for node, member in cluster.members.items():
        removed = cluster.world.laws.removed.get(node)
        if removed is not None and removed <= present.epoch and member.alive and not _knows(member):
            yield f"node {node} does not know that it was removed in epoch {removed}"


def _knows(member: SimulatedMember) -> bool:
    return member.is_expelled or member.is_stalled or member.epoch == 0
