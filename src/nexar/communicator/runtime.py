"""The node runtime: what makes this node a member of a cluster.

    links, liveness connections, heartbeats, seed → FailureMonitor → MembershipService ⇄ other nodes
    MembershipService → next membership → Successors

NodeRuntime connects these parts.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback as tracebacks
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final

from nexar.cluster.agreements import Agreements
from nexar.cluster.decisions.failure_detector import PeerLiveness, watched, watchers
from nexar.cluster.decisions.membership_events import (
    ChangeRequested,
    Loss,
    LossKind,
    MembershipInput,
    MembershipMessage,
    NoProgress,
    PeerLossFound,
    PeerReachable,
)
from nexar.cluster.decisions.resize import ResizeRequest
from nexar.cluster.failure_monitor import LEFT, FailureMonitor, NoticedState
from nexar.cluster.heartbeat import Heartbeat
from nexar.cluster.liveness_connections import LivenessConnections
from nexar.cluster.membership import WORLD, Change, Member, Membership
from nexar.cluster.membership_service import MEMBERSHIP_MESSAGES, MembershipService
from nexar.cluster.mesh import EAGER_WORLD, Mesh
from nexar.cluster.node import Node
from nexar.cluster.peer_probe import PingTable
from nexar.communicator.events import FailureEvent
from nexar.communicator.generation import Generation
from nexar.communicator.generation_builder import GenerationBuilder
from nexar.communicator.outcome_errors import LocalRank, TerminationError
from nexar.communicator.status import make_status_report
from nexar.communicator.successors import Successors
from nexar.communicator.successors_requests import Revocations, SuccessorRequests
from nexar.errors import Expelled, JoinRefused, LinkClosed, NexarError, PeerLost, error_text, sendable
from nexar.links.link import Link
from nexar.types import NodeId, format_seconds
from nexar.wire.control import MAX_CAUSE_CHARACTERS, Beat, CurrentCall, Goodbye, Message, Ping, Pong, Revoke, Suspect
from nexar.wire.status import StatusReport
from nexar.wire.text import foreign_line, foreign_lines


class CheckpointRequests:
    """This node's requests for the next checkpoint. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # over everything below
        self._waiting: tuple[Member, ...] = ()
        self._leaving = False
        self._removals: dict[NodeId, str] = {}

    def set_waiting(self, members: tuple[Member, ...]) -> None:
        with self._changed:
            self._waiting = members
            self._changed.notify_all()

    def leave(self) -> None:
        with self._changed:
            self._leaving = True

    def remove(self, node: NodeId, reason: str) -> None:
        with self._changed:
            self._removals[node] = reason[:1000]

    def settle(self, gone: frozenset[NodeId]) -> None:
        with self._changed:
            for node in gone:
                self._removals.pop(node, None)

    def wait(self, count: int, timeout: float, is_over: Callable[[], bool]) -> bool:
        """False: timeout, or `is_over`; call `recheck` after `is_over` changes."""
        with self._changed:
            seconds = min(timeout, threading.TIMEOUT_MAX)
            self._changed.wait_for(lambda: len(self._waiting) >= count or is_over(), seconds)
            return len(self._waiting) >= count

    def recheck(self) -> None:
        """Make waiters check `is_over`. Never blocks."""
        with self._changed:
            self._changed.notify_all()

    def mine(self) -> ResizeRequest:
        with self._changed:
            return ResizeRequest(self._waiting, self._leaving, dict(self._removals))


_log = logging.getLogger(__name__)


class NodeRuntime:
    """One node as a member. Any thread. Call `send_goodbye`, then `close`, then close the mesh."""

    def __init__(self, node: Node, mesh: Mesh, membership: Membership) -> None:
        # Sends to the seed; False: not connected. Must not block. Written once, before the mesh adopts the membership.
        self.send_to_seed: Callable[[Message], bool] = _no_seed
        # Calls the function with whether the seed answers within the given seconds. Must not block. Written once.
        self.ping_seed: Callable[[float, Callable[[bool], None]], None] = _assume_answer
        self.node: Final = node
        self.mesh: Final = mesh
        self.successors: Final = Successors(GenerationBuilder(node, mesh, node.config), membership, node.control_loop)
        pings = PingTable()
        self._failure_monitor = FailureMonitor(
            node,
            mesh,
            pings,
            control_loop=node.control_loop,
            report_event=self._report,
            notify_users=self._notify_users,
            liveness_of=self._liveness_of,
            own_delay=lambda: node.delay_meter.seconds,
        )
        self.membership_service: Final = MembershipService(
            node,
            mesh,
            membership,
            control_loop=node.control_loop,
            listener=self,
            probe=self._failure_monitor.probe,
            send_to_seed=self._relay_to_seed,
            own_delay=lambda: node.delay_meter.seconds,
        )
        self.successor_requests: Final = SuccessorRequests(
            self.successors, self.membership_service, self._failure_monitor
        )
        self.checkpoint_requests: Final = CheckpointRequests()
        # This node left by agreement. Written before its communicators end.
        self.has_left = False
        self._expelling = threading.Lock()  # taken by the first report, never released
        # The state received on joining. Written once, before the first communicator.
        self.state: Any = None
        self.successors.report_unreachable = self._failure_monitor.report_unreachable
        self.successors.renew = lambda which, epoch: self.membership_service.put(
            ChangeRequested(renewed=which, epoch=epoch)
        )
        self.successors.opened = self._opened
        self.revocations: Final = Revocations(self.successors, self._send_to)
        self.successors.send_notice = self.revocations.send_notice
        self.agreements: Final = Agreements(node.id, node.progress, node.control_loop, self.membership_service.send)
        self.heartbeat: Heartbeat | None = None
        self._liveness: LivenessConnections | None = None
        mesh.control.connect_lost(self._failure_monitor.link_lost)
        mesh.control.connect(self._failure_monitor.goodbye_received, Goodbye)
        mesh.control.connect(pings.arrived, Ping, Pong)
        mesh.control.connect(self._membership_message, *MEMBERSHIP_MESSAGES)
        mesh.control.connect(self.revocations.received, Revoke)
        mesh.on_expelled = self.expelled
        mesh.relay_routes.probe_neighbour, mesh.relay_routes.cut_off = (
            self._failure_monitor.probe_neighbour,
            self._failure_monitor.cut_off,
        )
        if node.has_remote_peers:
            self._watch(membership)

    def _watch(self, membership: Membership) -> None:
        """Start heartbeats and liveness connections. Only if peers are other processes: the threads of one process do
        not end silently.
        """
        self.heartbeat = Heartbeat(
            self.node,
            self.mesh.links,
            self.doing,
            self._failure_monitor.liveness_changed,
            control_loop=self.node.control_loop,
            meter=self.node.delay_meter,
        )
        self._liveness = LivenessConnections(
            self.node, self.mesh.links, self._failure_monitor.liveness_ended, control_loop=self.node.control_loop
        )
        self.mesh.liveness_connections = self._liveness
        self.mesh.control.connect(self._beat_received, Beat)
        self.heartbeat.adopt(membership)
        self._liveness.adopt(membership)

    def dial_watchers(self) -> None:
        """In the background, to nodes that watch this one or that it watches."""
        membership = self.membership_service.membership
        rank = membership.rank_of(self.node.id)
        if rank is not None and self.heartbeat is not None and membership.size > EAGER_WORLD:
            size, topology = membership.size, self.node.config.topology
            ranks = {*watchers(size, rank, topology), *watched(size, rank, topology)}
            wanted = [membership.members[other].node for other in ranks]
            self.node.dialer.run_in_thread(partial(self._link, wanted))

    def _link(self, nodes: Sequence[NodeId]) -> None:
        for node in filter(self.mesh.relay_routes.wants, nodes):
            try:
                self.mesh.dial(node, time.monotonic() + self._silence_limit())
            except NexarError as error:
                self._failure_monitor.report_unreachable(node, str(error))

    # -- called by the driver ------------------------------------------------------------------------------------

    def _membership_message(self, link: Link, message: Message) -> None:
        assert isinstance(message, MembershipMessage)
        if isinstance(message, Suspect) or (message.instance[0] == WORLD and message.instance[2] == 0):
            self.membership_service.message_received(link.peer, message)
        else:
            self.agreements.receive(link.peer, message)

    def _opened(self, generation: Generation) -> None:
        about = generation.communicator, generation.membership.epoch
        self.agreements.add_generation(*about, generation.nodes)
        generation.when_closed.append(partial(self.agreements.end_generation, *about))

    def _beat_received(self, link: Link, message: Message) -> None:
        assert isinstance(message, Beat)
        assert self.heartbeat is not None
        self.heartbeat.arrived(link.peer, message)
        if message.epoch < self.membership_service.membership.epoch:
            self.membership_service.send_changes_since(link.peer, message.epoch)

    def _send_to(self, node: NodeId, message: Message) -> None:
        if not self.is_gone(node):
            self.membership_service.send(node, message)

    def _relay_to_seed(self, message: Message) -> bool:
        return self.send_to_seed(message)

    # -- called by the seed session ------------------------------------------------------------------------------

    def seed_message(self, message: Message) -> None:
        seed = self.membership_service.membership.seed
        if seed is not None and isinstance(message, MembershipMessage):
            if seed.node in self.membership_service.suspects():
                self.membership_service.put(PeerReachable(seed.node))
            self.membership_service.message_received(seed.node, message)

    def seed_lost(self, cause: str) -> None:
        self._lose_seed(Loss(LossKind.LINK_BROKEN, cause))

    def _lose_seed(self, loss: Loss) -> None:
        seed = self.membership_service.membership.seed
        if seed is not None:
            self.membership_service.put(PeerLossFound(seed.node, loss))

    def seed_back(self, epoch: int) -> None:
        """It may have missed changes since this epoch."""
        seed = self.membership_service.membership.seed
        if seed is not None:
            self.membership_service.put(PeerReachable(seed.node))
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
        """A node no longer among these joiners is a member or gone."""
        before = self.checkpoint_requests.mine().waiting
        self.checkpoint_requests.set_waiting(members)
        for joiner in before:
            if joiner not in members and self.is_gone(joiner.node):
                self._failure_monitor.probe_joiner(joiner)
        self.expect(members)

    def expect(self, members: Sequence[Member]) -> None:
        self.mesh.expect({each.node: each for each in (*self.checkpoint_requests.mine().waiting, *members)}.values())

    # -- between the parts -------------------------------------------------------------------------------------

    def _report(self, event: MembershipInput) -> None:
        """A loss may need the seed's vote, and an open connection does not show that the seed is alive: check it."""
        self.membership_service.put(event)
        if (
            isinstance(event, PeerLossFound)
            and not event.willing
            and self.membership_service.membership.seed is not None
        ):
            timeout = self._silence_limit()
            self.ping_seed(timeout, partial(self._seed_pinged, timeout))

    def _seed_pinged(self, timeout: float, answered: bool) -> None:
        if not answered:
            self._lose_seed(Loss(LossKind.NO_ANSWER, f"it does not answer within {format_seconds(timeout)}"))

    def _silence_limit(self) -> float:
        return self.node.config.heartbeat_timeout + self.node.delay_meter.seconds

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
            self._renew_stalled()
        elif state != "stuck" and self.node.config.recovery_policy == "manual":
            self.agreements.voter_lost(node, cause)  # no member is removed before the user asks
        if state == "lost" and self.node.config.recovery_policy == "abort":
            self._end_all(partial(_lost_in, node, cause))

    def _renew_stalled(self) -> None:
        """Renew stalled communicators whose members are all back: messages sent meanwhile may be lost."""
        suspects = self.membership_service.suspects().keys()
        stalled = (each for each in self.successors.generations() if each.is_stalled)
        again = tuple(each.communicator for each in stalled if not suspects & each.nodes)
        if again:
            self.membership_service.put(ChangeRequested(renewed=again))

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

    # -- MembershipListener --------------------------------------------------------------------------------------

    def membership_decided(self, change: Change, after: Membership) -> None:
        self.successors.membership_decided(change, after)

    def membership_adopted(self, change: Change, after: Membership) -> None:
        self._failure_monitor.adopt(after)
        self.checkpoint_requests.settle(change.gone)
        if self.heartbeat is not None:
            self.heartbeat.adopt(after)
        if self._liveness is not None:
            self._liveness.adopt(after)
        self.dial_watchers()
        self.successors.membership_adopted(change, after)
        self.agreements.voters_removed(change.left)

    def stalled(self, stall: NoProgress) -> None:
        self.successors.stalled(stall)

    def expelled(self, epoch: int, reason: str, *, willing: bool = False) -> None:
        """Members, the seed and the ballot may report it; the first counts."""
        self.has_left = self.has_left or willing
        if not self._expelling.acquire(blocking=False):
            return  # already reported
        if not self.has_left:
            _log.warning("this node was expelled in epoch %d: %s", epoch, foreign_line(reason))
        elastic = self.node.config.elastic_enabled
        self._end_all(lambda place: Expelled(epoch=epoch, reason=reason, rank=place.rank, elastic=elastic))

    def _end_all(self, error_of: TerminationError) -> None:
        self.successors.end_all(error_of)
        self.agreements.end_all(LinkClosed(owner="this node's place in the cluster"))

    def is_gone(self, node: NodeId) -> bool:
        return self.membership_service.membership.rank_of(node) is None

    # -- closing -------------------------------------------------------------------------------------------------

    def send_goodbye(self, error: BaseException | None = None, traceback: TracebackType | None = None) -> None:
        text = None
        if error is not None:
            lines = tracebacks.format_exception(type(error), error, traceback)
            text = sendable("".join(lines))[-MAX_CAUSE_CHARACTERS:]
        reason = LEFT if error is None else f"{type(error).__name__}: {error_text(error)}"[:1000]
        goodbye = Goodbye(reason=reason, traceback=text)
        for link in self.mesh.links().values():
            _send_or_log(link, goodbye)

    def close(self) -> None:
        """Close every communicator and all monitoring, after relayed messages, which may need new connections.
        Idempotent. The caller closes the mesh.
        """
        try:
            self.mesh.settle(self._failure_monitor.has_left)
        finally:
            self._end()

    def _end(self) -> None:
        self._failure_monitor.close()
        self.membership_service.close()
        self.node.cancel_token.cancel()  # ends dials of builds, which are joined below
        self.agreements.close()
        if self.heartbeat is not None:
            self.heartbeat.close()
        if self._liveness is not None:
            self._liveness.close()
        self.successors.close()


def _send_or_log(link: Link, message: Message) -> None:
    """A peer that misses the message detects the end of the link."""
    try:
        link.send_control(message)
    except NexarError as gone:
        _log.debug("could not send to node %x: %s", link.peer, gone)


def _no_seed(_: Message) -> bool:
    return False


def _assume_answer(_: float, done: Callable[[bool], None]) -> None:
    done(True)


def _lost_in(node: NodeId, cause: str, place: LocalRank) -> NexarError:
    rank = place.membership.rank_of(node)
    remedy = "the policy is abort, so no rank continues; start the job again"
    return PeerLost(rank=rank, node=node, cause=cause, remedy=remedy)
