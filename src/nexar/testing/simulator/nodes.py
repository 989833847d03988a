"""The nodes of the simulation: the real decision machines in small shells.

A machine's state changes before its messages leave. Events for a stopped process wait, as in kernel buffers. Events
that come while actions are performed are handled after them, one by one.

Like the product's shells, a member performs the actions about its communicators, sends heartbeats, brings nodes that
are behind up to date, turns suspicions into losses, retries suspects, and asks for admission. The seed is in
`nexar.testing.simulator.cluster`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Final, Protocol, TypeAlias

from nexar.cluster.decisions.failure_detector import FailureDetector, watched, watchers
from nexar.cluster.decisions.membership_events import (
    Loss,
    LossKind,
    MembershipAction,
    MembershipDecided,
    MembershipInput,
    MembershipMessage,
    MessageReceived,
    NoProgress,
    OwnDelayChanged,
    PeerLossFound,
    PeerReachable,
    ProbeFinished,
    RecoverNow,
    SelfExpelled,
    SendMessage,
    StartProbe,
    Tick,
)
from nexar.cluster.decisions.membership_machine import MAX_ANSWER, MembershipMachine
from nexar.cluster.decisions.node_machine import NodeAction, NodeInput, NodeMachine
from nexar.cluster.decisions.successor_events import (
    AdoptMembership,
    GenerationKey,
    Investigate,
    OpenGeneration,
    SetOutcome,
    StartBuild,
    Terminate,
    Terminated,
    TerminationKind,
)
from nexar.cluster.membership import Change, Membership
from nexar.errors import NexarError
from nexar.testing.simulator.application import AgreeCalls, Application, ApplicationPlan, is_agree_message
from nexar.testing.simulator.laws import Violation
from nexar.testing.simulator.world import (
    HEARTBEAT_INTERVAL,
    HEARTBEAT_TIMEOUT,
    STUCK_TIMEOUT,
    LinkFrame,
    SimulationContext,
    describe_event,
    describe_key,
)
from nexar.types import NodeId
from nexar.wire.control import Beat, Chosen, Instance

_MIN_TICK_SECONDS: Final = 0.001  # between two ticks of one machine


class DecisionMachine(Protocol):
    """A decision machine of `cluster/decisions`."""

    def step(self, event: Any, now: float) -> Sequence[MembershipAction | NodeAction]: ...

    def due(self, now: float) -> float | None:
        """When the machine needs a Tick."""


class SimulatedNode:
    """A simulated process."""

    def __init__(self, world: SimulationContext, node: NodeId, *, rate: float = 1.0, ahead: float = 0.0) -> None:
        """Its clock runs `rate` times as fast as the timeline, from `ahead`."""
        self.node = node
        self.alive = True
        self.paused = False
        self.last_messages: int | None = None
        """The node dies after sending this many messages."""
        self._world = world
        self._rate = rate
        self._ahead = ahead
        self._held: list[Callable[[], None]] = []  # events that wait for a stopped process
        self._wakes_at: float | None = None  # in timeline time
        self._waiting: deque[NodeInput] = deque()  # events that came during a step
        self._is_busy = False

    @property
    def running(self) -> bool:
        return self.alive and not self.paused

    @property
    def machine(self) -> DecisionMachine | None:
        """The machine of this process; None before its start."""
        raise NotImplementedError

    def now(self) -> float:
        """The time of this node's clock."""
        return self._world.timeline.now * self._rate + self._ahead

    # -- process

    def die(self, why: str) -> None:
        """Idempotent."""
        if self.alive:
            self.alive = False
            self._held.clear()
            self._waiting.clear()
            self._world.timeline.record(f"{self.node} dies: {why}")

    def pause(self) -> None:
        if self.running:
            self.paused = True
            self._world.timeline.record(f"{self.node} is stopped")

    def resume(self) -> None:
        if not self.alive or not self.paused:
            return
        self.paused = False
        self._world.timeline.record(f"{self.node} is continued")
        held, self._held = self._held, []
        for action in held:
            action()

    def when_running(self, action: Callable[[], None]) -> None:
        """Calls `action` now; when the process continues, if it is stopped; never, if it is dead."""
        if self.paused:
            self._held.append(action)
        elif self.alive:
            action()

    # -- events

    def receive(self, sender: NodeId, message: MembershipMessage) -> None:
        self.handle(MessageReceived(sender, message))

    def heartbeat_received(self, sender: NodeId, epoch: int) -> None:
        """A heartbeat arrives."""

    def changes_after(self, epoch: int) -> list[Chosen]:
        """The changes that a dialing node missed."""
        del epoch
        return []

    def handle(self, event: NodeInput) -> None:
        """Passes the event to its machine and executes the actions; after those of the present event, if there is
        one.
        """
        if self.paused:
            self._held.append(lambda: self.handle(event))
            return
        self._waiting.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._waiting and self.running:
                self._handle(self._waiting.popleft())
        finally:
            self._is_busy = False
            if self._waiting:
                self._hold_waiting()

    def _hold_waiting(self) -> None:
        """The process may have been stopped by an action."""
        self._held += [partial(self.handle, event) for event in self._waiting]
        self._waiting.clear()

    def _handle(self, event: NodeInput) -> None:
        machine = self.machine
        if machine is None:
            return
        world = self._world
        world.timeline.record(describe_event(self.node, event))
        if world.timeline.events > world.most_events:
            raise Violation("a cluster settles", f"more than {world.most_events} events")
        world.laws.before_step(self.node, event)
        world.successor_laws.before_step(self.node, event)
        actions = self._step(machine, event)
        world.laws.after_step(self.node, event, actions)
        world.successor_laws.after_step(self.node, event, actions)
        self._after_step()
        for action in actions:
            self._do(action)
            if not self.alive:
                return  # the action ended it
        self._arm()

    def _step(self, machine: DecisionMachine, event: NodeInput) -> Sequence[MembershipAction | NodeAction]:
        try:
            return machine.step(event, self.now())
        except (NexarError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise Violation("a machine does not fail", f"that of node {self.node}: {error!r}") from error

    def _after_step(self) -> None:
        """Called before messages leave."""

    def _do(self, action: MembershipAction | NodeAction) -> None:
        match action:
            case SendMessage(node=node, message=message):
                self.send_message(node, message)
            case StartProbe(node=node):
                self._probe(node)
            case MembershipDecided(change=change) | AdoptMembership(change=change):
                self._world.timeline.record(f"{self.node} adopts epoch {change.epoch}")
                self._adopted(change)
            case SelfExpelled(epoch=epoch, reason=reason):
                self._world.timeline.record(f"{self.node} is expelled by epoch {epoch}: {reason}")
                self._expelled()
            case NoProgress():
                self._world.timeline.record(f"{self.node} stalls: {len(action.alive)} of {action.needed}")
                self._stalled()

    def votes_in(self, instance: Instance) -> bool:
        """Whether it would answer a ballot of this call of `agree()`."""
        del instance
        return False

    def send_message(self, node: NodeId, message: MembershipMessage) -> None:
        if self.last_messages is not None:
            self.last_messages -= 1
            if self.last_messages < 0:
                self.die("between messages")
                return
        self._world.send(self.node, node, message)

    def _probe(self, node: NodeId) -> None:
        seconds, loss = self._world.probe_takes(self.node, node)
        self._world.timeline.after(seconds, lambda: self.handle(ProbeFinished(node, loss)))

    def _adopted(self, change: Change) -> None:
        pass

    def _expelled(self) -> None:
        pass

    def _stalled(self) -> None:
        pass

    def _arm(self) -> None:
        """Schedules the next tick. At most one wake-up is valid: the earliest."""
        due = self.machine.due(self.now()) if self.machine is not None else None
        if due is None:
            return
        timeline = self._world.timeline
        network = self._world.network
        when = max((due - self._ahead) / self._rate, timeline.now + _MIN_TICK_SECONDS)
        if network.slow:
            when += network.lag(self.node)
        if self._wakes_at is None or when < self._wakes_at or self._wakes_at < timeline.now:
            self._wakes_at = when
            timeline.at(when, lambda: self._wake(when))

    def _wake(self, when: float) -> None:
        if self._wakes_at != when:
            return  # replaced by an earlier one
        self._wakes_at = None
        self.when_running(self._tick)

    def _tick(self) -> None:
        due = self.machine.due(self.now()) if self.machine is not None else None
        if due is not None and due <= self.now() + 1e-9:
            self.handle(Tick())
        else:
            self._arm()


_LEFT: Final = Loss(LossKind.LEFT, "it has left")

MachineFactory: TypeAlias = Callable[[NodeId, Membership, Random], NodeMachine]
"""Creates a node's machine."""


class SimulatedMember(SimulatedNode):
    """A present, future or former member."""

    def __init__(
        self,
        world: SimulationContext,
        node: NodeId,
        machine_factory: MachineFactory,
        *,
        rate: float = 1.0,
        ahead: float = 0.0,
        program: ApplicationPlan | None = None,
        fails: Callable[[NodeId], None] = lambda _: None,
    ) -> None:
        """`program`: what its application does; None: it only recovers after a loss. `fails` ends its
        process after a loss under the policy `abort`.
        """
        super().__init__(world, node, rate=rate, ahead=ahead)
        self.application: Application | None = None
        self.node_machine: NodeMachine | None = None
        self.agree_calls: AgreeCalls | None = None
        self.is_expelled = False
        self.is_stalled = False
        """It reported NoProgress in its present epoch."""
        self.is_aborted = False
        """A loss ended all its communicators."""
        self.has_left = False
        """It said goodbye."""
        self.is_closed = False
        """Its user closed it; its process still runs."""
        self.broken: set[NodeId] = set()
        """Peers that will come back on a new connection."""
        self._machine_factory = machine_factory
        self._program = program
        self._fails = fails
        self._early_frames: list[tuple[NodeId, LinkFrame]] = []  # that came before it is a member
        self._left: set[NodeId] = set()  # nodes that said goodbye
        self._investigated: set[NodeId] = set()
        self._detector = FailureDetector(HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, STUCK_TIMEOUT)
        self._count = 0
        self._watchers: tuple[NodeId, ...] = ()
        self._heartbeats: dict[int, Beat] = {}
        self._delayed = 0.0

    @property
    def machine(self) -> NodeMachine | None:
        return self.node_machine

    @property
    def membership_machine(self) -> MembershipMachine | None:
        return None if self.node_machine is None else self.node_machine.membership_machine

    @property
    def epoch(self) -> int:
        """0 before it is a member."""
        machine = self.node_machine
        return 0 if machine is None else machine.membership_machine.membership.epoch

    def suspects(self) -> frozenset[NodeId]:
        return frozenset() if self.membership_machine is None else frozenset(self.membership_machine.suspects())

    def is_concerned(self, key: GenerationKey) -> bool:
        """A decided change gives it a successor that is not given up."""
        return self.node_machine is not None and self.node_machine.successor_machine.is_concerned(key)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """In the time of its clock, unless it has died."""
        self._world.timeline.after(seconds / self._rate, lambda: self.when_running(action))

    @property
    def is_lost(self) -> bool:
        """It died while it was a member, without leaving."""
        return not self.alive and not self.has_left and self.node_machine is not None and not self.is_expelled

    def die(self, why: str) -> None:
        super().die(why)
        self._world.successor_laws.died(self.node)
        self._world.agreement_laws.died(self.node)

    # -- membership

    def begin(self, membership: Membership) -> None:
        random = Random(self._world.random.getrandbits(64))
        self.node_machine = self._machine_factory(self.node, membership, random)
        self._world.laws.enters(self.node, membership.epoch)
        self._world.successor_laws.enters(self.node, membership.epoch)
        self._update_watchers(membership)
        if self._program is not None:
            limits = self._world.agreement_limits
            self.agree_calls = AgreeCalls(self._world, self, limits, membership)
            self.application = Application(self._world, self, self._program, Random(random.getrandbits(64)))
            self.application.start(membership)
            for sender, frame in self._early_frames:
                self.application.generations.frame_received(sender, frame)
            self._early_frames.clear()
        self._world.timeline.after(self._world.random.random() * HEARTBEAT_INTERVAL, self._heartbeat)

    def _update_watchers(self, membership: Membership) -> None:
        rank = membership.rank_of(self.node)
        if rank is None:
            raise ValueError(f"node {self.node} is no member of epoch {membership.epoch}")
        self._watchers = tuple(membership.members[each].node for each in watchers(membership.size, rank))
        whom = [membership.members[each].node for each in watched(membership.size, rank)]
        self._detector.watch(whom, self.now())

    def _adopted(self, change: Change) -> None:
        self.is_stalled = False
        self._left -= change.gone
        if self.application is not None:
            self.application.generations.adopted(change)
        if self.membership_machine is not None and change.epoch == self.epoch:  # only the last of several at once
            self._update_watchers(self.membership_machine.membership)

    def _expelled(self) -> None:
        self.is_expelled = True
        if self.agree_calls is not None:
            self.agree_calls.end_all()
        self._world.successor_laws.died(self.node)

    def _stalled(self) -> None:
        self.is_stalled = True

    # -- heartbeats

    def _heartbeat(self) -> None:
        """A stopped process sends none until it continues."""
        if not self.alive or self.is_expelled or self.is_closed:
            return
        if self.paused:
            self._held.append(self._heartbeat)
            return
        epoch = self.epoch
        for watcher in self._watchers:
            self._world.send_heartbeat(self.node, watcher, epoch)
        self._measure()
        self._check_peers()
        if (
            self._world.is_manual
            and self.running
            and self.membership_machine is not None
            and self.membership_machine.suspects()
        ):
            self.handle(RecoverNow())
        if self.alive:
            self._world.timeline.after(
                HEARTBEAT_INTERVAL / self._rate + self._world.network.lag(self.node), self._heartbeat
            )

    def _measure(self) -> None:
        delay = self._world.own_delay(self.node)
        if delay != self._delayed:
            self._delayed = self._detector.own_delay = delay
            self.handle(OwnDelayChanged(delay))

    def heartbeat_received(self, sender: NodeId, epoch: int) -> None:
        if self.node_machine is None:
            return
        self._count += 1
        heartbeat = self._heartbeats.get(epoch)
        if heartbeat is None:
            heartbeat = self._heartbeats[epoch] = Beat(epoch)
        now = self.now()
        self._detector.record_traffic(sender, self._count, now)
        self._detector.record_heartbeat(sender, heartbeat, now)
        if epoch < self.node_machine.membership_machine.membership.epoch:
            self.send_changes(sender, epoch)

    def send_changes(self, node: NodeId, epoch: int) -> None:
        for message in self.changes_after(epoch)[:MAX_ANSWER]:
            self._world.send(self.node, node, message)

    def changes_after(self, epoch: int) -> list[Chosen]:
        changes = self.membership_machine.changes_since(epoch) if self.membership_machine is not None else []
        return [Chosen((0, number, 0), value) for number, value in enumerate(changes, start=epoch)]

    def _check_peers(self) -> None:
        for finding in self._detector.tick(self.now()):
            if finding.is_loss:
                self.lose(finding.node, Loss(LossKind.NO_ANSWER, finding.state))
            elif finding.state == "alive":
                self.find(finding.node)
        for suspect in list(self.membership_machine.suspects()) if self.membership_machine is not None else ():
            if self.running and self.reaches(suspect):
                self._dial(suspect)

    def _dial(self, suspect: NodeId) -> None:
        """Receives the changes that this node missed. No answer is lost: the connection exists or it does not."""
        epoch, other = self.epoch, self._world.nodes[suspect]
        for message in other.changes_after(epoch):
            self.receive(suspect, message)
        if self.epoch == epoch and not self.is_expelled:
            self.find(suspect)

    def connected_peers(self) -> tuple[NodeId, ...]:
        """Nodes that the kernel notifies when it ends."""
        return self._watchers

    def reaches(self, node: NodeId) -> bool:
        return self._world.reaches(self.node, node)

    def find(self, node: NodeId) -> None:
        if self.agree_calls is not None:
            self.agree_calls.voter_reachable(node)
        self.handle(PeerReachable(node, node in self._world.links.ends and self._world.links.replace(self.node, node)))

    # -- the end of all communicators

    def handle(self, event: NodeInput) -> None:
        """A closed node takes part in no vote."""
        if not (self.is_closed and isinstance(event, MembershipInput)):
            super().handle(event)

    def close(self) -> None:
        """Its user closes the node."""
        if self.running and self.node_machine is not None and not self.is_closed:
            self._world.timeline.record(f"{self.node} is closed")
            self._terminate(Terminated(TerminationKind.CLOSED))
            self.is_closed = True

    def _abort(self, node: NodeId, loss: Loss) -> None:
        """Under the policy `abort` a loss ends all communicators, and an exception the process."""
        if self._world.policy == "abort" and not self.is_aborted:
            self.is_aborted = True
            self._terminate(Terminated(TerminationKind.ABORTED, node=node, reason=loss.text))
            self.fail()

    def fail(self) -> None:
        """An exception ends its process soon."""
        self.after(self._world.random.choice([0.05, 1.0, 5.0]), lambda: self._fails(self.node))

    def _terminate(self, cause: Terminated) -> None:
        self.handle(Terminate(cause))
        if self.agree_calls is not None:
            self.agree_calls.end_all()

    # -- communicators

    def receive(self, sender: NodeId, message: MembershipMessage) -> None:
        if is_agree_message(message):
            if self.paused:
                self._held.append(lambda: self._agree_message(sender, message))
            elif self.alive:
                self._agree_message(sender, message)
        else:
            super().receive(sender, message)

    def _agree_message(self, sender: NodeId, message: MembershipMessage) -> None:
        if self.agree_calls is not None:
            self.agree_calls.receive(sender, message)

    def votes_in(self, instance: Instance) -> bool:
        return self.agree_calls is not None and self.agree_calls.votes_in(instance)

    def _do(self, action: MembershipAction | NodeAction) -> None:
        super()._do(action)
        if isinstance(action, SendMessage):
            return  # the most frequent action
        if isinstance(action, AdoptMembership) and self.agree_calls is not None:
            self.agree_calls.adopted(action.change, action.after)
        if isinstance(action, Investigate):
            self.investigate(action.node, action.cause)
        elif self.application is not None:
            if isinstance(action, StartBuild | OpenGeneration):
                verb = "builds" if isinstance(action, StartBuild) else "opens"
                self._world.timeline.record(f"{self.node} {verb} {describe_key(action.key)}, build {action.build}")
            elif isinstance(action, SetOutcome):
                self._world.timeline.record(f"{self.node}: {describe_key(action.key)} ends with {action.outcome}")
            self.application.generations.perform(action)  # type: ignore[arg-type]

    def frame_received(self, sender: NodeId, frame: LinkFrame) -> None:
        if self.paused:
            self._held.append(lambda: self._frame_received(sender, frame))
        elif self.alive:
            self._frame_received(sender, frame)

    def _frame_received(self, sender: NodeId, frame: LinkFrame) -> None:
        if self.application is not None:
            self.application.generations.frame_received(sender, frame)
        elif self._program is not None:
            self._early_frames.append((sender, frame))

    def link_ended(self, peer: NodeId, cause: str, *, left: bool = False) -> None:
        self.when_running(lambda: self._link_ended(peer, cause, left=left))

    def _link_ended(self, peer: NodeId, cause: str, *, left: bool) -> None:
        if (
            left
            and self.membership_machine is not None
            and self.membership_machine.membership.rank_of(peer) is not None
        ):
            self.left(peer)
        if self.application is not None:
            self.application.generations.link_ended(peer)
        if peer in self.broken and peer not in self._left:
            self.investigate(peer, cause)

    def left(self, node: NodeId) -> None:
        """The node said goodbye."""
        self._left.add(node)
        self._voter_lost(node, _LEFT)
        self.handle(PeerLossFound(node, _LEFT, willing=True))

    def lose(self, node: NodeId, loss: Loss) -> None:
        """This node gives up another one."""
        self._voter_lost(node, loss)
        self._abort(node, loss)
        self.handle(PeerLossFound(node, loss))
        if node in self._world.links.ends:
            self._world.links.lose(self.node, node, loss.text)

    def _voter_lost(self, node: NodeId, loss: Loss) -> None:
        """Under the manual policy no member is removed before the user asks."""
        if self.agree_calls is not None and self._world.is_manual:
            self.agree_calls.voter_lost(node, loss.text)

    def investigate(self, node: NodeId, cause: str) -> None:
        """Probes a member after a hint, and dials it again if only its link is broken."""
        machine = self.membership_machine
        if machine is None or machine.membership.rank_of(node) is None or node in self._investigated:
            return
        if node in self._left:
            self.lose(node, _LEFT)
            return
        self._investigated.add(node)
        seconds, failure = self._world.probe_takes(self.node, node)
        self._world.timeline.after(seconds, lambda: self.when_running(lambda: self._investigation_ends(node, failure)))

    def _investigation_ends(self, node: NodeId, failure: Loss | None) -> None:
        self._investigated.discard(node)
        machine = self.membership_machine
        if machine is None or machine.membership.rank_of(node) is None:
            return
        if failure is not None:
            self.lose(node, failure)
        else:
            self.dial_again(node)

    def dial_again(self, node: NodeId) -> bool:
        """Whether the link to this node is usable, perhaps as a new one."""
        if node not in self.broken:
            return True
        machine = self.membership_machine
        if machine is None or machine.membership.rank_of(node) is None or not self.reaches(node):
            return False
        self.find(node)
        return True

    def _probe(self, node: NodeId) -> None:
        """A probe that finds only the link broken dials again."""
        seconds, loss = self._world.probe_takes(self.node, node)
        self._world.timeline.after(seconds, lambda: self.when_running(lambda: self._probed(node, loss)))

    def _probed(self, node: NodeId, loss: Loss | None) -> None:
        if loss is None:
            self.dial_again(node)
        self.handle(ProbeFinished(node, loss))
