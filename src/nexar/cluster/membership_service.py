"""Feeds events to MembershipMachine and performs its actions.

Invariant: the lock orders the events. Actions are performed in that order, without the lock (`SerialQueue`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final, Protocol, assert_never, get_args

from nexar.cluster.control_channel import BackgroundSender
from nexar.cluster.control_loop import ControlLoop, SerialQueue
from nexar.cluster.decisions.membership_events import (
    MembershipAction,
    MembershipDecided,
    MembershipInput,
    MembershipMessage,
    MessageReceived,
    NoProgress,
    OwnDelayChanged,
    SelfExpelled,
    SendMessage,
    StartProbe,
    Tick,
)
from nexar.cluster.decisions.membership_machine import MembershipMachine
from nexar.cluster.membership import Change, Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.task_pool import Priority
from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.types import NodeId
from nexar.wire.control import Chosen, Message

_log = logging.getLogger(__name__)

_PROBE_INTERVAL: Final = 0.5  # seconds
_MIN_DELAY_CHANGE: Final = 0.25  # seconds; smaller changes of the own delay are not reported to the machine
MEMBERSHIP_MESSAGES: Final[tuple[type[Message], ...]] = get_args(MembershipMessage)


class MembershipListener(Protocol):
    """Called one at a time; must not block. A protocol because communicator/, a higher layer, implements it."""

    def membership_decided(self, change: Change, after: Membership) -> None:
        """The next membership is decided and links are still open: calls that it ends must end because of it, not
        because of a closed link.
        """

    def membership_adopted(self, change: Change, after: Membership) -> None:
        """The mesh has the next membership."""

    def stalled(self, stall: NoProgress) -> None:
        """No decision for now."""

    def expelled(self, epoch: int, reason: str, *, willing: bool = False) -> None:
        """This node was removed; `willing`: as agreed."""


class MembershipService:
    """Any thread. Close it before the mesh."""

    def __init__(
        self,
        node: Node,
        mesh: Mesh,
        membership: Membership,
        *,
        control_loop: ControlLoop,
        listener: MembershipListener,
        probe: Callable[[NodeId], None],
        send_to_seed: Callable[[Message], bool],
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`probe` puts ProbeFinished. `send_to_seed` must not block. `own_delay` extends deadlines."""
        self._own_delay = own_delay
        self._node = node
        self._mesh = mesh
        self._listener = listener
        self._probe = probe
        self._send_to_seed = send_to_seed
        self._seed = None if membership.seed is None else membership.seed.node
        config = node.config
        self._lock = threading.Lock()
        self._machine = MembershipMachine(  # guarded by the lock
            node.id,
            membership,
            recovery_timeout=config.recovery_timeout,
            probe_timeout=min(1.0, config.heartbeat_timeout / 2),
            longest_probe=2 * config.heartbeat_timeout,  # a ping, then a dial
            active=config.recovery_policy == "automatic",
            random=Random(node.id),
        )
        self._queue = SerialQueue(self._do)  # filled under the lock
        self._sender = BackgroundSender(
            mesh, partial(node.dialer.run_in_thread, priority=Priority.CONTROL), own_delay=own_delay
        )
        self._reported_delay = 0.0  # last value reported to the machine; guarded by the lock
        self._closed = False  # written by `close`
        self._membership = membership  # the newest performed one; written by the performing thread
        self._last_probes: dict[NodeId, float] = {}  # last probes of members without a link; any thread
        self._timer = control_loop.call_at(None, self._on_timer)

    @property
    def membership(self) -> Membership:
        return self._membership

    def suspects(self) -> dict[NodeId, str]:
        with self._lock:
            return dict(self._machine.suspects())

    def missing(self) -> list[NodeId]:
        with self._lock:
            return self._machine.missing()

    def put(self, event: MembershipInput) -> None:
        if self._closed:
            return
        now = time.monotonic()
        with self._lock:
            self._queue.post(self._update_delay(now))
            self._queue.post(self._machine.step(event, now))
            due = self._machine.due(now)
        self._queue.drain()
        self._timer.wake_by(due)

    def _update_delay(self, now: float) -> list[MembershipAction]:
        """Under the lock."""
        seconds = self._own_delay()
        if abs(seconds - self._reported_delay) < _MIN_DELAY_CHANGE:
            return []
        self._reported_delay = seconds
        return self._machine.step(OwnDelayChanged(seconds), now)

    def message_received(self, sender: NodeId, message: MembershipMessage) -> None:
        self.put(MessageReceived(sender, message))

    def send_changes_since(self, sender: NodeId, epoch: int) -> None:
        with self._lock:
            changes = self._machine.changes_since(epoch)
        for number, value in enumerate(changes, epoch):
            self.send(sender, Chosen((0, number, 0), value))

    def _on_timer(self, now: float) -> float | None:
        self.put(Tick())
        self._timer.wake_by(self._mesh.lose_overdue(now))
        with self._lock:
            return self._machine.due(now)

    # -- actions -------------------------------------------------------------------------------------------

    def _do(self, action: MembershipAction) -> None:
        match action:
            case SendMessage():
                self.send(action.node, action.message)
            case StartProbe():
                self._probe(action.node)
            case MembershipDecided():
                self._adopt(action.change)
            case SelfExpelled():
                self._listener.expelled(action.epoch, action.reason, willing=action.willing)
            case NoProgress():
                self._listener.stalled(action)
            case _:
                assert_never(action)

    def send(self, node: NodeId, message: Message) -> None:
        """The message may be lost."""
        if node == self._seed:
            self._send_to_seed(message)
            return
        link = self._mesh.find(node)
        if link is None:
            self._sender.send(node, message)  # control messages may dial any member
        elif link.failure is not None:
            self._probe_again(node)
        else:
            self._send_on_link(link, message)

    def _probe_again(self, node: NodeId) -> None:
        # The network may have recovered. Probes delay one another, so the rate is limited.
        now = time.monotonic()
        if now - self._last_probes.setdefault(node, now) >= _PROBE_INTERVAL:
            self._last_probes[node] = now
            self._probe(node)

    def _send_on_link(self, link: Link, message: Message) -> None:
        try:
            link.send_control(message)
        except NexarError as error:
            _log.debug("message to node %x lost: %s", link.peer, error)

    def _adopt(self, change: Change) -> None:
        before = self._membership
        after = change.apply(before)
        self._membership = after
        for node in change.gone:  # while links exist: a removed member that is only slow learns it here
            self.send(node, Chosen((0, before.epoch, 0), change.encode()))
        self._last_probes.clear()
        self._listener.membership_decided(change, after)
        self._mesh.adopt(after, change)
        self._timer.wake_by(self._mesh.lose_overdue(time.monotonic()))
        self._listener.membership_adopted(change, after)

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._timer.close()
