"""The seed and the nodes of a simulation, and the conditions at its end.

The seed stores its vote and membership before it sends, as the product does.

Under the policy `abort` a loss ends the communicators of all nodes. Otherwise, when faults have ended and a majority of
the present membership is alive:

- its living members are in its epoch, and no member is dead;
- no two members are cut off from each other;
- all members use the same generation of the world's communicator;
- every other living node knows that it was expelled or lost its majority.

Without a majority, living members know that. The present membership is the newest that a living node is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Final, TypeAlias

from nexar.cluster.decisions.membership_events import ChangeRequested, Loss, LossKind, PeerLossFound, ResignRequested
from nexar.cluster.decisions.paxos import Vote
from nexar.cluster.decisions.seed_voter import SeedVoter
from nexar.cluster.membership import WORLD, Departure, Member, Membership, PinnedNode
from nexar.testing.simulator.application import ApplicationPlan
from nexar.testing.simulator.laws import ReferenceElectorate
from nexar.testing.simulator.nodes import MachineFactory, SimulatedMember, SimulatedNode
from nexar.testing.simulator.world import PROBE_TIMEOUT, SimulationContext
from nexar.types import NodeId

SEED: Final[NodeId] = 1_000_000
_ADMISSION_INTERVAL: Final = 0.5  # seconds between two join requests of a joiner


def first_membership(nodes: int, random: Random, *, has_seed: bool) -> Membership:
    """Node ids and ranks have different orders, as in reality."""
    order = list(range(1, nodes + 1))
    random.shuffle(order)
    seed = PinnedNode(SEED, _fingerprint(SEED)) if has_seed else None
    return Membership("simulated", 1, tuple(map(described_member, order)), seed=seed)


def described_member(node: NodeId) -> Member:
    """A member as the membership describes it."""
    return Member(node, f"host-{node}", _fingerprint(node), {"tls": ("10.0.0.1:1",)})


def _fingerprint(node: NodeId) -> bytes:
    return node.to_bytes(32, "big")


SeedVoterFactory: TypeAlias = Callable[[Membership, Vote | None, bool], SeedVoter]
"""Arguments: membership, stored vote, whether it may vote."""


def seed_voter(membership: Membership, vote: Vote | None, may_vote: bool) -> SeedVoter:
    """The product's machine."""
    return SeedVoter(membership, vote=vote, may_vote=may_vote, probe_timeout=PROBE_TIMEOUT)


class SimulatedSeed(SimulatedNode):
    """The seed and its disk."""

    def __init__(
        self, world: SimulationContext, node: NodeId, membership: Membership, voter_factory: SeedVoterFactory
    ) -> None:
        super().__init__(world, node)
        self.may_vote = True
        self._first = membership
        self._voter_factory = voter_factory
        self._seed_voter = voter_factory(membership, None, True)
        self._admitted: frozenset[NodeId] = frozenset()
        self._disk: tuple[Membership, Vote | None] = (membership, None)
        world.laws.enters(node, membership.epoch)

    @property
    def machine(self) -> SeedVoter:
        return self._seed_voter

    def admit(self, node: NodeId) -> None:
        self._admitted |= {node}
        self._seed_voter.admitted = self._admitted

    def restart(self, *, with_state: bool) -> None:
        """Without its state it knows only the first membership and may not vote."""
        if self.alive:
            return
        self.alive = True
        self.may_vote = self.may_vote and with_state
        membership, vote = self._disk if with_state else (self._first, None)
        self._world.timeline.record(f"the seed is started again{'' if with_state else ' without its state'}")
        self._world.laws.enters(self.node, membership.epoch)
        self._seed_voter = self._voter_factory(membership, vote, self.may_vote)
        self._seed_voter.admitted = self._admitted

    def _after_step(self) -> None:
        """Stores the state before messages leave."""
        self._disk = (self._seed_voter.membership, self._seed_voter.vote)


class SimulatedCluster:
    """Members, joiners and the seed."""

    def __init__(
        self,
        world: SimulationContext,
        machine_factory: MachineFactory,
        voter_factory: SeedVoterFactory,
        program: ApplicationPlan | None = None,
    ) -> None:
        """`program`: what the applications of the members do."""
        self.world = world
        self.members: dict[NodeId, SimulatedMember] = {}
        """Present, future and former members."""
        self.seed: SimulatedSeed | None = None
        self._machine_factory = machine_factory
        self._voter_factory = voter_factory
        self._program = program

    def form(self, clock: Callable[[], tuple[float, float]]) -> None:
        """Creates the first members and the seed. `clock` draws the rate and offset of a node's clock."""
        first = self.world.laws.last
        members = [self._add_member(member.node, clock()) for member in first.members]
        for member in members:
            member.begin(first)
        if first.seed is not None:
            self.seed = SimulatedSeed(self.world, first.seed.node, first, self._voter_factory)
            self.world.nodes[first.seed.node] = self.seed

    def _add_member(self, node: NodeId, clock: tuple[float, float]) -> SimulatedMember:
        member_added = SimulatedMember(
            self.world,
            node,
            self._machine_factory,
            rate=clock[0],
            ahead=clock[1],
            program=self._program,
            fails=self.fail,
        )
        self.world.links.ends[node] = member_added
        self.members[node] = self.world.nodes[node] = member_added
        return member_added

    # -- state

    @property
    def last(self) -> Membership:
        """The membership of the highest epoch chosen."""
        return self.world.laws.last

    def running(self) -> list[SimulatedMember]:
        """Running members by rank."""
        found = (self.members[member.node] for member in self.last.members)
        return [member for member in found if member.running]

    def is_settled(self) -> bool:
        """Whether a collective could finish now."""
        last = self.last
        everybody = (self.members[member.node] for member in last.members)
        return not self.world.network.partitions and all(
            each.running and each.epoch == last.epoch for each in everybody
        )

    # -- departures

    def crash(self, node: NodeId, *, silent: bool = False) -> None:
        """Ends a process. Unless `silent`, the kernel notifies connected peers."""
        member = self.members[node]
        if not member.alive:
            return
        member.die("with its host" if silent else "killed")
        if silent:
            self.world.links.host_died(node)
        else:
            self.world.links.process_ended(node, "its process has ended")
            self._notify(member, Loss(LossKind.ENDED, "its process has ended"), willing=False)

    def leave(self, node: NodeId) -> None:
        member = self.members[node]
        if member.running:
            member.has_left = True
            member.die("it leaves")
            peers = [each.node for each in self.last.members]
            self.world.links.process_ended(node, "it has left", left=True, peers=peers)
            self._notify(member, Loss(LossKind.LEFT, "it has left"), willing=True)

    def close(self, node: NodeId, seconds: float) -> None:
        """Its user closes the node. Its process ends later."""
        member = self.members[node]
        member.close()
        self.world.timeline.after(seconds, lambda: member.when_running(lambda: self.leave(node)))

    def fail(self, node: NodeId) -> None:
        """An exception ends the process, which says so."""
        member = self.members[node]
        if member.running:
            member.die("an exception ends it")
            self.world.links.process_ended(node, "it raised")
            self._notify(member, Loss(LossKind.RAISED, "it raised"), willing=False)

    def _notify(self, gone: SimulatedMember, loss: Loss, *, willing: bool) -> None:
        """Notifies the watchers, or all members if it announced its end."""
        is_announced = willing or loss.kind is LossKind.RAISED
        others = [each.node for each in self.last.members] if is_announced else gone.connected_peers()
        for other in others:
            listener = self.members[other]
            if other != gone.node and self.world.network.open(gone.node, other):
                seconds = 0.001 + self.world.random.random() * 0.03 + self.world.network.lag(other)
                self.world.timeline.after(seconds, _loss_event(listener, PeerLossFound(gone.node, loss, willing)))

    def resign(self, node: NodeId) -> None:
        self.members[node].handle(ResignRequested("it wants to"))

    def release(self, nodes: Iterable[NodeId]) -> None:
        """All members request the departure, as after a collective."""
        self._request_change(ChangeRequested(left=tuple(Departure(node, "released", willing=True) for node in nodes)))

    # -- joins

    def join(self, count: int, clock: Callable[[], tuple[float, float]]) -> None:
        """All members request the joins, as after a collective."""
        first = len(self.members) + 1
        nodes = range(first, first + count)
        for node in nodes:
            self.world.laws.admitted.add(node)
            joiner = self._add_member(node, clock())
            if self.seed is not None:
                self.seed.admit(node)
            self._request_admission(joiner, [member.node for member in self.last.members])
        self._request_change(ChangeRequested(joined=tuple(described_member(node) for node in nodes)))

    def _request_change(self, change: ChangeRequested) -> None:
        """Each member requests it when its call returns, unless the epoch has ended by then."""
        epoch = self.last.epoch
        for member in self.running():
            self.world.timeline.after(self.world.random.random() * 0.05, _change_event(member, change, epoch))

    def _request_admission(self, joiner: SimulatedMember, known: list[NodeId]) -> None:
        """Asks members until one admits or rejects the joiner."""
        if not joiner.alive or joiner.membership_machine is not None or joiner.is_expelled:
            return
        for node in self.world.random.sample(known, min(3, len(known))):
            if joiner.running and self.world.reaches(joiner.node, node) and self._answers(joiner, self.members[node]):
                return
        self.world.timeline.after(_ADMISSION_INTERVAL, lambda: self._request_admission(joiner, known))

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


def _loss_event(member: SimulatedMember, event: PeerLossFound) -> Callable[[], None]:
    def report_loss() -> None:
        if (
            member.membership_machine is not None
            and member.membership_machine.membership.rank_of(event.node) is not None
        ):
            if event.willing:
                member.left(event.node)
            else:
                member.lose(event.node, event.loss)

    return lambda: member.when_running(report_loss)


def _change_event(member: SimulatedMember, change: ChangeRequested, epoch: int) -> Callable[[], None]:
    def request() -> None:
        if member.epoch == epoch and not member.is_expelled:
            member.handle(change)

    return lambda: member.when_running(request)


def unmet_conditions(cluster: SimulatedCluster) -> Iterator[str]:
    """End conditions that do not hold yet."""
    present = present_membership(cluster)
    if present is None:
        return
    if cluster.world.policy == "abort" and (lost := _lost_members(cluster)):
        for node in _continuing(cluster):
            yield f"node {node} continues although nodes {lost[:3]} are lost"
        return
    if majority_lives(cluster, present):
        yield from _member_conditions(cluster, present)
    else:
        yield from _minority_conditions(cluster, present)
    yield from _outsider_conditions(cluster, present)


def _lost_members(cluster: SimulatedCluster) -> list[NodeId]:
    """Those that died, or ended their communicators because of a loss."""
    return [node for node, each in cluster.members.items() if each.is_aborted or each.is_lost]


def _continuing(cluster: SimulatedCluster) -> Iterator[NodeId]:
    for node, each in cluster.members.items():
        if each.alive and each.epoch and not (each.is_aborted or each.is_expelled):
            yield node


def present_membership(cluster: SimulatedCluster) -> Membership | None:
    """The newest membership that a living node is in."""
    epochs = [each.epoch for each in cluster.members.values() if each.alive and each.epoch and not each.is_expelled]
    return cluster.world.laws.memberships[max(epochs)] if epochs else None


def majority_lives(cluster: SimulatedCluster, present: Membership) -> bool:
    """Whether a living member reaches a majority of the votes."""
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


def _member_conditions(cluster: SimulatedCluster, present: Membership) -> Iterator[str]:
    members = {each.node: cluster.members[each.node] for each in present.members}
    for node, member in members.items():
        if not member.alive:
            yield f"node {node} is dead, and a member of epoch {present.epoch}"
        elif member.epoch != present.epoch:
            yield f"node {node} is in epoch {member.epoch}, and a member of epoch {present.epoch}"
    for one, other in sorted(cluster.world.network.cuts):
        if one in members and other in members:
            yield f"nodes {one} and {other} cannot reach each other, and are members of epoch {present.epoch}"


def _minority_conditions(cluster: SimulatedCluster, present: Membership) -> Iterator[str]:
    for each in present.members:
        member = cluster.members[each.node]
        if member.alive and not _knows_its_state(member):
            yield f"node {each.node} does not know that the majority of epoch {member.epoch} is lost"


def _outsider_conditions(cluster: SimulatedCluster, present: Membership) -> Iterator[str]:
    for node, member in cluster.members.items():
        removed = cluster.world.laws.removed.get(node)
        if removed is not None and removed <= present.epoch and member.alive and not _knows_its_state(member):
            yield f"node {node} does not know that it was removed in epoch {removed}"


def unmet_communicators(cluster: SimulatedCluster) -> Iterator[str]:
    """Members of the present membership that cannot use the world's communicator together with the others."""
    present = present_membership(cluster)
    members = [] if present is None else [cluster.members[each.node] for each in present.members]
    worlds = {each.node: each.application.usable(WORLD) for each in members if each.application is not None}
    newest = max((key for key in worlds.values() if key is not None), default=None)
    for node, key in worlds.items():
        if key is None or key != newest:
            yield f"node {node} uses generation {key} of the world, others {newest}"


def _knows_its_state(member: SimulatedMember) -> bool:
    return member.is_expelled or member.is_stalled or member.epoch == 0
