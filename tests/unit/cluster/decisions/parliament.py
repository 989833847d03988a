"""A cluster of succession machines in one process, on virtual time: words take a while, nodes die, ways break."""

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from random import Random

from nexar.cluster.decisions.succession import Succession
from nexar.cluster.decisions.succession_events import (
    Action,
    Adopt,
    Event,
    Expel,
    Heard,
    Lost,
    Probe,
    Probed,
    Say,
    Stall,
    Tick,
)
from nexar.cluster.decisions.vote import Vote
from nexar.cluster.decisions.witness import Witness
from nexar.cluster.membership import Attendant, Member, Membership
from nexar.wire.messages import Chosen

SEED = 1_000_000
LATENCY = 0.001
PROBE = 0.1  # seconds until somebody who does not answer counts as not reached


def a_member(node: int) -> Member:
    return Member(node, f"host-{node}", node.to_bytes(32, "big"), {"tls": (f"10.0.0.1:{node}",)})


def a_membership(size: int, *, epoch: int = 1, seed: bool = True) -> Membership:
    """Node r + 1 has rank r."""
    members = tuple(a_member(node) for node in range(1, size + 1))
    return Membership("test", epoch, members, (), Attendant(SEED, b"s" * 32) if seed else None)


class Parliament:
    """All of them, and the ways between them."""

    def __init__(
        self,
        size: int,
        *,
        seed: bool = True,
        active: bool = True,
        recovery_timeout: float = 30.0,
        chance: int = 0,
        latency: Callable[[Random], float | None] = lambda _: LATENCY,
    ) -> None:
        """`latency`: of each word; None: it is lost."""
        self.now = 100.0
        self.random = Random(chance)
        self.latency = latency
        self.active, self.recovery_timeout = active, recovery_timeout
        first = a_membership(size, seed=seed)
        self.machines: dict[int, Succession | Witness] = {}
        for member in first.members:
            self.add(member.node, first)
        self.kept: dict[int, Vote] = {}
        if seed:
            self.machines[SEED] = Witness(first, probe_timeout=PROBE)
        self.dead: set[int] = set()
        self.cut: set[frozenset[int]] = set()
        self.adopted: dict[int, list[Adopt]] = {}
        self.expelled: dict[int, Expel] = {}
        self.stalls: dict[int, list[Stall]] = {}
        self.chosen: dict[int, bytes] = {}  # by epoch, what anybody adopted
        self.said: list[tuple[int, Say]] = []
        self._order = count()
        self._agenda: list[tuple[float, int, int, Event]] = []

    def add(self, node: int, membership: Membership) -> Succession:
        made = Succession(
            node,
            membership,
            recovery_timeout=self.recovery_timeout,
            probe_timeout=PROBE,
            active=self.active,
            random=Random(self.random.random()),
        )
        self.machines[node] = made
        return made

    def member(self, node: int) -> Succession:
        machine = self.machines[node]
        assert isinstance(machine, Succession)
        return machine

    @property
    def witness(self) -> Witness:
        machine = self.machines[SEED]
        assert isinstance(machine, Witness)
        return machine

    # ------------------------------------------------------------ what happens

    def reaches(self, one: int, other: int) -> bool:
        return not ({one, other} & self.dead) and frozenset((one, other)) not in self.cut

    def split(self, *sides: Iterable[int]) -> None:
        """Nobody reaches anybody of another side."""
        side_of = {node: number for number, side in enumerate(sides) for node in side}
        for one, here in side_of.items():
            self.cut |= {frozenset((one, other)) for other, there in side_of.items() if here != there}

    def kill(self, *nodes: int, seen_by: Iterable[int] | None = None) -> None:
        """They die; the others, or these, notice at once."""
        self.dead |= set(nodes)
        for node in nodes:
            for other in self.living() if seen_by is None else seen_by:
                self.tell(other, Lost(node, f"node {node} was killed"))

    def beat(self) -> None:
        """Everybody tells everybody its epoch, once; who is behind is told what was chosen since."""
        here = [node for node in self.machines if node not in self.dead]
        for one in here:
            for other in here:
                if one != other and self.reaches(one, other):
                    epoch = self.machines[other].membership.epoch
                    for made_in, value in enumerate(self.machines[one].changes_since(epoch), epoch):
                        self.tell(other, Heard(one, Chosen((0, made_in, 0), value)), LATENCY)

    def living(self) -> list[int]:
        return [node for node in self.machines if node not in self.dead and node != SEED]

    def tell(self, node: int, event: Event, after: float = 0.0) -> None:
        heapq.heappush(self._agenda, (self.now + after, next(self._order), node, event))

    def tell_all(self, event: Event) -> None:
        for node in self.living():
            self.tell(node, event)

    # ------------------------------------------------------------ time

    def run(self, seconds: float) -> None:
        """Until then everything happens that is due."""
        end = self.now + seconds
        for node in self.machines:
            self._set_alarm(node)
        while self._agenda and self._agenda[0][0] <= end:
            moment, _, node, event = heapq.heappop(self._agenda)
            self.now = max(self.now, moment)
            if node not in self.dead:
                self._step(node, event)
        self.now = end

    def _step(self, node: int, event: Event) -> None:
        machine = self.machines[node]
        due = machine.due(self.now)
        if isinstance(event, Tick) and (due is None or due > self.now):
            return
        actions = machine.step(event, self.now)
        if isinstance(machine, Witness):
            self.kept[node] = machine.vote
        for action in actions:
            self._do(node, action)
        self._set_alarm(node)

    def _set_alarm(self, node: int) -> None:
        due = self.machines[node].due(self.now)
        if due is not None:
            self.tell(node, Tick(), max(0.0, due - self.now) + 1e-6)

    def _do(self, node: int, action: Action) -> None:
        if isinstance(action, Say):
            self.said.append((node, action))
            self._carry(node, action)
        elif isinstance(action, Probe):
            reached = self.reaches(node, action.node)
            result = Probed(action.node, None if reached else f"node {action.node} does not answer")
            at_once = reached or action.node in self.dead  # the system of a dead process says so
            self.tell(node, result, 2 * LATENCY if at_once else PROBE)
        elif isinstance(action, Adopt):
            value = action.change.encode()
            assert self.chosen.setdefault(action.change.epoch, value) == value
            assert self.machines[node].membership.epoch >= action.change.epoch
            assert node not in self.expelled
            self.adopted.setdefault(node, []).append(action)
        elif isinstance(action, Expel):
            assert node not in self.expelled
            self.expelled[node] = action
        else:
            self.stalls.setdefault(node, []).append(action)

    def _carry(self, node: int, say: Say) -> None:
        took = self.latency(self.random)
        if took is not None and say.node in self.machines and self.reaches(node, say.node):
            self.tell(say.node, Heard(node, say.word), took)

    # ------------------------------------------------------------ what came of it

    def nodes_of(self, node: int) -> list[int]:
        return [member.node for member in self.machines[node].membership.members]

    def epochs(self) -> dict[int, int]:
        return {node: self.machines[node].membership.epoch for node in self.living() if node not in self.expelled}

    def agreed(self) -> list[int]:
        """The members, on which all who live and were not expelled agree."""
        views = {tuple(self.nodes_of(node)) for node in self.living() if node not in self.expelled}
        assert len(views) == 1, views
        assert len(set(self.epochs().values())) == 1
        return list(views.pop())
