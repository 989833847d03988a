"""The newest membership of one node, and messages to members and the seed.

MembershipMachine decides. This performs its actions on messages and links; none blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final, get_args

from nexar.cluster.control_channel import BackgroundSender, send_or_log
from nexar.cluster.decisions.membership_events import MembershipMessage
from nexar.cluster.decisions.membership_machine import MAX_ANSWER
from nexar.cluster.machine_runner import MachineRunner
from nexar.cluster.membership import Change, Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.task_pool import Priority
from nexar.types import NodeId
from nexar.wire.control import Chosen, Message

_PROBE_INTERVAL: Final = 0.5  # seconds
MEMBERSHIP_MESSAGES: Final[tuple[type[Message], ...]] = get_args(MembershipMessage)


class MembershipService:
    """Any thread, except `adopt`."""

    def __init__(
        self,
        node: Node,
        mesh: Mesh,
        membership: Membership,
        runner: MachineRunner,
        *,
        probe: Callable[[NodeId], None],
        send_to_seed: Callable[[Message], bool],
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`probe` and `send_to_seed` must not block."""
        self._mesh = mesh
        self._runner = runner
        self._probe = probe
        self._send_to_seed = send_to_seed
        self._seed = None if membership.seed is None else membership.seed.node
        self._sender = BackgroundSender(
            mesh, partial(node.dialer.run_in_thread, priority=Priority.CONTROL), own_delay=own_delay
        )
        self._membership = membership  # the newest performed one; written by the performing thread
        self._last_probes: dict[NodeId, float] = {}  # last probes of members without a link; any thread

    @property
    def membership(self) -> Membership:
        return self._membership

    def suspects(self) -> dict[NodeId, str]:
        with self._runner.changed:
            return dict(self._runner.machine.membership_machine.suspects())

    def missing(self) -> list[NodeId]:
        with self._runner.changed:
            return self._runner.machine.membership_machine.missing()

    def send_changes_since(self, sender: NodeId, epoch: int) -> None:
        """At most MAX_ANSWER to a member, whose next heartbeat asks for the rest; all to the seed, which has none."""
        with self._runner.changed:
            changes = self._runner.machine.membership_machine.changes_since(epoch)
        count = len(changes) if sender == self._seed else MAX_ANSWER
        for number, value in enumerate(changes[:count], epoch):
            self.send(sender, Chosen((0, number, 0), value))

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
            send_or_log(link, message)

    def _probe_again(self, node: NodeId) -> None:
        # The network may have recovered. Probes delay one another, so the rate is limited.
        now = time.monotonic()
        if now - self._last_probes.setdefault(node, now) >= _PROBE_INTERVAL:
            self._last_probes[node] = now
            self._probe(node)

    def adopt(self, change: Change, after: Membership) -> None:
        """Publish the next membership and close the links of departed members. Only the performing thread."""
        self._membership = after
        self._last_probes.clear()
        self._mesh.adopt(after, change)
