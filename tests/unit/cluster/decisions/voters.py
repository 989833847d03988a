"""A cluster of succession machines in one process, on virtual time: messages take a while, nodes die, ways break."""

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from random import Random

from nexar.cluster.decisions.membership_events import (
    MembershipAction,
    MembershipDecided,
    MembershipInput,
    MessageReceived,
    NoProgress,
    PeerLossFound,
    ProbeFinished,
    SelfExpelled,
    SendMessage,
    StartProbe,
    Tick,
)
from nexar.cluster.decisions.membership_machine import MembershipMachine
from nexar.cluster.decisions.paxos import Vote
from nexar.cluster.decisions.seed_voter import SeedVoter
from nexar.cluster.membership import Member, Membership, PinnedNode
from nexar.wire.control import Chosen
from tests.losses import silent

SEED_NODE = 1_000_000
LATENCY = 0.001
PROBE = 0.1  # seconds until somebody who does not answer counts as not reached


def a_member(node: int) -> Member:
    return Member(node, f"host-{node}", node.to_bytes(32, "big"), {"tls": (f"10.0.0.1:{node}",)})


def a_membership(size: int, *, epoch: int = 1, seed: bool = True) -> Membership:
    """Node r + 1 has rank r."""
    members = tuple(a_member(node) for node in range(1, size + 1))
    return Membership("test", epoch, members, (), PinnedNode(SEED_NODE, b"s" * 32) if seed else None)


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
        """`latency`: of each message; None: it is lost."""
        self.now = 100.0
        self.random = Random(chance)
        self.latency = latency
        self.active, self.recovery_timeout = active, recovery_timeout
        first = a_membership(size, seed=seed)
        self.machines: dict[int, MembershipMachine | SeedVoter] = {}
        for member in first.members:
            self.add(member.node, first)
        self.kept: dict[int, Vote] = {}
        if seed:
            self.machines[SEED_NODE] = SeedVoter(first, probe_timeout=PROBE)
        self.dead: set[int] = set()
        self.cut: set[frozenset[int]] = set()
        self.adopted: dict[int, list[MembershipDecided]] = {}
        self.expelled: dict[int, SelfExpelled] = {}
        self.stalls: dict[int, list[NoProgress]] = {}
        self.chosen: dict[int, bytes] = {}  # by epoch, what anybody adopted
        self.said: list[tuple[int, SendMessage]] = []
        self._order = count()
        self._agenda: list[tuple[float, int, int, MembershipInput]] = []

    def add(self, node: int, membership: Membership) -> MembershipMachine:
        made = MembershipMachine(
            node,
            membership,
            recovery_timeout=self.recovery_timeout,
            probe_timeout=PROBE,
            active=self.active,
            random=Random(self.random.random()),
        )
        self.machines[node] = made
        return made

    def member(self, node: int) -> MembershipMachine:
        machine = self.machines[node]
        assert isinstance(machine, MembershipMachine)
        return machine

    @property
    def seed_voter(self) -> SeedVoter:
        machine = self.machines[SEED_NODE]
        assert isinstance(machine, SeedVoter)
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
                self.feed(other, PeerLossFound(node, silent(f"node {node} was killed")))

    def send_heartbeats(self) -> None:
        """Each node sends its epoch to all members once; those ahead answer with the changes that it lacks."""
        here = [node for node in self.machines if node not in self.dead]
        for one in self.living():
            for other in here:
                if one != other and self.reaches(one, other):
                    epoch = self.machines[other].membership.epoch
                    for made_in, value in enumerate(self.machines[one].changes_since(epoch), epoch):
                        self.feed(other, MessageReceived(one, Chosen((0, made_in, 0), value)), LATENCY)

    def living(self) -> list[int]:
        return [node for node in self.machines if node not in self.dead and node != SEED_NODE]

    def feed(self, node: int, event: MembershipInput, after: float = 0.0) -> None:
        heapq.heappush(self._agenda, (self.now + after, next(self._order), node, event))

    def feed_all(self, event: MembershipInput) -> None:
        for node in self.living():
            self.feed(node, event)

    # ------------------------------------------------------------ time

    def run(self, seconds: float) -> None:
        """Until then everything happens that is due."""
        end = self.now + seconds
        for node in self.machines:
            self._set_timer(node)
        while self._agenda and self._agenda[0][0] <= end:
            moment, _, node, event = heapq.heappop(self._agenda)
            self.now = max(self.now, moment)
            if node not in self.dead:
                self._step(node, event)
        self.now = end

    def _step(self, node: int, event: MembershipInput) -> None:
        machine = self.machines[node]
        due = machine.due(self.now)
        if isinstance(event, Tick) and (due is None or due > self.now):
            return
        actions = machine.step(event, self.now)
        if isinstance(machine, SeedVoter):
            self.kept[node] = machine.vote
        for action in actions:
            self._do(node, action)
        self._set_timer(node)

    def _set_timer(self, node: int) -> None:
        due = self.machines[node].due(self.now)
        if due is not None:
            self.feed(node, Tick(), max(0.0, due - self.now) + 1e-6)

    def _do(self, node: int, action: MembershipAction) -> None:
        if isinstance(action, SendMessage):
            self.said.append((node, action))
            self._carry(node, action)
        elif isinstance(action, StartProbe):
            reached = self.reaches(node, action.node)
            result = ProbeFinished(action.node, None if reached else silent(f"node {action.node} does not answer"))
            at_once = reached or action.node in self.dead  # the system of a dead process says so
            self.feed(node, result, 2 * LATENCY if at_once else PROBE)
        elif isinstance(action, MembershipDecided):
            value = action.change.encode()
            assert self.chosen.setdefault(action.change.epoch, value) == value
            assert self.machines[node].membership.epoch >= action.change.epoch
            assert node not in self.expelled
            self.adopted.setdefault(node, []).append(action)
        elif isinstance(action, SelfExpelled):
            assert node not in self.expelled
            self.expelled[node] = action
        else:
            self.stalls.setdefault(node, []).append(action)

    def _carry(self, node: int, say: SendMessage) -> None:
        took = self.latency(self.random)
        if took is not None and say.node in self.machines and self.reaches(node, say.node):
            self.feed(say.node, MessageReceived(node, say.message), took)

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
