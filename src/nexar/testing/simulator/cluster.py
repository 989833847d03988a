"""The people of a simulation: who is there, who dies, who comes, who goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Final

from nexar.cluster.change import Departure
from nexar.cluster.decisions.succession_events import Lost, Resign, Wanted
from nexar.cluster.membership import Attendant, Member, Membership
from nexar.testing.simulator.member import Making, SimulatedMember
from nexar.testing.simulator.witness import SimulatedSeed, Witnessing
from nexar.testing.simulator.world import World
from nexar.types import NodeId

SEED: Final[NodeId] = 1_000_000
_ASKS_EVERY: Final = 0.5
"""Seconds between two questions of a joiner whether it is in."""


def first_membership(nodes: int, random: Random, *, has_seed: bool) -> Membership:
    """The cluster as it was formed. Ids and ranks have different orders, as in life."""
    order = list(range(1, nodes + 1))
    random.shuffle(order)
    seed = Attendant(SEED, _fingerprint(SEED)) if has_seed else None
    return Membership("simulated", 1, tuple(map(described, order)), seed=seed)


def described(node: NodeId) -> Member:
    """A member as the membership knows it."""
    return Member(node, f"host-{node}", _fingerprint(node), {"tls": ("10.0.0.1:1",)})


def _fingerprint(node: NodeId) -> bytes:
    return node.to_bytes(32, "big")


class Cluster:
    """Members, joiners, the seed."""

    def __init__(self, world: World, making: Making, witnessing: Witnessing, *, asked: bool = False) -> None:
        """`asked`: members recover only when their user asks for it."""
        self.world = world
        self.members: dict[NodeId, SimulatedMember] = {}
        """Everybody who ever was, or wanted to be, a member."""
        self.seed: SimulatedSeed | None = None
        self._making = making
        self._witnessing = witnessing
        self._asked = asked

    def form(self, clock: Callable[[], tuple[float, float]]) -> None:
        """Bring the first membership to life. `clock` draws the rate and offset of a node's clock."""
        first = self.world.laws.last
        for member in first.members:
            self._appear(member.node, clock()).begin(first)
        if first.seed is not None:
            self.seed = SimulatedSeed(self.world, first.seed.node, first, self._witnessing)
            self.world.inhabitants[first.seed.node] = self.seed

    def _appear(self, node: NodeId, clock: tuple[float, float]) -> SimulatedMember:
        appeared = SimulatedMember(self.world, node, self._making, rate=clock[0], ahead=clock[1], asked=self._asked)
        self.members[node] = self.world.inhabitants[node] = appeared
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
        return not self.world.network.walls and all(each.running and each.epoch == last.epoch for each in everybody)

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
                self.world.timeline.after(seconds, _losing(listener, Lost(gone.node, cause, willing)))

    def resign(self, node: NodeId) -> None:
        """A member asks the others to go on without it."""
        self.members[node].happens(Resign("it wants to"))

    def release(self, nodes: Iterable[NodeId]) -> None:
        """All members have agreed, in a collective, that these leave."""
        self._want(Wanted(left=tuple(Departure(node, "released", willing=True) for node in nodes)))

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
        self._want(Wanted(joined=tuple(described(node) for node in nodes)))

    def _want(self, wish: Wanted) -> None:
        """Each tells its own machine, when its call returns: unless the communicator that agreed is over by then."""
        epoch = self.last.epoch
        for member in self.running():
            self.world.timeline.after(self.world.random.random() * 0.05, _wanting(member, wish, epoch))

    def _ask(self, joiner: SimulatedMember, known: list[NodeId]) -> None:
        """Ask some members again and again, until one of them says yes, or that it is over."""
        if not joiner.alive or joiner.succession is not None or joiner.is_expelled:
            return
        for node in self.world.random.sample(known, min(3, len(known))):
            if joiner.running and self.world.reaches(joiner.node, node) and self._answers(joiner, self.members[node]):
                return
        self.world.timeline.after(_ASKS_EVERY, lambda: self._ask(joiner, known))

    def _answers(self, joiner: SimulatedMember, member: SimulatedMember) -> bool:
        succession = member.succession
        if succession is None or member.is_expelled:
            return False
        if succession.membership.rank_of(joiner.node) is not None:
            joiner.begin(succession.membership)
            return True
        removed = self.world.laws.removed.get(joiner.node)
        joiner.is_expelled = removed is not None and removed <= member.epoch
        return joiner.is_expelled


def _losing(member: SimulatedMember, event: Lost) -> Callable[[], None]:
    def lose() -> None:
        if member.succession is not None and member.succession.membership.rank_of(event.node) is not None:
            member.happens(event)

    return lambda: member.when_running(lose)


def _wanting(member: SimulatedMember, wish: Wanted, epoch: int) -> Callable[[], None]:
    def want() -> None:
        if member.epoch == epoch and not member.is_expelled:
            member.happens(wish)

    return lambda: member.when_running(want)
