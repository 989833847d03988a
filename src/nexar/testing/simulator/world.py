"""Virtual time, the network with its data links, and the record of events.

Invariant: nothing reads a real clock, and ties are broken by scheduling order. So a run is a function of its seed.

A message under way arrives even if its direction closes meanwhile: the machines must withstand outdated messages. Loss,
duplication and delay are those at sending.

A data link between members delivers every frame once and in order, or breaks. It delivers what a blocked path held up,
as TCP and QUIC do. It breaks if the path stays blocked for `IDLE_TIMEOUT`, if an end gives up the other one, or if a
fault breaks it; then frames under way are lost. Both ends are told as soon as the path allows. A new link between the
same nodes replaces a broken one; the node that dials it reports it as severed. Frames of a process that left or was
killed still arrive, and then the end of its link. A host that dies sends no end.
"""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeAlias

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
from nexar.testing.simulator.laws import AgreementLaws, Laws
from nexar.testing.simulator.successor_laws import SuccessorLaws
from nexar.types import NodeId
from nexar.wire.control import Instance, Suspect

if TYPE_CHECKING:
    from nexar.testing.simulator.nodes import SimulatedNode  # which imports this module

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
        self._scheduled += 1
        heapq.heappush(self._due, (self.now + seconds, self._scheduled, action))

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
        if (source, destination) in self._cut:
            return False
        return not self.partitions or not any(
            source in partition.source and destination in partition.destination for partition in self.partitions
        )

    def both_ways(self, one: NodeId, other: NodeId) -> bool:
        is_whole = not self._cut and not self.partitions
        return is_whole or (self.open(one, other) and self.open(other, one))

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
        seconds = _FASTEST + slowest * share * share
        if self.slow:
            seconds += self.lag(source, destination)
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
    nodes: dict[NodeId, SimulatedNode] = field(default_factory=dict)
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

    def send_heartbeat(self, source: NodeId, destination: NodeId, epoch: int) -> None:
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
        lag = self.network.lag(node)
        return min(LONGEST, STEPS_PER_ANSWER * lag) if lag else 0.0


# -- data links

IDLE_TIMEOUT: Final = 6.0
"""Seconds after which a link whose path is blocked breaks."""
_RETRY_INTERVAL: Final = 0.4
_RETRANSMISSION: Final = 0.2  # seconds that a lost packet costs
_NO_KEY: Final = GenerationKey(-1, 0)


class LinkFrame(NamedTuple):
    """One message on a data link, fenced by `key`."""

    kind: str  # "call", "build", "question", "closed", or "end" of the link
    key: GenerationKey
    number: int = 0  # of the call; for "end": whether the node left
    step: int = 0
    content: object = None


class LinkEnd(Protocol):
    """One end of the links of a member."""

    node: NodeId
    alive: bool
    broken: set[NodeId]
    """Peers whose link this node knows to be broken."""

    def frame_received(self, sender: NodeId, frame: LinkFrame) -> None: ...

    def link_ended(self, peer: NodeId, cause: str, *, left: bool = False) -> None:
        """The link to this peer broke, or ended because the peer left."""


class _Direction:
    """Frames from one node to another."""

    __slots__ = ("blocked_since", "last_arrival", "number", "waiting")

    def __init__(self) -> None:
        self.number = 0  # of the link; frames of an older one are lost
        self.last_arrival = 0.0
        self.waiting: deque[LinkFrame] = deque()  # held up by a blocked path
        self.blocked_since = 0.0


class DataLinks:
    """All links of a simulation."""

    def __init__(self, timeline: Timeline, network: SimulatedNetwork, random: Random) -> None:
        self.ends: dict[NodeId, LinkEnd] = {}
        self._silent: set[NodeId] = set()  # nodes whose host died
        self._timeline = timeline
        self._network = network
        self._random = random
        self._directions: dict[tuple[NodeId, NodeId], _Direction] = {}

    def send(self, source: NodeId, destination: NodeId, frame: LinkFrame) -> bool:
        """False: the link is broken as far as `source` knows."""
        if destination in self.ends[source].broken:
            return False
        direction = self._directions.get((source, destination)) or self._direction(source, destination)
        if not direction.waiting and self._is_open(source, destination):
            self._transmit(source, destination, direction, frame)
            return True
        direction.waiting.append(frame)
        if len(direction.waiting) == 1:
            direction.blocked_since = self._timeline.now
            self._retry(source, destination, direction, direction.number)
        return True

    def _direction(self, source: NodeId, destination: NodeId) -> _Direction:
        found = self._directions.get((source, destination))
        if found is None:
            found = self._directions[source, destination] = _Direction()
        return found

    def _is_open(self, source: NodeId, destination: NodeId) -> bool:
        return (
            destination not in self._silent
            and source not in self.ends[destination].broken
            and self._network.both_ways(source, destination)
        )

    def _transmit(self, source: NodeId, destination: NodeId, direction: _Direction, frame: LinkFrame) -> None:
        number, end = direction.number, self.ends[destination]
        arrival = max(self._timeline.now + self._latency(source, destination), direction.last_arrival)
        direction.last_arrival = arrival

        def arrive() -> None:
            if not end.alive:
                self._end(source, destination, "its process has ended")
            elif direction.number == number and source not in end.broken:
                if frame.kind == "end":
                    self._end(destination, source, str(frame.content), left=bool(frame.number))
                else:
                    end.frame_received(source, frame)

        self._timeline.at(arrival, arrive)

    def _latency(self, source: NodeId, destination: NodeId) -> float:
        conditions, random = self._network.fault_model, self._random
        seconds = 0.0002 + conditions.slowest * random.random() ** 2
        if self._network.slow:
            seconds += self._network.lag(source, destination)
        while conditions.loss and random.random() < conditions.loss:
            seconds += _RETRANSMISSION
        return seconds

    def _retry(self, source: NodeId, destination: NodeId, direction: _Direction, number: int) -> None:
        """Sends what waits once the path is open; breaks the link if that takes too long."""
        if direction.number != number or not direction.waiting:
            return
        if self._is_open(source, destination):
            while direction.waiting:
                self._transmit(source, destination, direction, direction.waiting.popleft())
        elif self._timeline.now - direction.blocked_since >= IDLE_TIMEOUT:
            self.lose(source, destination, "nothing arrives on the link")
        else:
            self._timeline.after(_RETRY_INTERVAL, lambda: self._retry(source, destination, direction, number))

    # -- ends of links

    def lose(self, node: NodeId, peer: NodeId, cause: str) -> None:
        """`node` gives up its link to `peer`, which learns it once the path is open."""
        if peer in self.ends[node].broken:
            return
        self._drop(node, peer)
        self._end(node, peer, cause)
        self._timeline.after(0.001 + 0.02 * self._random.random(), lambda: self._tell(peer, node, cause))

    def _tell(self, node: NodeId, peer: NodeId, cause: str) -> None:
        if peer in self.ends[node].broken or not (self.ends[node].alive and self._is_broken_at(peer, node)):
            return
        if self._network.both_ways(node, peer):
            self._end(node, peer, cause)
        else:
            self._timeline.after(_RETRY_INTERVAL, lambda: self._tell(node, peer, cause))

    def _is_broken_at(self, node: NodeId, peer: NodeId) -> bool:
        return not self.ends[node].alive or peer in self.ends[node].broken

    def _end(self, node: NodeId, peer: NodeId, cause: str, *, left: bool = False) -> None:
        end = self.ends[node]
        if peer not in end.broken:
            end.broken.add(peer)
            if end.alive:
                end.link_ended(peer, cause, left=left)

    def _drop(self, one: NodeId, other: NodeId) -> None:
        for pair in ((one, other), (other, one)):
            direction = self._direction(*pair)
            direction.number += 1
            direction.waiting.clear()

    def replace(self, node: NodeId, peer: NodeId) -> bool:
        """`node` dialed `peer` again. Returns whether its link was broken."""
        one, other = self.ends[node], self.ends[peer]
        severed = peer in one.broken
        if severed:
            self._drop(node, peer)
            self._end(peer, node, "its link was replaced")
            one.broken.discard(peer)
            other.broken.discard(node)
        return severed

    def host_died(self, node: NodeId) -> None:
        self._silent.add(node)

    def process_ended(self, node: NodeId, cause: str, *, left: bool = False, peers: Iterable[NodeId] = ()) -> None:
        """Ends its links after the frames that it sent: those in use, and those to `peers`. `left`: it says so."""
        used = {pair[1] for pair in self._directions if pair[0] == node}
        used |= {pair[0] for pair in self._directions if pair[1] == node}
        for peer in sorted(used.union(peers) - {node}):
            self.send(node, peer, LinkFrame("end", _NO_KEY, int(left), content=cause))
