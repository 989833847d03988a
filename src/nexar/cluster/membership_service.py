"""From suspicions to the next membership: what `decisions.succession` decides is done here.

Law: events are put to the machine one at a time, under the lock, and its actions are done one at a time, in that order,
after the lock was released, by whichever thread finds nobody doing it. So nobody waits for another one's I/O, and a
decision that comes with a message is carried out by the thread that heard it: there is no hop to another one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Final, Protocol, assert_never, get_args

from nexar.cluster.control_threads import BackgroundSender, SerialQueue, TimerThread
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
from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.types import NodeId
from nexar.wire.control import Chosen, Message

_log = logging.getLogger(__name__)

_LOOK_AGAIN: Final = 0.5  # seconds
_NOTABLE: Final = 0.25  # seconds by which the own delay has changed when the machine is told
MEMBERSHIP_MESSAGES: Final[tuple[type[Message], ...]] = get_args(MembershipMessage)
"""The kinds of messages that are for the machine."""


class MembershipListener(Protocol):
    """Who is told what becomes of the cluster. Called by whoever performs, one after the other; none may block."""

    def changes(self, change: Change, after: Membership) -> None:
        """The next membership is chosen, and every link is still there: calls that the change ends are to end by it,
        and not because of a link that it closes.
        """

    def changed(self, change: Change, after: Membership) -> None:
        """The next membership is here; the mesh has it already."""

    def stalled(self, stall: NoProgress) -> None:
        """There is none, at least for now."""

    def expelled(self, epoch: int, reason: str, *, willing: bool = False) -> None:
        """The others went on without this node; `willing`: as it was agreed."""


class MembershipService:
    """Of one node. Any thread. Close it before the mesh."""

    def __init__(
        self,
        node: Node,
        mesh: Mesh,
        membership: Membership,
        *,
        listener: MembershipListener,
        probe: Callable[[NodeId], None],
        send_to_seed: Callable[[Message], bool],
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`probe` finds out whether a member can be reached, and puts a Probed. `tell_seed` must not block.
        `own_delay`: seconds by which all deadlines extend, because this node runs slowly.
        """
        self._own_delay = own_delay
        self._node = node
        self._mesh = mesh
        self._listener = listener
        self._probe = probe
        self._send_to_seed = send_to_seed
        self._seed = None if membership.seed is None else membership.seed.node
        config = node.config
        self._lock = threading.Lock()
        self._machine = MembershipMachine(  # under the lock
            node.id,
            membership,
            recovery_timeout=config.recovery_timeout,
            probe_timeout=min(1.0, config.heartbeat_timeout / 2),
            longest_probe=2 * config.heartbeat_timeout,  # a question, then a dial
            active=config.recovery_policy == "automatic",
            random=Random(node.id),
        )
        self._queue = SerialQueue(self._do)  # filled under the lock
        self._sender = BackgroundSender(mesh, node.dialer.run_in_thread, own_delay=own_delay)
        self._delayed = 0.0  # as the machine was told last; under the lock
        self._closed = False  # written by who closes
        self._membership = membership  # by whoever performs: the one that was carried out
        self._looked: dict[NodeId, float] = {}  # when members without a link were last looked for; any thread
        self._timer = TimerThread(self._on_timer)

    @property
    def membership(self) -> Membership:
        """The newest that was carried out here."""
        return self._membership

    def suspects(self) -> dict[NodeId, str]:
        """Members that this node cannot reach, and why."""
        with self._lock:
            return dict(self._machine.suspects())

    def missing(self) -> list[NodeId]:
        """Whose votes are needed and have not come, and whom this node cannot reach."""
        with self._lock:
            return self._machine.missing()

    def put(self, event: MembershipInput) -> None:
        """Tell the machine, and see that what follows from it is done."""
        if self._closed:
            return
        now = time.monotonic()
        with self._lock:
            self._queue.add(self._tell_delay(now))
            self._queue.add(self._machine.step(event, now))
            due = self._machine.due(now)
        self._queue.run()
        self._timer.wake_by(due)

    def _tell_delay(self, now: float) -> list[MembershipAction]:
        """Under the lock."""
        seconds = self._own_delay()
        if abs(seconds - self._delayed) < _NOTABLE:
            return []
        self._delayed = seconds
        return self._machine.step(OwnDelayChanged(seconds), now)

    def heard(self, sender: NodeId, message: MembershipMessage) -> None:
        """A word about who comes next."""
        self.put(MessageReceived(sender, message))

    def behind(self, sender: NodeId, epoch: int) -> None:
        """This node is at an older epoch than we are: bring it up to date."""
        with self._lock:
            news = self._machine.changes_since(epoch)
        for number, value in enumerate(news, epoch):
            self.say(sender, Chosen((0, number, 0), value))

    def _on_timer(self, now: float) -> float | None:
        self.put(Tick())
        self._timer.wake_by(self._mesh.let_go(now))
        with self._lock:
            return self._machine.due(now)

    # -- doing ---------------------------------------------------------------------------------------------

    def _do(self, action: MembershipAction) -> None:
        match action:
            case SendMessage():
                self.say(action.node, action.message)
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

    def say(self, node: NodeId, message: Message) -> None:
        """It may be lost: whoever needs an answer asks again."""
        if node == self._seed:
            self._send_to_seed(message)
            return
        link = self._mesh.find(node)
        if link is None:
            self._sender.send(node, message)  # control may dial anyone
        elif link.failure is not None:
            self._look_again(node)
        else:
            self._send(link, message)

    def _look_again(self, node: NodeId) -> None:
        """Where the network is mended, there is a link when the word is repeated. Not for every word: each try costs a
        thread, and just now it was found to be lost.
        """
        now = time.monotonic()
        if now - self._looked.setdefault(node, now) >= _LOOK_AGAIN:
            self._looked[node] = now
            self._probe(node)

    def _send(self, link: Link, message: Message) -> None:
        try:
            link.send_control(message)
        except NexarError as error:
            _log.debug("not said to node %x: %s", link.peer, error)

    def _adopt(self, change: Change) -> None:
        before = self._membership
        after = change.apply(before)
        self._membership = after
        for node in change.gone:  # while there is a link: who is only slow learns it from us
            self.say(node, Chosen((0, before.epoch, 0), change.encode()))
        self._looked.clear()
        self._listener.changes(change, after)
        self._mesh.adopt(after, change)
        self._timer.wake_by(self._mesh.let_go(time.monotonic()))
        self._listener.changed(change, after)

    def close(self) -> None:
        """Nothing is decided here any more. Idempotent."""
        self._closed = True
        self._timer.close()
