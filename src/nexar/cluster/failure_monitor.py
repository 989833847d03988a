"""Finds lost members from hints: lost links, ended liveness connections, silence, goodbyes, launcher reports.

A hint starts a probe, and a member that answers is not lost. Three hints are losses without a probe: silence for the
whole timeout, a goodbye with a traceback, and the kernel's mark of an ended process of this host. A goodbye without a
traceback is a departure, without a probe too, when the link ends. At most MAX_PROBES run at a time: without spare CPU,
each delays the answers it waits for. A live member without a link is dialed again, in the dial pool; if that fails,
this node reports a loss. The members decide together.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from nexar.cluster.control_loop import ControlLoop, DialCancelled
from nexar.cluster.decisions.failure_detector import LivenessReport, PeerLiveness
from nexar.cluster.decisions.membership_events import (
    Loss,
    LossKind,
    MembershipInput,
    PeerLossFound,
    PeerReachable,
    ProbeFinished,
)
from nexar.cluster.membership import Member, Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.peer_probe import PeerProbe, PingTable, broken_probe, ended_on_this_host
from nexar.cluster.task_pool import Priority
from nexar.errors import NexarError, PeerError
from nexar.links.carrier_selection import is_relayed
from nexar.links.link import Link
from nexar.types import NodeId, format_seconds
from nexar.wire.control import Goodbye, Message

NoticedState: TypeAlias = Literal["lost", "stuck", "left", "back"]
LEFT: Final = "it left"
_PROCESS_ENDED: Final = Loss(LossKind.ENDED, "its process has ended")
_RAISED: Final = "it raised an exception and left"
_LONGEST_DIAL: Final = 5.0
MAX_PROBES: Final = 8  # at a time; further ones wait


class _ProbeTask:
    """One investigation. Its steps run in sequence, in the control loop; only `_dial` in the dial pool."""

    def __init__(self, node: NodeId, report: Callable[[Loss | None], None], release: Callable[[], None]) -> None:
        """`end` calls `report` with the result, then `release`."""
        self.node: Final = node
        self._report = report
        self._release = release
        self._over = False  # written by the thread of the current step

    def end(self, loss: Loss | None) -> None:
        """The first result counts."""
        if not self._over:
            self._over = True
            try:
                self._report(loss)
            finally:
                self._release()

    def abandon(self) -> None:
        """Without a result: the node closes."""
        if not self._over:
            self._over = True
            self._release()


class FailureMonitor:
    """Any thread. Probes end with the node's control loop, dials with its dialer."""

    def __init__(
        self,
        node: Node,
        mesh: Mesh,
        pings: PingTable,
        *,
        control_loop: ControlLoop,
        report_event: Callable[[MembershipInput], None],
        notify_users: Callable[[NodeId, NoticedState, str], None],
        liveness_of: Callable[[NodeId], PeerLiveness | None],
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`report_event` receives events for the membership machine, `notify_users` events for users (node, state,
        cause). `liveness_of` returns the heartbeat's facts about a node; None if it is not watched.
        """
        self._loop = control_loop
        self._liveness_of = liveness_of
        self._own_delay = own_delay
        self._node = node
        self._mesh = mesh
        self._pings = pings
        self._report_event = report_event
        self._notify_users = notify_users
        self._timeout = min(1.0, node.config.heartbeat_timeout / 2)
        self._hung_timeout = node.config.stuck_timeout - min(
            node.config.heartbeat_timeout, node.config.stuck_timeout / 2
        )
        """Seconds without a heartbeat after which this node agrees that a node hangs: less than stuck_timeout, since
        members do not notice at the same moment.
        """
        self._closed = False  # written by `close`
        self._lock = threading.Lock()
        self._investigated: set[NodeId] = set()  # being probed after a hint; guarded by the lock
        self._lost: set[NodeId] = set()  # lost and not found again; guarded by the lock
        self._silent: set[NodeId] = set()  # lost to the heartbeat and not heard since; guarded by the lock
        self._goodbyes: dict[NodeId, Loss] = {}  # of members about to end their link; guarded by the lock
        self._probed_on_request: set[NodeId] = set()  # awaiting a ProbeFinished; guarded by the lock
        self._waiting_tasks: deque[Callable[[], None]] = deque()  # first steps of waiting tasks; guarded by the lock
        self._running_tasks = 0  # tasks that have begun, at most MAX_PROBES; guarded by the lock
        self._death_reports: dict[NodeId, Loss] = {}  # from launchers and the seed; guarded by the lock

    # -- hints -----------------------------------------------------------------------------------------------

    def goodbye_received(self, link: Link, message: Message) -> None:
        """After an exception the member is lost at once; otherwise when its link ends, because it still reads."""
        assert isinstance(message, Goodbye)
        loss = _announced_loss(message)
        with self._lock:
            self._goodbyes[link.peer] = loss
        if loss.is_conclusive:
            self._lose(link.peer, loss)

    def link_lost(self, link: Link, error: NexarError) -> None:
        with self._lock:
            goodbye = self._goodbyes.get(link.peer)
            is_lost = link.peer in self._lost
        if is_lost:
            return  # the loss of the member ended its link
        if goodbye is not None:
            self._report_left(link.peer, goodbye)
        else:
            self._investigate(link.peer, Loss(LossKind.LINK_BROKEN, _cause(error)))

    def has_left(self, node: NodeId) -> bool:
        with self._lock:
            return node in self._goodbyes or node in self._lost

    def is_investigating(self, nodes: Iterable[NodeId]) -> bool:
        with self._lock:
            return not self._investigated.isdisjoint(nodes)

    def route_lost(self, node: NodeId, cause: str) -> None:
        """No relay route is left. Never blocks."""
        self._investigate(node, Loss(LossKind.LINK_BROKEN, cause))

    def liveness_ended(self, node: NodeId, cause: str) -> None:
        self._investigate(node, Loss(LossKind.LINK_BROKEN, cause))

    def report_dead(self, node: NodeId, report: Loss) -> None:
        """If a probe confirms the report and it outranks the probe's finding, the report is the cause."""
        with self._lock:
            known = self._death_reports.get(node)
            is_news = known is None or not known.outranks(report)
            if is_news:
                self._death_reports[node] = report
            is_lost, has_left = node in self._lost, node in self._goodbyes
        if not is_lost:
            self._investigate(node, report)
        elif is_news and not has_left:
            self._lose(node, report)

    def liveness_changed(self, report: LivenessReport) -> None:
        """Silence is a loss even if the link looks healthy; a stuck member is only reported."""
        node = report.node
        with self._lock:
            is_known = node in self._silent and node not in self._lost  # a probe has found it since
            (self._silent.add if report.is_loss else self._silent.discard)(node)
        if report.is_loss:
            self._lose(node, Loss(LossKind.NO_ANSWER, report.cause))
        elif report.state == "stuck":
            self._notify_users(node, "stuck", report.cause)
        else:
            self._report_reachable(node)
            if not is_known:
                self._notify_users(node, "back", report.cause)

    def report_unreachable(self, node: NodeId, cause: str) -> None:
        """A local operation needs the member, so even a willing departure is a loss."""
        with self._lock:
            gone = node in self._goodbyes
        if gone:
            self._lose(node, Loss(LossKind.LEFT, LEFT))
        else:
            self._investigate(node, Loss(LossKind.LINK_BROKEN, cause))

    def probe_joiner(self, joiner: Member) -> None:
        """The seed lost a joiner: a node that sends it state must not wait for QUIC's timeout. Never blocks."""
        self._probe_link(joiner, self._timeout)

    def probe_neighbour(self, node: NodeId) -> None:
        """A relay delivers frames of a direct neighbour. If the connection is broken, lose the link before the
        neighbour gives up. Never blocks.
        """
        member = self._mesh.directory.find(node)
        if member is not None:
            self._probe_link(member, self._timeout / 2)

    def _probe_link(self, member: Member, timeout: float) -> None:
        link = self._mesh.find(member.node)
        if link is not None and not self._closed:
            self._start_task(member.node, _ignore_loss, self._begin_link_probe, member, link, timeout)

    def _begin_link_probe(self, task: _ProbeTask, member: Member, link: Link, timeout: float) -> None:
        self._probe(member, link, partial(self._run_step, task, _lose_link_if_unreachable, link), timeout=timeout)

    def adopt(self, membership: Membership) -> None:
        with self._lock:
            for lost in (self._lost, self._silent):
                lost.intersection_update([node for node in lost if membership.rank_of(node) is not None])
            for remembered in (self._goodbyes, self._death_reports):
                for node in [each for each in remembered if membership.rank_of(each) is None]:
                    remembered.pop(node)

    # -- probes --------------------------------------------------------------------------------------------

    def probe(self, node: NodeId) -> None:
        """Reports ProbeFinished, later or at once. Never blocks."""
        with self._lock:
            if self._closed or node in self._probed_on_request:
                return
            self._probed_on_request.add(node)
            was_lost = node in self._lost
        ended = self._loss_on_this_host(node)
        if ended is None:
            self._start_task(node, partial(self._report_probe_result, node, was_lost), self._probe_with_relays)
        else:
            self._report_probe_result(node, was_lost, ended)

    def _report_probe_result(self, node: NodeId, was_lost: bool, loss: Loss | None) -> None:
        # The mark goes before the report, so that a later request gets a new probe. An answer says nothing about a loss
        # that was found after the probe began.
        with self._lock:
            self._probed_on_request.discard(node)
            is_back = was_lost and loss is None and node in self._lost
            if is_back:
                self._lost.discard(node)
            has_left = node in self._goodbyes  # and has not ended yet
        if is_back and not has_left:
            self._report_event(PeerReachable(node))
            self._notify_users(node, "back", "it answers again")
        self._report_event(ProbeFinished(node, loss))

    def close(self) -> None:
        """Idempotent."""
        self._closed = True

    def _start_task(
        self, node: NodeId, report: Callable[[Loss | None], None], first: Callable[..., None], *arguments: Any
    ) -> None:
        """Run the step `first` of a new task when fewer than MAX_PROBES run."""
        task = _ProbeTask(node, report, self._start_next)
        with self._lock:
            self._waiting_tasks.append(partial(self._run_step, task, first, *arguments))
            if self._running_tasks == MAX_PROBES:
                return
            self._running_tasks += 1
        self._start_next()

    def _start_next(self) -> None:
        """The caller must have reserved a place in `_running_tasks`."""
        if not self._loop.call_soon(self._run_next):  # closed; or blocked, and then the next hint tries again
            with self._lock:
                self._running_tasks -= 1

    def _run_next(self) -> None:
        with self._lock:
            first = self._waiting_tasks.popleft() if self._waiting_tasks and not self._closed else None
            if first is None:
                self._running_tasks -= 1
        if first is not None:
            first()

    def _run_step(self, task: _ProbeTask, step: Callable[..., None], *arguments: Any) -> None:
        """A step that raises ends the task as unreachable; otherwise the node would never be probed again."""
        try:
            step(task, *arguments)
        except DialCancelled:
            task.abandon()
        except Exception as fault:  # noqa: BLE001 - logged
            if self._closed:
                task.abandon()
            else:
                task.end(broken_probe(task.node, fault))

    def _investigate(self, node: NodeId, hint: Loss) -> None:
        # Hints about this node itself are ignored.
        if self._closed or node == self._node.id or self._mesh.directory.find(node) is None:
            return
        with self._lock:
            if node in self._investigated or node in self._lost:  # a known loss needs no second probe
                return
            self._investigated.add(node)
        ended = self._loss_on_this_host(node)
        if ended is None:
            self._start_task(node, partial(self._finish_investigation, node, hint), self._probe_or_redial)
        else:
            self._finish_investigation(node, hint, ended)

    def _loss_on_this_host(self, node: NodeId) -> Loss | None:
        """ENDED at once if its process was on this host and has ended: most losses there need no other thread."""
        member, link = self._mesh.directory.find(node), self._mesh.find(node)
        if link is not None and link.process_ended:
            return _PROCESS_ENDED  # its port may still be open
        if member is None or (link is not None and link.failure is None):
            return None  # a member with a working link is asked
        return ended_on_this_host(self._node, member)

    def _finish_investigation(self, node: NodeId, hint: Loss, loss: Loss | None) -> None:
        # The mark stays until the report, so that a thread that waits for it finds the result.
        try:
            self._conclude(node, hint, loss)
        finally:
            with self._lock:
                self._investigated.discard(node)

    def _conclude(self, node: NodeId, hint: Loss, found: Loss | None) -> None:
        with self._lock:
            goodbye, report = self._goodbyes.get(node), self._death_reports.get(node)
        if found is None:
            return
        if goodbye is not None:
            self._report_left(node, goodbye)  # it left as it said, whatever the hint was
        elif report is not None and report.outranks(found):
            self._lose(node, report)
        else:
            self._lose(node, found.after(hint))

    # -- steps of tasks: the control loop, except `_dial` --------------------------------------------------

    def _probe(
        self,
        member: Member,
        link: Link | None,
        finished: Callable[[Loss | None], None],
        *,
        timeout: float,
        traffic_suffices: bool = True,
        patience: float = 0.0,
    ) -> None:
        PeerProbe(
            self._node,
            member,
            link,
            self._pings,
            deadline=self._loop.now() + timeout + self._own_delay(),
            finished=finished,
            loop=self._loop,
            run_in_thread=self._run_in_thread,
            traffic_suffices=traffic_suffices,
            patience=patience,
        )

    def _run_in_thread(self, task: Callable[[], None]) -> None:
        self._node.dialer.run_in_thread(task, Priority.PROBE)

    def _probe_with_relays(self, task: _ProbeTask) -> None:
        """Like `_probe_or_redial`, but a lost member also over relays: perhaps only this connection is broken."""
        with self._lock:
            lost = task.node in self._lost
        member, link = self._mesh.directory.find(task.node), self._detour(task.node) if lost else None
        if member is None or link is None:
            self._probe_or_redial(task)
        else:
            finished = partial(self._run_step, task, self._relays_probed, link)
            self._probe(member, link, finished, timeout=self._timeout, traffic_suffices=False)

    def _detour(self, node: NodeId) -> Link | None:
        try:
            return self._mesh.relay_routes.detour(node)
        except NexarError:
            return None  # this node closes

    def _relays_probed(self, task: _ProbeTask, link: Link, loss: Loss | None) -> None:
        if loss is not None:
            link.lose(f"it does not answer over other nodes: {loss.text}")
            self._probe_or_redial(task)
            return
        self._report_reachable(task.node, severed=True)
        self._notify_users(task.node, "back", "it is reachable over other nodes")
        task.end(None)

    def _probe_or_redial(self, task: _ProbeTask) -> None:
        """The task ends with the reason why the member is unreachable; None if it is reachable, on its link or a new
        one.
        """
        node = task.node
        member = self._mesh.directory.find(node)
        if member is None:
            task.end(Loss(LossKind.NO_ANSWER, "it is no longer a member"))
            return
        link, liveness = self._mesh.links().get(node), self._liveness_of(node)
        if liveness is not None and liveness.heartbeat_age >= self._hung_timeout + self._own_delay():
            text = f"alive but stuck: no heartbeat for {format_seconds(liveness.heartbeat_age)}"
            task.end(Loss(LossKind.NO_ANSWER, text))
            return
        finished = partial(self._run_step, task, self._probed, link)
        traffic_suffices, patience = liveness is not None, self._patience(liveness)
        self._probe(member, link, finished, timeout=self._timeout, traffic_suffices=traffic_suffices, patience=patience)

    def _probed(self, task: _ProbeTask, link: Link | None, loss: Loss | None) -> None:
        if link is not None and link.process_ended:
            task.end(_PROCESS_ENDED)  # meanwhile; the probe may have reached its port
            return
        over_relays = link is not None and is_relayed(link.schemes)
        if loss is not None and not loss.is_conclusive and over_relays:
            self._redial(task, severed=False)  # perhaps only the relay does not answer
        elif loss is not None or (link is not None and link.failure is None):
            task.end(loss)
        else:
            self._redial(task, severed=link is not None)

    def _redial(self, task: _ProbeTask, *, severed: bool) -> None:
        self._run_in_thread(partial(self._run_step, task, self._dial, severed))

    def _patience(self, liveness: PeerLiveness | None) -> float:
        """Extra seconds for an existing process: in total the silence after which its watchers report it."""
        silence = 0.0 if liveness is None else liveness.age
        return max(0.0, self._node.config.heartbeat_timeout - self._timeout - silence)

    def _dial(self, task: _ProbeTask, severed: bool) -> None:
        """Blocks: runs in the dial pool."""
        node, dial = task.node, self._mesh.relink if severed else self._mesh.dial
        try:
            longest = min(_LONGEST_DIAL, self._node.config.heartbeat_timeout) + self._own_delay()
            dial(node, time.monotonic() + longest)
        except NexarError as error:
            task.end(Loss(LossKind.NO_ANSWER, _cause(error)))
            return
        if severed:
            self._report_reachable(node, severed=True)
            self._notify_users(node, "back", "its link was lost and replaced")
        task.end(None)

    # -- reports: any thread -------------------------------------------------------------------------------

    def _report_reachable(self, node: NodeId, *, severed: bool = False) -> None:
        with self._lock:
            self._lost.discard(node)
        self._report_event(PeerReachable(node, severed))

    def _report_left(self, node: NodeId, goodbye: Loss) -> None:
        if goodbye.kind is LossKind.LEFT:
            self._notify_users(node, "left", goodbye.cause)
            self._report_event(PeerLossFound(node, goodbye, willing=True))
        else:
            self._lose(node, goodbye)

    def _lose(self, node: NodeId, loss: Loss) -> None:
        # QUIC would take long to time out, so the link ends now. Users are notified once per loss, and never of removed
        # members.
        if self._mesh.directory.find(node) is None:
            return
        with self._lock:
            is_first_report = node not in self._lost
            self._lost.add(node)
        if is_first_report:
            self._notify_users(node, "lost", loss.cause)
        self._report_event(PeerLossFound(node, loss))
        link = self._mesh.links().get(node)
        if link is not None:
            link.lose(loss.cause)


def _ignore_loss(_: Loss | None) -> None:
    """Does nothing."""


def _lose_link_if_unreachable(task: _ProbeTask, link: Link, loss: Loss | None) -> None:
    if loss is not None:
        link.lose(loss.text)
    task.end(None)


def _announced_loss(goodbye: Goodbye) -> Loss:
    if goodbye.traceback is None:
        return Loss(LossKind.LEFT, goodbye.reason or LEFT)
    return Loss(LossKind.RAISED, _RAISED, goodbye.traceback)


def _cause(error: NexarError) -> str:
    return str(getattr(error, "cause", None) or error) if isinstance(error, PeerError) else str(error)
