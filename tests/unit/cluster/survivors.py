"""Recoveries of several nodes, without links: a test carries their messages, and says who can be reached."""

from collections import deque
from random import Random
from typing import Any, cast

from nexar.cluster.control_loop import ControlLoop
from nexar.cluster.decisions.membership_events import (
    MembershipMessage,
    MessageReceived,
    NoProgress,
    PeerLossFound,
    ProbeFinished,
    SelfExpelled,
    SendMessage,
    StartProbe,
)
from nexar.cluster.decisions.node_machine import NodeAction, NodeMachine
from nexar.cluster.decisions.successor_events import AdoptMembership
from nexar.cluster.machine_runner import MachineRunner
from nexar.cluster.membership import Change, Membership
from nexar.cluster.membership_service import MembershipService
from nexar.config import Config
from nexar.errors import PeerLost
from nexar.wire.control import Message
from tests.losses import silent
from tests.unit.cluster.memory_mesh import eventually


class Survivor:
    """One node: its recovery, its heir, and what it asks of node and mesh."""

    def __init__(self, world: "Survivors", node: int, membership: Membership, config: Config) -> None:
        self.world = world
        self.id = node
        self.config = config
        self.dialer = self
        self.failure = None
        self.unlinked: set[int] = set()
        """To whom there is no link yet."""
        self.severed: set[int] = set()
        """To whom the link is lost."""
        self.dialed: list[int] = []
        self.probed: list[int] = []
        self.seed: list[Message] = []
        self.story: list[Any] = []
        """What was done here, in order."""
        self.present = membership
        """The newest that it was notified of."""
        self.control_loop = ControlLoop()
        machine = NodeMachine(
            node,
            membership,
            recovery_timeout=config.recovery_timeout,
            active=config.recovery_policy == "automatic",
            random=Random(node),
        )
        self.runner = MachineRunner(machine, self.control_loop, self.perform)
        self.recovery = MembershipService(
            cast(Any, self),
            cast(Any, self),
            membership,
            self.runner,
            probe=self.probe,
            send_to_seed=self.notify_seed,
        )

    # -- node and mesh

    def run_in_thread(self, task: Any, priority: Any = None) -> None:
        task()

    def find(self, node: int) -> "Way | None":
        return Way(self, node) if node in self.world.nodes and node not in {self.id, *self.unlinked} else None

    def link(self, node: int, deadline: float) -> "Way":
        self.dialed.append(node)
        if node in self.world.dead:
            raise PeerLost(node=node, cause="it does not answer")
        return Way(self, node)

    def adopt(self, membership: Membership, change: Change) -> None:
        self.story.append(("mesh", membership.epoch))

    def probe(self, node: int) -> None:
        """The answer is there before the question has been finished."""
        self.probed.append(node)
        self.runner.put(ProbeFinished(node, silent("it does not answer") if node in self.world.dead else None))

    def notify_seed(self, message: Message) -> bool:
        self.seed.append(message)
        return True

    # -- actions

    def perform(self, action: NodeAction) -> None:
        match action:
            case SendMessage(node, message):
                self.recovery.send(node, message)
            case StartProbe(node):
                self.probe(node)
            case AdoptMembership(change, after):
                self.recovery.adopt(change, after)
                self.adopted(change, after)
            case NoProgress() | SelfExpelled():
                self.story.append(action)

    def adopted(self, change: Change, after: Membership) -> None:
        assert self.recovery.membership is after
        before, self.present = self.present, after
        self.story.append((change, [member.node for member in before.members], [m.node for m in after.members]))

    def receive(self, sender: int, message: MembershipMessage) -> None:
        self.runner.put(MessageReceived(sender, message))

    @property
    def members(self) -> list[int]:
        return [member.node for member in self.recovery.membership.members]


class Way:
    """The link from one node to another."""

    def __init__(self, here: Survivor, there: int) -> None:
        self._here, self._there = here, there
        self.peer = there
        self.failure = PeerLost(node=there, cause="the link was lost") if there in here.severed else None

    def send_control(self, message: MembershipMessage) -> None:
        if self._here.id in self._here.world.broken:
            raise PeerLost(node=self._there, cause="the link was lost")
        self._here.world.messages.append((self._here.id, self._there, message))


class Survivors:
    """All of them. Close it."""

    def __init__(self, membership: Membership, **settings: Any) -> None:
        config = Config(**settings)
        self.messages: deque[tuple[int, int, MembershipMessage]] = deque()
        self.dead: set[int] = set()
        """They receive and say nothing, and do not answer a probe."""
        self.broken: set[int] = set()
        """Their links break when they speak."""
        self.nodes = {member.node: Survivor(self, member.node, membership, config) for member in membership.members}

    def carry(self) -> None:
        """Everything that was said, and what is said about it."""
        while self.messages:
            sender, node, message = self.messages.popleft()
            if not {sender, node} & self.dead:
                self.nodes[node].receive(sender, message)

    def carry_until(self, true: Any, what: str) -> None:
        def done() -> bool:
            self.carry()
            return bool(true())

        eventually(done, what)

    def kill(self, *nodes: int) -> None:
        """All others notice."""
        self.dead |= set(nodes)
        for survivor in self.alive():
            for node in nodes:
                survivor.runner.put(PeerLossFound(node, silent(f"node {node} was killed")))

    def alive(self) -> list[Survivor]:
        return [self.nodes[node] for node in self.nodes if node not in self.dead]

    def close(self) -> None:
        for survivor in self.nodes.values():
            survivor.runner.stop()
            survivor.runner.stop()
            survivor.control_loop.close()
