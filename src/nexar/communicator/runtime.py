"""What one member will bring to the next checkpoint: who waits to come in, whether it wants to go, whom it asks to.

This node as a member of a cluster: everything that keeps it one, from its links to the line of its communicators.

    links, death lines, beats, the seed's word ─→ Lookout ─→ Recovery ⇄ the others ─→ next membership ─→ Lineage

Each part knows the next one only by a function that it was given; they are put together here.
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
from nexar.cluster.control_channel import ControlChannel
from nexar.cluster.decisions.failure_detector import PeerLiveness, watched, watchers
from nexar.cluster.decisions.membership_events import (
    ChangeRequested,
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
from nexar.communicator.generation import Generation, GenerationBuilder
from nexar.communicator.status import make_status_report
from nexar.communicator.successors import Successors
from nexar.communicator.successors_requests import Revocations, SuccessorRequests
from nexar.errors import Expelled, LinkClosed, NexarError, PeerLost, sendable, told
from nexar.group import Group
from nexar.links.link import Link
from nexar.types import NodeId, format_seconds
from nexar.wire.control import MAX_CAUSE_CHARACTERS, Beat, CurrentCall, Goodbye, Message, Ping, Pong, Revoke, Suspect
from nexar.wire.status import StatusReport
from nexar.wire.text import foreign_line, foreign_lines


class CheckpointRequests:
    """What this node will bring to the next checkpoint. Any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # over everything below
        self._waiting: tuple[Member, ...] = ()
        self._leaving = False
        self._removals: dict[NodeId, str] = {}

    def set_waiting(self, members: tuple[Member, ...]) -> None:
        """The seed says who waits to come in."""
        with self._changed:
            self._waiting = members
            self._changed.notify_all()

    def leave(self) -> None:
        """This node wants to go."""
        with self._changed:
            self._leaving = True

    def remove(self, node: NodeId, reason: str) -> None:
        """Another is to go."""
        with self._changed:
            self._removals[node] = reason[:1000]

    def settle(self, gone: frozenset[NodeId]) -> None:
        """These are gone: nobody need ask for it any more."""
        with self._changed:
            for node in gone:
                self._removals.pop(node, None)

    def wait(self, count: int, timeout: float, is_over: Callable[[], bool]) -> bool:
        """Until so many wait; False: not in time, or it is over. Whoever ends it calls `look` afterwards."""
        with self._changed:
            seconds = min(timeout, threading.TIMEOUT_MAX)
            self._changed.wait_for(lambda: len(self._waiting) >= count or is_over(), seconds)
            return len(self._waiting) >= count

    def look(self) -> None:
        """Let who waits see whether it is over. Never blocks."""
        with self._changed:
            self._changed.notify_all()

    def mine(self) -> ResizeRequest:
        """As the others are told."""
        with self._changed:
            return ResizeRequest(self._waiting, self._leaving, dict(self._removals))


_log = logging.getLogger(__name__)


class NodeRuntime:
    """Of one node. Any thread. Close it before the mesh; `say_goodbye` first."""

    def __init__(
        self,
        node: Node,
        mesh: Mesh,
        board: ControlChannel,
        membership: Membership,
    ) -> None:
        """`board` is where the control messages of the mesh arrive."""
        self.send_to_seed: Callable[[Message], bool] = _no_seed
        """Says a word to the seed; False: there is no line. Must not block. Written once, before the mesh adopts the
        membership."""
        self.seed_answers: Callable[[float], bool] = _is_there
        """Whether the seed answers within so many seconds. Blocks. Likewise."""
        self.node: Final = node
        self.mesh: Final = mesh
        self.successors: Final = Successors(GenerationBuilder(node, mesh, node.config), membership)
        pings = PingTable()
        self._failure_monitor = FailureMonitor(
            node,
            mesh,
            pings,
            tell=self._tell,
            noticed=self._notice,
            known=self._known,
            own_delay=lambda: node.delay_meter.seconds,
        )
        self.membership_service: Final = MembershipService(
            node,
            mesh,
            membership,
            listener=self,
            probe=self._failure_monitor.probe,
            send_to_seed=self._relay_to_seed,
            own_delay=lambda: node.delay_meter.seconds,
        )
        self.successor_requests: Final = SuccessorRequests(
            self.successors, self.membership_service, self._failure_monitor
        )
        """For what comes after a communicator."""
        self.checkpoint_requests: Final = CheckpointRequests()
        """For the next checkpoint."""
        self.has_left = False
        """As it was agreed at a checkpoint. Written by whoever performs, before the communicators are over."""
        self._expelling = threading.Lock()  # taken by the first that says so, never given back
        self.state: Any = None
        """What the members handed over when this node joined. Written once, before the first communicator."""
        self.successors.missed = self._failure_monitor.missed
        self.successors.renew = lambda which, epoch: self.membership_service.put(
            ChangeRequested(renewed=which, epoch=epoch)
        )
        self.successors.opened = self._opened
        self.revocations: Final = Revocations(node.id, self.successors, self._send_to)
        self.successors.listed = self.revocations.listed
        self.successors.absent = self.revocations.absent
        self.agreements: Final = Agreements(node.id, node.progress, self.membership_service.say)
        self.heartbeat: Heartbeat | None = None
        self._lines: LivenessConnections | None = None
        board.on_lost = self._failure_monitor.link_lost
        board.connect(self._failure_monitor.goodbye_received, Goodbye)
        board.connect(pings.arrived, Ping, Pong)
        board.connect(self._heard, *MEMBERSHIP_MESSAGES)
        board.connect(self.revocations.heard, Revoke)
        mesh.on_expelled = self.expelled
        mesh.relay_routes.doubted, mesh.relay_routes.cut_off = (
            self._failure_monitor.doubted,
            self._failure_monitor.cut_off,
        )
        if node.meets_strangers:
            self._watch(board, membership)

    def _watch(self, board: ControlChannel, membership: Membership) -> None:
        """Where a member can die without a word: not in a world of threads."""
        self.heartbeat = Heartbeat(
            self.node, self.mesh.links, self.doing, self._failure_monitor.found, meter=self.node.delay_meter
        )
        self._lines = LivenessConnections(self.node, self.mesh.links, self._failure_monitor.liveness_ended)
        self.mesh.liveness_connections = self._lines
        board.connect(self._beat_received, Beat)
        self.heartbeat.adopt(membership)
        self._lines.adopt(membership)

    def dial_watchers(self) -> None:
        """See that there are links to those who watch this node and whom it watches. Never blocks."""
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
                self.mesh.dial(node, time.monotonic() + self._longest_silence())
            except NexarError as error:
                self._failure_monitor.missed(node, str(error))

    # -- from the driving thread -------------------------------------------------------------------------------

    def _heard(self, link: Link, message: Message) -> None:
        assert isinstance(message, MembershipMessage)
        if isinstance(message, Suspect) or (message.instance[0] == WORLD and message.instance[2] == 0):
            self.membership_service.heard(link.peer, message)
        else:
            self.agreements.hear(link.peer, message)

    def _opened(self, generation: Generation) -> None:
        about = generation.communicator, generation.membership.epoch
        self.agreements.know(*about, generation.nodes)
        generation.when_closed.append(partial(self.agreements.end, *about))

    def _beat_received(self, link: Link, message: Message) -> None:
        assert isinstance(message, Beat)
        assert self.heartbeat is not None
        self.heartbeat.arrived(link.peer, message)
        if message.epoch < self.membership_service.membership.epoch:
            self.membership_service.behind(link.peer, message.epoch)

    def _send_to(self, node: NodeId, message: Message) -> None:
        if not self.is_gone(node):
            self.membership_service.say(node, message)

    def _relay_to_seed(self, message: Message) -> bool:
        return self.send_to_seed(message)

    # -- from the seed -----------------------------------------------------------------------------------------

    def seed_message(self, message: Message) -> None:
        """A word of the seed about who comes next."""
        seed = self.membership_service.membership.seed
        if seed is not None and isinstance(message, MembershipMessage):
            if seed.node in self.membership_service.suspects():
                self.membership_service.put(PeerReachable(seed.node))
            self.membership_service.heard(seed.node, message)

    def seed_lost(self, cause: str) -> None:
        """There is no line to the seed: who counts votes need not wait for its."""
        seed = self.membership_service.membership.seed
        if seed is not None:
            self.membership_service.put(PeerLossFound(seed.node, cause))

    def seed_back(self, epoch: int) -> None:
        """There is one again. The seed may have missed what was chosen since this epoch."""
        seed = self.membership_service.membership.seed
        if seed is not None:
            self.membership_service.put(PeerReachable(seed.node))
            self.membership_service.behind(seed.node, epoch)

    def seed_reported_dead(self, node: NodeId, epoch: int, cause: str) -> None:
        """The seed, or a launcher by it, has seen a member's end."""
        del epoch  # a node that has ended has ended, whatever the epoch is by now
        self._failure_monitor.report_dead(node, cause)

    def seed_refused(self, reason: str, expelled: int) -> None:
        """The seed wants nothing more to do with this node: if the others went on without it, all is over here."""
        if expelled:
            self.expelled(expelled, reason)
        elif not self.has_left:
            _log.warning("the seed refused this node, which goes on without it: %s", foreign_line(reason))

    def seed_reported_waiting(self, members: tuple[Member, ...]) -> None:
        """The seed says who waits to come in. Who does not any more has become a member, or is gone."""
        before = self.checkpoint_requests.mine().waiting
        self.checkpoint_requests.set_waiting(members)
        for guest in before:
            if guest not in members and self.is_gone(guest.node):
                self._failure_monitor.joiner_missed(guest)
        self.expect(members)

    def expect(self, members: Sequence[Member]) -> None:
        """These may have links with this node before they are members."""
        self.mesh.expect({each.node: each for each in (*self.checkpoint_requests.mine().waiting, *members)}.values())

    # -- between the parts -------------------------------------------------------------------------------------

    def _tell(self, event: MembershipInput) -> None:
        """Where a member is lost, the vote of the seed may be needed: is it still there? A line need not show that."""
        self.membership_service.put(event)
        if (
            isinstance(event, PeerLossFound)
            and not event.willing
            and self.membership_service.membership.seed is not None
        ):
            self.node.dialer.run_in_thread(self._look_for_seed)

    def _look_for_seed(self) -> None:
        timeout = self._longest_silence()
        if not self.seed_answers(timeout):
            self.seed_lost(f"it does not answer within {format_seconds(timeout)}")

    def _longest_silence(self) -> float:
        """Seconds after which who has not answered is missed."""
        return self.node.config.heartbeat_timeout + self.node.delay_meter.seconds

    def _known(self, node: NodeId) -> PeerLiveness | None:
        return None if self.heartbeat is None else self.heartbeat.known(node)

    def _notice(self, node: NodeId, state: NoticedState, cause: str) -> None:
        cause = foreign_lines(cause)  # it may be the member's own
        for generation in self.successors.generations():
            rank = generation.membership.rank_of(node)
            if rank is not None:
                generation.failures.publish(FailureEvent(rank, node, cause, state, generation.membership.epoch))
        if state == "back":
            self.agreements.find(node)
            self._renew_stalled()
        elif state != "stuck" and self.node.config.recovery_policy == "manual":
            self.agreements.miss(node, cause)  # nobody is removed before a user asks for it
        if state == "lost" and self.node.config.recovery_policy == "abort":
            self._end_all(partial(_lost_in, node, cause))

    def _renew_stalled(self) -> None:
        """Communicators that were given up for want of a majority, and all of whose members are here again, go on with
        a successor: what was sent on them meanwhile may be lost.
        """
        suspects = self.membership_service.suspects().keys()
        stalled = (each for each in self.successors.generations() if each.is_stalled)
        again = tuple(each.communicator for each in stalled if not suspects & each.nodes)
        if again:
            self.membership_service.put(ChangeRequested(renewed=again))

    def doing(self) -> tuple[tuple[CurrentCall, ...], str]:
        """For the beats: what this node does, and the last call that it finished."""
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

    def bulletin(self) -> StatusReport | None:
        """For the seed's board. None: this node is no member any more."""
        call_logs = [generation.context.call_log for generation in self.successors.generations()]
        return make_status_report(self.membership_service.membership, self.node.id, call_logs, self.mesh.links())

    # -- Heir --------------------------------------------------------------------------------------------------

    def changes(self, change: Change, after: Membership) -> None:
        """See Heir."""
        self.successors.changes(change, after)

    def changed(self, change: Change, after: Membership) -> None:
        """See Heir."""
        self._failure_monitor.adopt(after)
        self.checkpoint_requests.settle(change.gone)
        if self.heartbeat is not None:
            self.heartbeat.adopt(after)
        if self._lines is not None:
            self._lines.adopt(after)
        self.dial_watchers()
        self.successors.changed(change, after)
        self.agreements.lose(change.left)

    def stalled(self, stall: NoProgress) -> None:
        """See Heir."""
        self.successors.stalled(stall)

    def expelled(self, epoch: int, reason: str, *, willing: bool = False) -> None:
        """See Heir; also said by a peer that this node has dialed."""
        self.has_left = self.has_left or willing
        if not self._expelling.acquire(blocking=False):
            return  # members, the seed and the ballot all say it
        if not self.has_left:
            _log.warning("this node was expelled in epoch %d: %s", epoch, foreign_line(reason))
        elastic = self.node.config.elastic_enabled
        self._end_all(lambda group: Expelled(epoch=epoch, reason=reason, rank=group.rank, elastic=elastic))

    def _end_all(self, error_of: Callable[[Group], NexarError]) -> None:
        """Every communicator is over, and every ballot: the others' votes do not come any more."""
        self.successors.end_all(error_of)
        self.agreements.end_all(LinkClosed(owner="this node's place in the cluster"))

    # -- what users ask for --------------------------------------------------------------------------------------

    def is_gone(self, node: NodeId) -> bool:
        """Whether it is no member any more."""
        return self.membership_service.membership.rank_of(node) is None

    # -- the end -----------------------------------------------------------------------------------------------

    def say_goodbye(self, error: BaseException | None = None, traceback: TracebackType | None = None) -> None:
        """Tell the others that this node leaves; with its traceback if it raised."""
        text = None
        if error is not None:
            lines = tracebacks.format_exception(type(error), error, traceback)
            text = sendable("".join(lines))[-MAX_CAUSE_CHARACTERS:]
        reason = LEFT if error is None else f"{type(error).__name__}: {told(error)}"[:1000]
        goodbye = Goodbye(reason=reason, traceback=text)
        for link in self.mesh.links().values():
            _send_or_log(link, goodbye)

    def close(self) -> None:
        """Every communicator, and all that watches. Idempotent. The mesh is the caller's to close. First what was sent
        over others arrives: new connections may be needed for it, and nobody makes any afterwards.
        """
        try:
            self.mesh.settle(self._failure_monitor.has_left)
        finally:
            self._end()

    def _end(self) -> None:
        self._failure_monitor.close()
        self.membership_service.close()
        self.node.cancel_token.make()  # who makes a communicator may be dialing for it, and is waited for below
        self.agreements.close()
        if self.heartbeat is not None:
            self.heartbeat.close()
        if self._lines is not None:
            self._lines.close()
        self.successors.close()


def _send_or_log(link: Link, message: Message) -> None:
    """Who cannot be told hears of it in another way."""
    try:
        link.send_control(message)
    except NexarError as gone:
        _log.debug("not said to node %x: %s", link.peer, gone)


def _no_seed(_: Message) -> bool:
    return False


def _is_there(_: float) -> bool:
    return True


def _lost_in(node: NodeId, cause: str, group: Group) -> NexarError:
    rank = group.membership.rank_of(node)
    remedy = "the policy is abort: nobody goes on; start the job again"
    return PeerLost(rank=rank, node=node, cause=cause, remedy=remedy)
