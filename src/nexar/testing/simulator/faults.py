"""Random faults of a run. Each ends by itself or with `FaultInjector.end`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from random import Random
from typing import Final, NamedTuple

from nexar.cluster.decisions.membership_events import Loss, LossKind
from nexar.cluster.decisions.successor_events import GenerationKey, RevokeReceived, Superseded
from nexar.cluster.membership import WORLD
from nexar.testing.simulator.application import Application
from nexar.testing.simulator.cluster import SimulatedCluster
from nexar.testing.simulator.generations import LAST_STEP, SimulatedGeneration
from nexar.testing.simulator.nodes import SimulatedMember
from nexar.testing.simulator.world import NetworkConditions, Partition
from nexar.types import NodeId

COMMUNICATOR_FAULTS: Final = (
    "one_dies_in_a_build", "another_dies_in_a_build", "one_stops_in_a_build", "one_closes_in_a_build", "one_closes",
    "one_revokes", "one_revokes_a_new_generation", "two_revoke", "notices_are_lost", "notices_are_forged",
    "notices_flood_one", "renewal_is_requested", "one_leaves_quietly", "one_leaves_quietly", "one_closes_its_node",
    "one_closes_its_node_in_a_build",
)  # fmt: skip
"""Names of methods; one that is listed twice is drawn twice as often."""
_FLOOD: Final = 80  # notices
_STEPS: Final = (0, 0, 1, 1, 2, 3, LAST_STEP, LAST_STEP)


class CommunicatorFaults:
    """Each method is a fault and draws from the given random numbers."""

    def __init__(self, cluster: SimulatedCluster, may_lose: Callable[[int], bool]) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._may_lose = may_lose

    # -- in builds

    def one_dies_in_a_build(self, random: Random) -> None:
        """A member dies in a step of its next build."""
        self._set_trap(random, lambda node, _: self._kill(node, random))
        self._start_builds(random)

    def another_dies_in_a_build(self, random: Random) -> None:
        """A second change comes during a build."""
        self._set_trap(random, lambda _, key: self._kill(self._member_of(random, key), random))
        self._start_builds(random)

    def one_stops_in_a_build(self, random: Random) -> None:
        """A process is stopped, perhaps across two epochs, in which others die."""

        def stop(node: NodeId, _: GenerationKey) -> None:
            member = self._cluster.members[node]
            member.pause()
            self._world.timeline.after(random.uniform(0.2, 15.0), member.resume)
            others = [each for each in self._cluster.running() if each.node != node]
            if others:
                self._kill(random.choice(others).node, random)

        self._set_trap(random, stop)
        self._start_builds(random)

    def one_closes_in_a_build(self, random: Random) -> None:
        def close(node: NodeId, key: GenerationKey) -> None:
            application = self._cluster.members[node].application
            if application is not None:
                application.close_communicator(key.communicator)

        self._set_trap(random, close, parts=True)
        self._start_builds(random)

    def one_revokes_a_new_generation(self, random: Random) -> None:
        """The other members may not have opened it yet."""

        def revoke(node: NodeId, key: GenerationKey) -> None:
            application = self._cluster.members[node].application
            if application is not None and application.generations.find(key) is not None:
                application.revoke(key)

        self._set_trap(random, revoke, step=LAST_STEP)
        self._start_builds(random)

    def _set_trap(
        self,
        random: Random,
        action: Callable[[NodeId, GenerationKey], None],
        *,
        parts: bool = False,
        step: int | None = None,
    ) -> None:
        """Acts once, when any node comes to a drawn step of a build."""
        wanted = random.choice(_STEPS) if step is None else step
        skipped = random.randrange(4)

        def trap(node: NodeId, key: GenerationKey, step: int) -> bool:
            nonlocal skipped
            if step != wanted or (parts and key.communicator == WORLD) or not self._cluster.members[node].running:
                return False
            skipped -= 1
            if skipped < 0:
                self._world.timeline.after(0.0, lambda: action(node, key))
            return skipped < 0

        self._world.traps.append(trap)

    def _start_builds(self, random: Random) -> None:
        """Something that gives communicators successors."""
        living = self._cluster.running()
        if random.random() < 0.7:
            self._kill(random.choice(living).node if living else 0, random)
        else:
            self.renewal_is_requested(random)

    def _kill(self, node: NodeId, random: Random) -> None:
        member = self._cluster.members.get(node)
        if member is not None and member.running and self._may_lose(1):
            self._cluster.crash(node, silent=random.random() < 0.3)

    def _member_of(self, random: Random, key: GenerationKey) -> NodeId:
        using = [member for member in self._cluster.running() if key in _keys(member)]
        chosen = using or self._cluster.running()
        return random.choice(chosen).node if chosen else 0

    # -- users

    def one_closes(self, random: Random) -> None:
        """One user closes a part although the others go on."""
        for application in self._applications(random, 1):
            application.close_one(random)

    def one_revokes(self, random: Random) -> None:
        for application in self._applications(random, 1):
            application.revoke_one(random)

    def two_revoke(self, random: Random) -> None:
        for application in self._applications(random, 2):
            application.revoke_one(random)

    def renewal_is_requested(self, random: Random) -> None:
        """One user asks for a successor of a healthy communicator."""
        for application in self._applications(random, 1):
            application.shrink_one(random)

    def one_leaves_quietly(self, random: Random) -> None:
        """Perhaps between two calls, so that at first nobody needs it."""
        living = self._cluster.running()
        if living:
            self._leave(random.choice(living).node, tries=random.choice([0, 50, 100]))

    def _leave(self, node: NodeId, tries: int) -> None:
        is_needed = any(_is_calling(member) for member in self._cluster.running())
        if is_needed and tries:
            self._world.timeline.after(0.1, lambda: self._leave(node, tries - 1))
        elif self._may_lose(1):
            self._cluster.leave(node)

    def one_closes_its_node(self, random: Random) -> None:
        """While calls, builds and agreements run."""
        living = self._cluster.running()
        if living:
            self._close_node(random.choice(living).node, random)

    def one_closes_its_node_in_a_build(self, random: Random) -> None:
        self._set_trap(random, lambda node, _: self._close_node(node, random))
        self._start_builds(random)

    def _close_node(self, node: NodeId, random: Random) -> None:
        if self._may_lose(1):
            self._cluster.close(node, random.choice([0.0, 0.3, 2.0]))

    # -- notices

    def notices_are_lost(self, random: Random) -> None:
        """Also the ones of a revocation that follows."""
        self._world.notice_loss = random.uniform(0.2, 1.0)
        self._world.timeline.after(random.uniform(1.0, 8.0), self._deliver_notices)
        self.two_revoke(random)

    def _deliver_notices(self) -> None:
        self._world.notice_loss = 0.0

    def notices_are_forged(self, random: Random) -> None:
        """From a node that is no member, in the receiver's name, or about the close of another member."""
        for member in self._cluster.running():
            generations = [] if member.application is None else member.application.generations.open_generations()
            for generation in random.sample(generations, min(2, len(generations))):
                member.handle(_forged(random, generation, self._cluster.members))

    def notices_flood_one(self, random: Random) -> None:
        """A member tells another one of more generations than it may remember."""
        living = self._cluster.running()
        if living:
            receiver, sender = random.choice(living), random.choice(living).node
            for number in range(_FLOOD):
                key = GenerationKey(random.getrandbits(62), self._cluster.last.epoch + number % 3)
                receiver.handle(RevokeReceived(sender, key, 0, "flood", closed=random.random() < 0.5))

    def _applications(self, random: Random, count: int) -> list[Application]:
        found = [each.application for each in self._cluster.running() if each.application is not None]
        return random.sample(found, min(count, len(found)))


def _is_calling(member: SimulatedMember) -> bool:
    generations = [] if member.application is None else member.application.generations.open_generations()
    return any(each.call is not None and each.key.communicator == WORLD for each in generations)


def _keys(member: SimulatedMember) -> list[GenerationKey]:
    return [] if member.application is None else member.application.generation_keys()


def _forged(random: Random, generation: SimulatedGeneration, nodes: Iterable[NodeId]) -> RevokeReceived:
    """A false notice. A closing notice about an older generation is none: a node need not know the ranks there any
    longer, so whatever rank the notice names, it says that the sender closed the communicator.
    """
    size, key, is_newest = generation.size, generation.key, not isinstance(generation.outcome, Superseded)
    strangers = [node for node in nodes if generation.membership.rank_of(node) is None] or [10**9]
    kind = random.randrange(3)
    if kind == 0:
        sender, rank = random.choice(strangers), random.randrange(size)
        return RevokeReceived(sender, key, rank, "forged", closed=random.random() < 0.5 and is_newest)
    sender = generation.node(generation.rank + 1)
    if kind == 1 or not is_newest:
        return RevokeReceived(sender, key, generation.rank, "forged", closed=False)
    wrong = (generation.rank + 2) % size if size > 2 else generation.rank
    return RevokeReceived(sender, key, wrong, "forged", closed=True)


FAULT_SECONDS: Final = 20.0  # all faults start in this time
SLOWEST_CLOCK: Final = 0.7  # times the rate of the timeline


class PlannedFault(NamedTuple):
    """One fault of a run. It draws from its own seed, so that leaving out another one does not change it."""

    when: float
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind} at {self.when:.2f} s"


class FaultInjector:
    """Draws the faults of a run. A reckless run may lose the majority for good."""

    def __init__(self, cluster: SimulatedCluster, random: Random) -> None:
        self.planned: list[PlannedFault] = []
        self._cluster = cluster
        self._world = cluster.world
        self._random = random
        self._reckless = random.random() < 0.15
        self._drifts = random.random() < 0.3
        self._clocks = Random(random.getrandbits(64))
        self._communicator_faults = CommunicatorFaults(cluster, self._may_lose)
        self._draw()

    def _draw(self) -> None:
        """Half of the faults follow closely after another."""
        kinds, when = random_kinds(self._random), 0.0
        if self._random.random() < 0.2:
            self.planned.append(PlannedFault(0.0, "network_is_bad", self._random.getrandbits(32)))
        for _ in range(self._random.randint(1, 8)):
            right_after = when > 0.0 and self._random.random() < 0.5
            when = when + self._random.expovariate(2.0) if right_after else self._random.uniform(0.2, FAULT_SECONDS)
            kind = self._random.choice(kinds)
            self.planned.append(PlannedFault(min(when, FAULT_SECONDS), kind, self._random.getrandbits(32)))

    def plan(self, only: Collection[int] | None = None) -> None:
        """Schedules the faults; `only` those with these indices."""
        for index, fault in enumerate(self.planned):
            if only is None or index in only:
                self._world.timeline.at(fault.when, partial(self._inject, fault))

    def _inject(self, fault: PlannedFault) -> None:
        self._world.timeline.record(f"fault: {fault}")
        self._random = Random(fault.seed)
        own = getattr(self, fault.kind, None)
        if own is not None:
            own()
        else:
            getattr(self._communicator_faults, fault.kind)(self._random)

    def clock(self) -> tuple[float, float]:
        """Rate and offset of a node's clock."""
        ahead = self._clocks.uniform(0.0, 1000.0)
        return (self._clocks.uniform(SLOWEST_CLOCK, 1.4) if self._drifts else 1.0), ahead

    def end(self) -> None:
        """Ends all faults except deaths and half of the cuts: the cluster must cope with those."""
        world = self._world
        world.timeline.record("all faults have ended")
        world.network.partitions.clear()
        world.network.slow.clear()
        world.network.restore_conditions()
        world.traps.clear()
        world.notice_loss = 0.0
        for pair in sorted(world.network.cuts):
            if self._random.random() < 0.5:
                world.network.heal(*pair)
        for member in self._cluster.members.values():
            member.last_messages = None
            member.resume()

    # -- deaths

    def one_dies(self) -> None:
        self._kill(self._some(1))

    def lowest_dies(self) -> None:
        """The lowest rank would propose next."""
        self._kill(self._cluster.running()[:1])

    def many_die(self) -> None:
        """Several nodes die at once. Unless the run is reckless, the rest keeps a majority."""
        living = len(self._cluster.running())
        most = living if self._reckless else (self._cluster.last.size - 1) // 2 - self._missing()
        self._kill(self._some(self._random.randint(1, max(1, most))))

    def one_after_another_dies(self) -> None:
        """The others may have recovered in between, or not."""
        for number in range(self._random.randint(2, 4)):
            self._world.timeline.after(number * self._random.uniform(0.05, 1.0), self.one_dies)

    def proposer_dies_between_messages(self) -> None:
        """The highest rank dies, and proposers of its removal die between two messages."""
        living = self._cluster.running()
        for proposer in living[: self._random.randint(1, 2)] if self._may_lose(3) else []:
            proposer.last_messages = self._random.randrange(4 * len(living))
        self._kill(living[-1:])

    def _kill(self, victims: list[SimulatedMember]) -> None:
        for victim in victims if self._may_lose(len(victims)) else []:
            self._cluster.crash(victim.node, silent=self._random.random() < 0.4)

    def _may_lose(self, more: int) -> bool:
        return self._reckless or self._missing() + more <= (self._cluster.last.size - 1) // 2

    def _missing(self) -> int:
        """Members that are dead or about to die."""
        found = [self._cluster.members[member.node] for member in self._cluster.last.members]
        return sum(not member.alive or member.is_closed or member.last_messages is not None for member in found)

    # -- pauses and delays

    def one_is_stopped(self) -> None:
        """It continues in time, or after the others have recovered."""
        for member in self._some(self._random.randint(1, 2)):
            member.pause()
            self._later(member.resume)

    def one_is_slow(self) -> None:
        for member in self._some(1):
            self._world.timeline.record(f"{member.node} is slow")
            self._world.network.slow[member.node] = self._random.uniform(0.05, 1.5)
            self._later(partial(self._world.network.end_slowness, member.node))

    def all_are_slow(self) -> None:
        lag = self._random.uniform(0.05, 1.0)
        for member in self._cluster.running():
            self._world.timeline.record(f"{member.node} is starved")
            self._world.network.slow[member.node] = lag
            self._later(partial(self._world.network.end_slowness, member.node))

    def network_degrades(self) -> None:
        """Messages are lost, duplicated and reordered."""
        self.network_is_bad()
        self._later(self._world.network.restore_conditions)

    def network_is_bad(self) -> None:
        """Until the end of all faults."""
        draw = self._random.random
        self._world.network.fault_model = NetworkConditions(0.4 * draw() ** 2, 0.5 * draw(), 0.01 + 1.5 * draw() ** 3)
        self._world.timeline.record(f"{self._world.network.fault_model}")

    # -- network

    def network_splits(self) -> None:
        """Two sides cannot reach each other. The seed is on one of them."""
        one, other = self._sides()
        self._add_partitions(Partition(one, other), Partition(other, one))

    def one_direction_fails(self) -> None:
        self._add_partitions(Partition(*self._sides()))

    def one_is_isolated(self) -> None:
        """One node is cut off in both directions or in one."""
        for member in self._some(1):
            alone, others = frozenset([member.node]), frozenset(self._world.nodes) - {member.node}
            partitions = [Partition(alone, others), Partition(others, alone)]
            self._add_partitions(*self._random.choice([partitions, partitions[:1], partitions[1:]]))

    def link_breaks(self) -> None:
        """The nodes can dial each other again."""
        pair = self._some(2)
        for one, other in ((pair[0], pair[1]), (pair[1], pair[0])) if len(pair) == 2 else ():
            self._world.links.lose(one.node, other.node, "the connection broke")
            self._world.timeline.after(self._random.uniform(0.01, 0.2), _redial(one, other))

    def link_is_cut(self) -> None:
        """The nodes cannot dial each other again."""
        pair = self._some(2)
        if len(pair) == 2:
            self._world.timeline.record(f"{pair[0].node} and {pair[1].node} are cut off from each other")
            self._world.network.cut(pair[0].node, pair[1].node)
        for one, other in ((pair[0], pair[1]), (pair[1], pair[0])) if len(pair) == 2 else ():
            self._world.links.lose(one.node, other.node, "the connection broke")
            self._world.timeline.after(self._random.uniform(0.5, 2.0), _lost_connection(one, other))

    def _add_partitions(self, *partitions: Partition) -> None:
        for partition in partitions:
            few = [sorted(side)[:20] for side in (partition.source, partition.destination)]
            self._world.timeline.record(f"partition from {few[0]} to {few[1]}")
            self._world.network.partitions.append(partition)
        self._later(lambda: self._remove_partitions(partitions))

    def _remove_partitions(self, partitions: tuple[Partition, ...]) -> None:
        self._world.timeline.record("the partition ends")
        for partition in partitions:
            if partition in self._world.network.partitions:
                self._world.network.partitions.remove(partition)

    def _sides(self) -> tuple[frozenset[NodeId], frozenset[NodeId]]:
        everybody = sorted(self._world.nodes)
        share = self._random.uniform(0.1, 0.9)
        one = frozenset(node for node in everybody if self._random.random() < share)
        return one, frozenset(everybody) - one

    # -- seed

    def seed_dies(self) -> None:
        """The seed may restart, with or without its state."""
        seed = self._cluster.seed
        if seed is not None and seed.alive:
            seed.die("killed")
            kept = self._random.random() < 0.7
            if self._random.random() < 0.7:
                self._later(lambda: seed.restart(with_state=kept))

    # -- requested changes

    def somebody_joins(self) -> None:
        if self._cluster.is_settled():
            self._cluster.join(self._random.randint(1, 3), self.clock)

    def somebody_leaves(self) -> None:
        """A member is released, resigns or leaves."""
        for member in self._some(1) if self._may_lose(1) else []:
            how = self._random.randrange(3)
            if how == 0 and self._cluster.is_settled():
                self._cluster.release([member.node])
            elif how == 1:
                self._cluster.resign(member.node)
            else:
                self._cluster.leave(member.node)

    def _some(self, count: int) -> list[SimulatedMember]:
        living = self._cluster.running()
        return self._random.sample(living, min(count, len(living)))

    def _later(self, action: Callable[[], None]) -> None:
        seconds = self._random.choice([0.3, 3.0, 9.0, 15.0]) * self._random.uniform(0.3, 1.3)
        self._world.timeline.after(seconds, action)


_KINDS: Final = (
    "one_dies", "lowest_dies", "many_die", "one_after_another_dies", "proposer_dies_between_messages", "one_is_stopped",
    "one_is_slow", "all_are_slow", "network_degrades", "network_splits", "one_direction_fails", "one_is_isolated",
    "link_breaks", "link_is_cut", "seed_dies", "somebody_joins", "somebody_leaves",
)  # fmt: skip


def random_kinds(random: Random) -> tuple[str, ...]:
    """Names of the kinds of a run: all, or a few."""
    kinds = (*_KINDS, *COMMUNICATOR_FAULTS)
    if random.random() < 0.4:
        return kinds
    return tuple(random.sample(kinds, random.randint(2, 6)))


_BROKEN: Final = Loss(LossKind.LINK_BROKEN, "the connection broke and cannot be made again")


def _lost_connection(one: SimulatedMember, other: SimulatedMember) -> Callable[[], None]:
    """Reports that the connection broke, if it cannot be re-established."""

    def report_loss() -> None:
        knows = one.membership_machine is not None and one.membership_machine.membership.rank_of(other.node) is not None
        if knows and not one.reaches(other.node):
            one.lose(other.node, _BROKEN)

    return lambda: one.when_running(report_loss)


def _redial(one: SimulatedMember, other: SimulatedMember) -> Callable[[], None]:
    def dial() -> None:
        if (
            one.membership_machine is not None
            and one.membership_machine.membership.rank_of(other.node) is not None
            and other.running
        ):
            one.find(other.node)

    return lambda: one.when_running(dial)
