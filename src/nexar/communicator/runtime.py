"""The node runtime makes this node a member of a cluster.

    links, liveness connections, heartbeats, seed → FailureMonitor ─┐ events
    messages, users' requests, builds ──────────────────────────────┴─→ NodeMachine ─ actions ─→ NodeRuntime._perform

NodeRuntime connects these parts and dispatches the actions.
"""

from __future__ import annotations

import logging
import time
import traceback as tracebacks
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from nexar.cluster.agreements import Agreements
from nexar.cluster.control_channel import (
    ControlChannel,
    LinkLost,
    LivenessConnectionLost,
    MeshEvent,
    NeighbourDoubted,
    RemovalReported,
    RouteLost,
    send_or_log,
)
from nexar.cluster.decisions.failure_detector import PeerLiveness, watched, watchers
from nexar.cluster.decisions.membership_events import (
    Loss,
    LossKind,
    MembershipInput,
    MembershipMessage,
    MessageReceived,
    NoProgress,
    PeerLossFound,
    PeerReachable,
    SelfExpelled,
    SendMessage,
    StartProbe,
)
from nexar.cluster.decisions.node_machine import NodeAction, NodeMachine
from nexar.cluster.decisions.successor_events import (
    AdoptMembership,
    Investigate,
    SendNotice,
    Terminate,
    Terminated,
    TerminationKind,
)
from nexar.cluster.failure_monitor import LEFT, FailureMonitor, NoticedState
from nexar.cluster.heartbeat import Heartbeat
from nexar.cluster.machine_runner import MachineRunner
from nexar.cluster.membership import WORLD, Change, Member, Membership
from nexar.cluster.membership_service import MEMBERSHIP_MESSAGES, MembershipService
from nexar.cluster.mesh import EAGER_WORLD, Mesh
from nexar.cluster.node import Node
from nexar.cluster.peer_probe import PingTable
from nexar.cluster.seed_session import SeedLink
from nexar.communicator.events import FailureEvent
from nexar.communicator.generation import Generation
from nexar.communicator.generation_builder import GenerationBuilder
from nexar.communicator.status import make_status_report
from nexar.communicator.successor_requests import CheckpointRequests, Revocations, SuccessorRequests
from nexar.communicator.successors import Successors
from nexar.errors import JoinRefused, LinkClosed, NexarError, error_text, sendable
from nexar.links.link import Link
from nexar.types import NodeId, format_seconds
from nexar.wire.control import MAX_CAUSE_CHARACTERS, Beat, CurrentCall, Goodbye, Message, Ping, Pong, Revoke, Suspect
from nexar.wire.status import StatusReport
from nexar.wire.text import foreign_line, foreign_lines

if TYPE_CHECKING:
    from nexar.communicator.communicator import Communicator  # which imports this module

_log = logging.getLogger(__name__)

_SEED_CHECK_DELAY: Final = 0.1  # seconds without a decision after a loss; the seed is asked for its vote then too


class NodeRuntime:
    """One node as a member. Any thread. To end it, call `send_goodbye`, then `close`, then close the mesh."""

    def __init__(
        self,
        node: Node,
        mesh: Mesh,
        membership: Membership,
        *,
        seed: SeedLink,
        wrap: Callable[[NodeRuntime, Generation], Communicator],
        state: Any = None,
    ) -> None:
        """Make it before the mesh adopts the membership. `wrap` makes the user's communicator of a generation; it must
        not block. `state`: received on joining.
        """
        self.node: Final = node
        self.mesh: Final = mesh
        self.state: Final = state
        self._seed = seed
        self._runner = MachineRunner(
            _machine(node, membership), node.control_loop, self._perform, own_delay=self._own_delay
        )
        self.put: Final = self._runner.put
        pings = PingTable()
        self._failure_monitor = FailureMonitor(
            node,
            mesh,
            pings,
            control_loop=node.control_loop,
            report_event=self._report,
            notify_users=self._notify_users,
            liveness_of=self._liveness_of,
            own_delay=self._own_delay,
        )
        self.membership_service: Final = MembershipService(
            node,
            mesh,
            membership,
            self._runner,
            probe=self._failure_monitor.probe,
            send_to_seed=seed.send,
            own_delay=self._own_delay,
        )
        self.successors: Final = Successors(
            GenerationBuilder(node, mesh),
            self._runner,
            wrap=partial(wrap, self),
            opened=self._opened,
            report_unreachable=self._failure_monitor.report_unreachable,
        )
        self.successor_requests: Final = SuccessorRequests(
            self.successors, self.membership_service, self._failure_monitor, self._runner
        )
        self._seed_check = node.control_loop.call_at(None, self._check_seed)
        self.checkpoint_requests: Final = CheckpointRequests()
        self._is_expelled = False  # written by the performing thread
        self._said_goodbye = False  # written by the thread that closes
        self.revocations: Final = Revocations(self.successors, self._runner, self._send_to)
        self.agreements: Final = Agreements(node.id, node.progress, node.control_loop, self.membership_service.send)
        self.heartbeat: Final = self._start_heartbeat() if node.has_remote_peers else None
        self._connect_handlers(mesh.control, pings)
        self._watch(membership)

    def _connect_handlers(self, control: ControlChannel, pings: PingTable) -> None:
        """Call it when all parts exist: the mesh uses the handlers at once."""
        control.connect_events(self._dispatch)
        control.connect(self._failure_monitor.goodbye_received, Goodbye)
        control.connect(pings.arrived, Ping, Pong)
        control.connect(self._membership_message, *MEMBERSHIP_MESSAGES)
        control.connect(self.revocations.received, Revoke)
        if self.heartbeat is not None:
            control.connect(self._heartbeat_received, Beat)

    def _start_heartbeat(self) -> Heartbeat:
        """Only for peers in other processes: threads of one process do not end silently."""
        return Heartbeat(
            self.node,
            self.mesh.links,
            self.doing,
            self._failure_monitor.liveness_changed,
            control_loop=self.node.control_loop,
            meter=self.node.delay_meter,
        )

    def _watch(self, membership: Membership) -> None:
        if self.heartbeat is not None:
            self.heartbeat.adopt(membership)
        if self.mesh.liveness_connections is not None:
            self.mesh.liveness_connections.adopt(membership)

    def dial_watchers(self) -> None:
        """Dial, in the background, the nodes that watch this node or that it watches. Never raises."""
        membership = self.membership_service.membership
        rank = membership.rank_of(self.node.id)
        if rank is not None and self.heartbeat is not None and membership.size > EAGER_WORLD:
            size, topology = membership.size, self.node.config.topology
            ranks = {*watchers(size, rank, topology), *watched(size, rank, topology)}
            wanted = [membership.members[other].node for other in ranks]
            self.node.dialer.try_in_thread(partial(self._link, wanted), "the watching nodes are not dialed")

    def _link(self, nodes: Sequence[NodeId]) -> None:
        for node in filter(self.mesh.relay_routes.wants, nodes):
            try:
                self.mesh.dial(node, time.monotonic() + self._silence_limit())
            except NexarError as error:
                self._failure_monitor.report_unreachable(node, str(error))

    # -- events of the mesh: any thread; messages of members: the driver ---------------------------------------------

    def _dispatch(self, event: MeshEvent) -> None:
        """Any thread: usually the driver, but also one that dials or ends a link."""
        match event:
            case LinkLost(link, error):
                self._failure_monitor.link_lost(link, error)
            case LivenessConnectionLost(node, cause):
                self._failure_monitor.liveness_ended(node, cause)
            case RouteLost(node, cause):
                self._failure_monitor.route_lost(node, cause)
            case NeighbourDoubted(node):
                self._failure_monitor.probe_neighbour(node)
            case RemovalReported(epoch, reason):
                self.expelled(epoch, reason)

    def _membership_message(self, link: Link, message: Message) -> None:
        assert isinstance(message, MembershipMessage)
        if isinstance(message, Suspect) or (message.instance[0] == WORLD and message.instance[2] == 0):
            self.put(MessageReceived(link.peer, message))
        else:
            self.agreements.receive(link.peer, message)

    def _heartbeat_received(self, link: Link, message: Message) -> None:
        assert isinstance(message, Beat)
        assert self.heartbeat is not None
        self.heartbeat.arrived(link.peer, message)
        if message.epoch < self.membership_service.membership.epoch:
            self.membership_service.send_changes_since(link.peer, message.epoch)

    # -- called by the seed session ------------------------------------------------------------------------------

    def seed_message(self, message: Message) -> None:
        seed = self.membership_service.membership.seed
        if seed is not None and isinstance(message, MembershipMessage):
            if seed.node in self.membership_service.suspects():
                self.put(PeerReachable(seed.node))
            self.put(MessageReceived(seed.node, message))

    def seed_lost(self, cause: str) -> None:
        self._lose_seed(Loss(LossKind.LINK_BROKEN, cause))

    def _lose_seed(self, loss: Loss) -> None:
        seed = self.membership_service.membership.seed
        if seed is not None:
            self.put(PeerLossFound(seed.node, loss))

    def seed_back(self, epoch: int) -> None:
        """The seed may have missed changes since this epoch."""
        seed = self.membership_service.membership.seed
        if seed is not None:
            self.put(PeerReachable(seed.node))
            self.membership_service.send_changes_since(seed.node, epoch)

    def seed_reported_death(self, node: NodeId, epoch: int, report: Loss) -> None:
        del epoch  # an ended process stays ended in every epoch
        self._failure_monitor.report_dead(node, report)

    def seed_refused(self, refused: JoinRefused) -> None:
        if refused.expelled:
            self.expelled(refused.expelled, refused.reason)
        elif not self.has_left:
            _log.warning("the seed refused this node, which continues without it: %s", foreign_line(refused.reason))

    def seed_reported_waiting(self, members: tuple[Member, ...]) -> None:
        """A joiner that no longer waits is a member or gone."""
        before = self.checkpoint_requests.mine().waiting
        self.checkpoint_requests.set_waiting(members)
        for joiner in before:
            if joiner not in members and self.is_gone(joiner.node):
                self._failure_monitor.probe_joiner(joiner)
        self.expect(members)

    def expect(self, members: Sequence[Member]) -> None:
        self.mesh.expect({each.node: each for each in (*self.checkpoint_requests.mine().waiting, *members)}.values())

    # -- between the parts -------------------------------------------------------------------------------------

    def _opened(self, generation: Generation) -> None:
        about = generation.communicator, generation.membership.epoch
        self.agreements.add_generation(*about, generation.nodes)
        generation.call_when_closed(partial(self.agreements.end_generation, *about))

    def _send_to(self, node: NodeId, message: Message) -> None:
        if not self.is_gone(node):
            self.membership_service.send(node, message)

    def _report(self, event: MembershipInput) -> None:
        """A loss may need the seed's vote, and an open connection does not prove that the seed lives: probe it, unless
        the members decide without it.
        """
        self.put(event)
        if isinstance(event, PeerLossFound) and not event.willing:
            self._seed_check.wake_by(time.monotonic() + _SEED_CHECK_DELAY)

    def _check_seed(self, _: float) -> None:
        seed = self.membership_service.membership.seed
        if seed is not None and self.membership_service.suspects().keys() - {seed.node}:
            timeout = self._silence_limit()
            self._seed.ping(timeout, partial(self._seed_pinged, timeout))

    def _seed_pinged(self, timeout: float, answered: bool) -> None:
        if not answered:
            self._lose_seed(Loss(LossKind.NO_ANSWER, f"it does not answer within {format_seconds(timeout)}"))

    def _own_delay(self) -> float:
        return self.node.delay_meter.seconds

    def _silence_limit(self) -> float:
        return self.node.config.heartbeat_timeout + self._own_delay()

    def _liveness_of(self, node: NodeId) -> PeerLiveness | None:
        return None if self.heartbeat is None else self.heartbeat.known(node)

    def _notify_users(self, node: NodeId, state: NoticedState, cause: str) -> None:
        cause = foreign_lines(cause)  # may be text of that member
        for generation in self.successors.generations():
            rank = generation.membership.rank_of(node)
            if rank is not None:
                generation.failures.publish(FailureEvent(rank, node, cause, state, generation.membership.epoch))
        if state == "back":
            self.agreements.voter_reachable(node)
        elif state != "stuck" and self.node.config.recovery_policy == "manual":
            self.agreements.voter_lost(node, cause)  # no member is removed before the user asks
        if state == "lost" and self.node.config.recovery_policy == "abort":
            self.put(Terminate(Terminated(TerminationKind.ABORTED, node=node, reason=cause)))
            self._end_agreements()

    def doing(self) -> tuple[tuple[CurrentCall, ...], str]:
        call_logs = [
            (generation.communicator, generation.context.call_log) for generation in self.successors.generations()
        ]
        now = time.monotonic()
        doing = (
            CurrentCall(communicator, call.operation, call.sequence, call.step, max(0.0, now - call.moved_at))
            for communicator, call_log in call_logs
            for call in call_log.in_flight()
        )
        finished = [last for _, call_log in call_logs if (last := call_log.last_finished) is not None]
        return tuple(doing), max(finished, key=lambda last: last[1])[0] if finished else ""

    def status_report(self) -> StatusReport | None:
        """None if this node is no longer a member."""
        call_logs = [generation.context.call_log for generation in self.successors.generations()]
        return make_status_report(self.membership_service.membership, self.node.id, call_logs, self.mesh.links())

    # -- actions: must not block -----------------------------------------------------------------------------------

    def _perform(self, action: NodeAction) -> None:
        """Called by the performing thread, in NodeMachine's order."""
        match action:
            case SendMessage(node, message):
                self.membership_service.send(node, message)
            case StartProbe(node):
                self._failure_monitor.probe(node)
            case Investigate(node, cause):
                self._failure_monitor.report_unreachable(node, cause)
            case AdoptMembership(change, after):
                self.membership_service.adopt(change, after)
                self.membership_adopted(change, after)
            case SendNotice():
                self.revocations.send_notice(action)
            case SelfExpelled():
                self._expelled(action)
            case NoProgress():
                pass  # NodeMachine has ended what needs a lost member
            case _:
                self.successors.perform(action)

    def membership_adopted(self, change: Change, after: Membership) -> None:
        """Call it once the mesh has the next membership."""
        self._failure_monitor.adopt(after)
        self.checkpoint_requests.settle(change.gone)
        self._watch(after)
        self.agreements.voters_removed(change.left)
        self.dial_watchers()

    def _expelled(self, report: SelfExpelled) -> None:
        """Members, the seed and the ballot may report the expulsion; the first report counts."""
        if self._is_expelled:
            return
        self._is_expelled = True
        if not (self.has_left or self._said_goodbye):
            _log.warning("this node was expelled in epoch %d: %s", report.epoch, foreign_line(report.reason))
        self._end_agreements()

    def _end_agreements(self) -> None:
        self.agreements.end_all(LinkClosed(owner="this node's place in the cluster"))

    def expelled(self, epoch: int, reason: str) -> None:
        self.put(SelfExpelled(epoch, reason))

    @property
    def has_left(self) -> bool:
        """Whether this node left by agreement. True before its communicators end."""
        return self._runner.machine.has_left

    def is_gone(self, node: NodeId) -> bool:
        return self.membership_service.membership.rank_of(node) is None

    # -- closing -------------------------------------------------------------------------------------------------

    def send_goodbye(self, error: BaseException | None = None, traceback: TracebackType | None = None) -> None:
        self._said_goodbye = True
        text = None
        if error is not None:
            lines = tracebacks.format_exception(type(error), error, traceback)
            text = sendable("".join(lines))[-MAX_CAUSE_CHARACTERS:]
        reason = LEFT if error is None else f"{type(error).__name__}: {error_text(error)}"[:1000]
        goodbye = Goodbye(reason=reason, traceback=text)
        for link in self.mesh.links().values():
            send_or_log(link, goodbye)

    def close(self) -> None:
        """Close all communicators and monitoring, after relayed messages, which may need new connections. Idempotent.
        The caller closes the mesh.
        """
        try:
            self.mesh.settle(self._failure_monitor.has_left)
        finally:
            self._end()

    def _end(self) -> None:
        # Nothing that follows is a loss to report, and no vote is given about it. The parts that use links and liveness
        # connections end before the mesh.
        self._failure_monitor.close()
        self._seed_check.close()
        self._runner.stop()
        self.node.cancel_token.cancel()  # ends dials of builds; closing `successors` waits for the builds
        self.agreements.close()
        if self.heartbeat is not None:
            self.heartbeat.close()
        if self.mesh.liveness_connections is not None:
            self.mesh.liveness_connections.close()
        self.successors.close()


def _machine(node: Node, membership: Membership) -> NodeMachine:
    config = node.config
    return NodeMachine(
        node.id,
        membership,
        recovery_timeout=config.recovery_timeout,
        probe_timeout=min(1.0, config.heartbeat_timeout / 2),
        longest_probe=2 * config.heartbeat_timeout,  # a ping, then a dial
        active=config.recovery_policy == "automatic",
        random=Random(node.id),
    )
