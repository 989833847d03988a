"""Virtual time, the network, and the record of events.

Invariant: nothing reads a real clock, and ties are broken by scheduling order. So a run is a function of its seed.

A message under way arrives even if its direction closes meanwhile: the machines must withstand outdated messages. Loss,
duplication and delay are those at sending.
"""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal, Protocol, TypeAlias

from nexar.cluster.decisions.agreement_instances import DEFAULT_LIMITS, AgreementLimits
from nexar.cluster.decisions.failure_detector import LONGEST, STEPS_PER_ANSWER
from nexar.cluster.decisions.membership_events import (
    ChangeRequested,
    Loss,
    LossKind,
    MembershipMessage,
    MessageReceived,
    PeerLossFound,
    PeerReachable,
    ProbeFinished,
)
from nexar.cluster.decisions.node_machine import NodeInput
from nexar.cluster.decisions.successor_events import (
    BeginRequested,
    BuildFailed,
    BuildFinished,
    GenerationKey,
    MemberNeeded,
    RevokeReceived,
)
from nexar.config import Config
from nexar.testing.simulator.agreement_laws import AgreementLaws
from nexar.testing.simulator.data_links import DataLinks
from nexar.testing.simulator.laws import Laws
from nexar.testing.simulator.successor_laws import SuccessorLaws
from nexar.types import NodeId
from nexar.wire.control import Chosen, Instance, Suspect

REMEMBERED: Final = 30  # lines shown with a violation


class Timeline:
    """A heap of scheduled actions, and the record."""

    def __init__(self, remembered: int | None = REMEMBERED) -> None:
        """`remembered`: lines kept; None: all."""
        self.now = 0.0
        self.events = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # heap
        self._scheduled = 0
        self._last: deque[str] = deque(maxlen=remembered)
        self._digest = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        """A past time means as soon as possible."""
        self._scheduled += 1
        heapq.heappush(self._due, (when, self._scheduled, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def run_until(self, end: float) -> None:
        """Runs due actions in order, each at its own time."""
        due = self._due
        while due and due[0][0] <= end:
            when, _, action = heapq.heappop(due)
            self.now = max(self.now, when)
            action()
        self.now = max(self.now, end)

    def record(self, line: str) -> None:
        stamped = f"{self.now:10.4f}  {line}"
        self.events += 1
        self._digest = zlib.crc32(stamped.encode(), self._digest)
        self._last.append(stamped)

    @property
    def digest(self) -> int:
        return self._digest

    @property
    def last(self) -> tuple[str, ...]:
        return tuple(self._last)


_FASTEST: Final = 0.0002
_USUAL: Final = 0.01
_COPIES: Final = (0.1, 1.0, 5.0)  # seconds that a duplicate takes at most


@dataclass(frozen=True, slots=True)
class NetworkConditions:
    """Loss, duplication and delay of messages on an open direction."""

    loss: float = 0.0
    doubled: float = 0.0
    slowest: float = _USUAL
    """Seconds; most messages are faster."""


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Messages from `source` to `destination` are lost."""

    source: frozenset[NodeId]
    destination: frozenset[NodeId]


class SimulatedNetwork:
    """Decides with `random` whether and when each message arrives."""

    def __init__(self, timeline: Timeline, random: Random) -> None:
        self.fault_model = NetworkConditions()
        self.partitions: list[Partition] = []
        self.slow: dict[NodeId, float] = {}
        """Seconds by which a node sends and reads late."""
        self._cut: set[tuple[NodeId, NodeId]] = set()
        self._timeline = timeline
        self._random = random

    def cut(self, one: NodeId, other: NodeId) -> None:
        self._cut |= {(one, other), (other, one)}

    def heal(self, one: NodeId, other: NodeId) -> None:
        self._cut -= {(one, other), (other, one)}

    def end_slowness(self, node: NodeId) -> None:
        self.slow.pop(node, None)

    def restore_conditions(self) -> None:
        self.fault_model = NetworkConditions()

    @property
    def cuts(self) -> frozenset[tuple[NodeId, NodeId]]:
        """Pairs that cannot connect, the lower node first."""
        return frozenset(pair for pair in self._cut if pair[0] < pair[1])

    def open(self, source: NodeId, destination: NodeId) -> bool:
        if self._cut and (source, destination) in self._cut:
            return False
        return not any(
            source in partition.source and destination in partition.destination for partition in self.partitions
        )

    def both_ways(self, one: NodeId, other: NodeId) -> bool:
        return self.open(one, other) and self.open(other, one)

    def lag(self, *nodes: NodeId) -> float:
        return sum(self.slow.get(node, 0.0) for node in nodes) if self.slow else 0.0

    def send(self, source: NodeId, destination: NodeId, arrive: Callable[[], None]) -> None:
        """Schedules `arrive` once, twice or not at all."""
        if not self.open(source, destination):
            return
        fault_model, random = self.fault_model, self._random
        if fault_model.loss and random.random() < fault_model.loss:
            return
        self._deliver(source, destination, fault_model.slowest, arrive)
        if fault_model.doubled and random.random() < fault_model.doubled:
            # The copy may arrive in another ballot or epoch.
            self._deliver(source, destination, random.choice(_COPIES), arrive)

    def _deliver(self, source: NodeId, destination: NodeId, slowest: float, arrive: Callable[[], None]) -> None:
        share = self._random.random()
        seconds = _FASTEST + slowest * share * share + self.lag(source, destination)
        self._timeline.after(seconds, arrive)


def describe_event(node: NodeId, event: NodeInput) -> str:
    """The record line of an event."""
    match event:
        case MessageReceived(sender=sender, message=message):
            return f"{node} ← {sender}: {describe_message(message)}"
        case PeerLossFound(node=lost, willing=willing, loss=loss):
            return f"{node} loses {lost}{' (willing)' if willing else ''}: {loss.text}"
        case PeerReachable(node=found, severed=severed):
            return f"{node} finds {found}{' (severed)' if severed else ''}"
        case ProbeFinished(node=probed, loss=found):
            return f"{node} has probed {probed}: {'it answers' if found is None else found.text}"
        case ChangeRequested():
            joined, left = [each.node for each in event.joined], [each.node for each in event.left]
            return f"{node} wants {joined} in, {left} out, {[each % 10**6 for each in event.renewed]} renewed"
        case _:
            return f"{node}{_describe_communicator_event(event)}"


def _describe_communicator_event(event: NodeInput) -> str:
    match event:
        case RevokeReceived(sender=sender, key=key, rank=rank, closed=closed):
            return f" ← {sender}: rank {rank} {'closed' if closed else 'revoked'} {describe_key(key)}"
        case BeginRequested(build=build, communicator=communicator, membership=membership):
            return f" begins {describe_key(GenerationKey(communicator, membership.epoch))}, build {build}"
        case BuildFinished(build=build, completed=completed):
            return f" has finished build {build}: completed {completed}"
        case BuildFailed(build=build, failure=failure):
            return f" has failed in build {build}: {failure.kind.name} {list(failure.nodes)}"
        case MemberNeeded(key=key, node=needed):
            return f" needs {needed} in {describe_key(key)}"
        case _:
            about = getattr(event, "key", None)
            return f": {type(event).__name__}{f' {describe_key(about)}' if isinstance(about, GenerationKey) else ''}"


def describe_key(key: GenerationKey) -> str:
    """Short, since ids of parts have 63 bits."""
    return f"c{key.communicator % 10**6}@{key.epoch}"


def describe_message(message: MembershipMessage) -> str:
    """The kind, ballot and epoch of a message."""
    if isinstance(message, Suspect):
        return f"Suspect {message.node} by {message.by} in epoch {message.epoch}"
    ballot = getattr(message, "ballot", None)
    number = f" {ballot.round}.{ballot.node}" if ballot is not None else ""
    return f"{type(message).__name__}{number} of {describe_instance(message.instance)}"


def describe_instance(instance: Instance) -> str:
    """The next membership, or a call of `agree()`."""
    communicator, epoch, sequence = instance
    return f"agree #{sequence} of {describe_key(GenerationKey(communicator, epoch))}" if sequence else f"epoch {epoch}"


# Seconds. Coarser than the product's defaults, in the same order.
HEARTBEAT_INTERVAL: Final = 2.0
HEARTBEAT_TIMEOUT: Final = 6.0
STUCK_TIMEOUT: Final = Config().stuck_timeout
PROBE_TIMEOUT: Final = 1.0
LONGEST_PROBE: Final = 3.0  # of a process that does not answer
RECOVERY_TIMEOUT: Final = 15.0
_SILENCE: Final = Loss(LossKind.NO_ANSWER, "no answer")
_ENDED: Final = Loss(LossKind.ENDED, "its process has ended")


RecoveryPolicy: TypeAlias = Literal["automatic", "manual", "abort"]
"""The setting `recovery_policy`."""

Trap: TypeAlias = Callable[[NodeId, GenerationKey, int], bool]
"""Called with node, generation and step of a build; returns whether it is done."""


class NodeView(Protocol):
    """What one node can observe of another."""

    @property
    def alive(self) -> bool: ...

    @property
    def running(self) -> bool: ...

    def receive(self, sender: NodeId, message: MembershipMessage) -> None: ...

    def handle(self, event: NodeInput) -> None: ...

    def heartbeat_received(self, sender: NodeId, epoch: int) -> None: ...

    def changes_after(self, epoch: int) -> list[Chosen]: ...

    def votes_in(self, instance: Instance) -> bool:
        """Whether it would answer a ballot of this call of `agree()`."""


@dataclass(slots=True)
class SimulationContext:
    """Shared state of all nodes."""

    timeline: Timeline
    network: SimulatedNetwork
    laws: Laws
    random: Random
    most_events: int = 1_000_000
    """A run with more events does not settle."""
    policy: RecoveryPolicy = "automatic"
    nodes: dict[NodeId, NodeView] = field(default_factory=dict)
    traps: list[Trap] = field(default_factory=list)
    """Faults that wait for a step of a build."""
    agreement_limits: AgreementLimits = DEFAULT_LIMITS
    notice_loss: float = 0.0
    """Probability that a notice of a revocation or close is lost."""
    links: DataLinks = field(init=False)
    successor_laws: SuccessorLaws = field(init=False)
    agreement_laws: AgreementLaws = field(init=False)

    def __post_init__(self) -> None:
        self.links = DataLinks(self.timeline, self.network, Random(self.random.getrandbits(64)))
        self.laws.now = lambda: self.timeline.now
        self.successor_laws = SuccessorLaws(self.laws, lambda: self.timeline.now)
        self.agreement_laws = AgreementLaws(lambda: self.timeline.now, self._votes)

    @property
    def is_manual(self) -> bool:
        """Members recover only on request."""
        return self.policy == "manual"

    def _votes(self, source: NodeId, voter: NodeId, instance: Instance) -> bool:
        return (source == voter or self.reaches(source, voter)) and self.nodes[voter].votes_in(instance)

    def send_notice(self, source: NodeId, destination: NodeId, notice: RevokeReceived) -> None:
        """Control messages may be lost or duplicated."""
        listener = self.nodes.get(destination)
        if listener is not None and (not self.notice_loss or self.random.random() >= self.notice_loss):
            self.network.send(source, destination, lambda: listener.handle(notice))

    def build_step(self, node: NodeId, key: GenerationKey, step: int) -> None:
        """Called before a node sends in a step of a build."""
        for trap in list(self.traps):
            if trap(node, key, step) and trap in self.traps:
                self.traps.remove(trap)

    def send(self, source: NodeId, destination: NodeId, message: MembershipMessage) -> None:
        listener = self.nodes.get(destination)
        if listener is not None:
            self.network.send(source, destination, lambda: listener.receive(source, message))

    def beat(self, source: NodeId, destination: NodeId, epoch: int) -> None:
        """Delivers a heartbeat at once or not at all: a delay of milliseconds would not matter."""
        listener = self.nodes.get(destination)
        if listener is None or not listener.running or not self.network.open(source, destination):
            return
        loss = self.network.fault_model.loss
        if not loss or self.random.random() >= loss:
            listener.heartbeat_received(source, epoch)

    def reaches(self, source: NodeId, destination: NodeId) -> bool:
        asked = self.nodes.get(destination)
        return asked is not None and asked.running and self.network.both_ways(source, destination)

    def probe_takes(self, source: NodeId, destination: NodeId) -> tuple[float, Loss | None]:
        """The seconds that a probe takes, and why it fails; None if it is answered."""
        fast = 0.001 + self.random.random() * 0.02 + self.network.lag(source, destination)
        delay = self.own_delay(source)
        asked = self.nodes.get(destination)
        if asked is None or not self.network.both_ways(source, destination):
            return PROBE_TIMEOUT + delay, _SILENCE
        if not asked.alive:
            return fast, _ENDED
        if not asked.running or fast > LONGEST_PROBE + delay:
            return LONGEST_PROBE + delay, _SILENCE
        return fast, None

    def own_delay(self, node: NodeId) -> float:
        """The extension of deadlines that the node derives from its own lateness."""
        return min(LONGEST, STEPS_PER_ANSWER * self.network.lag(node))
