"""Faults that concern communicators: in the steps of builds, and what one user does although the others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Final

from nexar.cluster.decisions.successor_events import GenerationKey, RevokeReceived
from nexar.cluster.membership import WORLD
from nexar.testing.simulator.application import Application
from nexar.testing.simulator.cluster import SimulatedCluster
from nexar.testing.simulator.generations import LAST_STEP, SimulatedGeneration
from nexar.testing.simulator.nodes import SimulatedMember
from nexar.types import NodeId

COMMUNICATOR_FAULTS: Final = (
    "one_dies_in_a_build", "another_dies_in_a_build", "one_stops_in_a_build", "one_closes_in_a_build", "one_closes",
    "one_revokes", "one_revokes_a_new_generation", "two_revoke", "notices_are_lost", "notices_are_forged",
    "renewal_is_requested", "one_leaves_quietly", "one_leaves_quietly",
)  # fmt: skip
"""Names of methods; one that is listed twice is drawn twice as often."""
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

    def _applications(self, random: Random, count: int) -> list[Application]:
        found = [each.application for each in self._cluster.running() if each.application is not None]
        return random.sample(found, min(count, len(found)))


def _is_calling(member: SimulatedMember) -> bool:
    generations = [] if member.application is None else member.application.generations.open_generations()
    return any(each.call is not None and each.key.communicator == WORLD for each in generations)


def _keys(member: SimulatedMember) -> list[GenerationKey]:
    return [] if member.application is None else member.application.generation_keys()


def _forged(random: Random, generation: SimulatedGeneration, nodes: Iterable[NodeId]) -> RevokeReceived:
    size, key = generation.size, generation.key
    strangers = [node for node in nodes if generation.membership.rank_of(node) is None] or [10**9]
    kind = random.randrange(3)
    if kind == 0:
        return RevokeReceived(
            random.choice(strangers), key, random.randrange(size), "forged", closed=random.random() < 0.5
        )
    sender = generation.node(generation.rank + 1)
    if kind == 1:
        return RevokeReceived(sender, key, generation.rank, "forged", closed=False)
    wrong = (generation.rank + 2) % size if size > 2 else generation.rank
    return RevokeReceived(sender, key, wrong, "forged", closed=True)
