"""This node as a member of a cluster: everything that keeps it one, from its links to the line of its communicators.

    links, death lines, beats, the seed's word ─→ Lookout ─→ Recovery ⇄ the others ─→ next membership ─→ Lineage

Each part knows the next one only by a function that it was given; they are put together here.
"""

from __future__ import annotations

import logging
import time
import traceback as tracebacks
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Final

from nexar.cluster.change import Change
from nexar.cluster.death_lines import DeathLines
from nexar.cluster.decisions.succession_events import Stall, Word
from nexar.cluster.heartbeat import Heartbeat
from nexar.cluster.lookout import LEFT, Lookout
from nexar.cluster.membership import Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.pings import Pings
from nexar.cluster.recovery import WORDS, Recovery
from nexar.cluster.switchboard import Switchboard
from nexar.communicator.branch import Branch
from nexar.communicator.lineage import Lineage
from nexar.communicator.maker import Maker
from nexar.errors import NexarError, PeerLost
from nexar.links.link import Link
from nexar.types import NodeId
from nexar.wire.messages import MAX_CAUSE_CHARACTERS, Beat, Doing, Goodbye, Message, Ping, Pong

_log = logging.getLogger(__name__)


class Presence:
    """Of one node. Any thread. Close it before the mesh; `leave` first if it raised."""

    def __init__(
        self,
        node: Node,
        mesh: Mesh,
        board: Switchboard,
        membership: Membership,
    ) -> None:
        """`board` is where the control messages of the mesh arrive."""
        self.tell_seed: Callable[[Message], bool] = _no_seed
        """Says a word to the seed; False: there is no line. Must not block. Written once, before the mesh adopts the
        membership."""
        self.node: Final = node
        self.mesh: Final = mesh
        self.lineage: Final = Lineage(Maker(node, mesh, node.config), membership)
        self.noticed: Callable[[NodeId, str, str], None] = _nothing
        """Told what is noticed of members: node, state, cause. Written once, before the first communicator."""
        self._ends = ExitStack()
        pings = Pings()
        self._lookout = Lookout(node, mesh, pings, self._tell, self._notice)
        self.recovery: Final = Recovery(
            node, mesh, membership, heir=self, probe=self._lookout.probe, tell_seed=self._say_to_seed
        )
        self.lineage.missed = self._lookout.missed
        self.heartbeat: Heartbeat | None = None
        self._lines: DeathLines | None = None
        board.on_lost = self._lookout.link_lost
        board.connect(self._lookout.said_goodbye, Goodbye)
        board.connect(pings.arrived, Ping, Pong)
        board.connect(self._heard, *WORDS)
        mesh.on_expelled = self.expelled
        if node.meets_strangers:
            self._watch(board, membership)

    def _watch(self, board: Switchboard, membership: Membership) -> None:
        """Where a member can die without a word: not in a world of threads."""
        self.heartbeat = Heartbeat(self.node, self.mesh.links, self._doing, self._lookout.found)
        self._lines = DeathLines(self.node, self.mesh.links, self._lookout.line_ended)
        self.mesh.death_lines = self._lines
        board.connect(self._beaten, Beat)
        self.heartbeat.adopt(membership)
        self._lines.adopt(membership)

    # -- from the driving thread -------------------------------------------------------------------------------

    def _heard(self, link: Link, message: Message) -> None:
        assert isinstance(message, Word)
        self.recovery.heard(link.peer, message)

    def _beaten(self, link: Link, message: Message) -> None:
        assert isinstance(message, Beat)
        assert self.heartbeat is not None
        self.heartbeat.arrived(link.peer, message)
        if message.epoch < self.recovery.membership.epoch:
            self.recovery.behind(link.peer, message.epoch)

    def _say_to_seed(self, message: Message) -> bool:
        return self.tell_seed(message)

    # -- from the seed -----------------------------------------------------------------------------------------

    def seed_said(self, message: Message) -> None:
        """A word of the seed about who comes next."""
        seed = self.recovery.membership.seed
        if seed is not None and isinstance(message, Word):
            self.recovery.heard(seed.node, message)

    def seed_told_of(self, node: NodeId, epoch: int, cause: str) -> None:
        """The seed, or a launcher by it, has seen a member's end."""
        del epoch  # a node that has ended has ended, whatever the epoch is by now
        self._lookout.told_of(node, cause)

    # -- between the parts -------------------------------------------------------------------------------------

    def _tell(self, event: object) -> None:
        self.recovery.put(event)  # type: ignore[arg-type]

    def _notice(self, node: NodeId, state: str, cause: str) -> None:
        self.noticed(node, state, cause)
        if state == "lost" and self.node.config.recovery_policy == "abort":
            self.lineage.end_all(partial(_lost_in, node, cause))

    def _doing(self) -> tuple[tuple[Doing, ...], str]:
        """For the beats: what this node does, and the last call that it finished."""
        journals = [(branch.communicator, branch.assembly.journal) for branch in self.lineage.branches()]
        now = time.monotonic()
        doing = (
            Doing(communicator, call.operation, call.sequence, call.step, max(0.0, now - call.moved_at))
            for communicator, journal in journals
            for call in journal.in_flight()
        )
        finished = [last for _, journal in journals if (last := journal.last_finished) is not None]
        return tuple(doing), max(finished, key=lambda last: last[1])[0] if finished else ""

    # -- Heir --------------------------------------------------------------------------------------------------

    def changed(self, change: Change, before: Membership, after: Membership) -> None:
        """See Heir."""
        self._lookout.adopt(after)
        if self.heartbeat is not None:
            self.heartbeat.adopt(after)
        if self._lines is not None:
            self._lines.adopt(after)
        self.lineage.changed(change, before, after)

    def stalled(self, stall: Stall) -> None:
        """See Heir."""
        self.lineage.stalled(stall)

    def expelled(self, epoch: int, reason: str) -> None:
        """See Heir; also said by a peer that this node has dialed."""
        _log.warning("this node was expelled in epoch %d: %s", epoch, reason)
        self.lineage.expelled(epoch, reason)

    # -- the end -----------------------------------------------------------------------------------------------

    def say_goodbye(self, error: BaseException | None = None, traceback: TracebackType | None = None) -> None:
        """Tell the others that this node leaves; with its traceback if it raised."""
        text = None
        if error is not None:
            lines = tracebacks.format_exception(type(error), error, traceback)
            text = "".join(lines)[-MAX_CAUSE_CHARACTERS:]
        goodbye = Goodbye(reason=LEFT if error is None else f"{type(error).__name__}: {error}"[:1000], traceback=text)
        for link in self.mesh.links().values():
            try:
                link.send_control(goodbye)
            except NexarError as gone:
                _log.debug("no goodbye to node %x: %s", link.peer, gone)

    def close(self) -> None:
        """Every communicator, and all that watches. Idempotent. The mesh is the caller's to close."""
        self.recovery.close()
        if self.heartbeat is not None:
            self.heartbeat.close()
        if self._lines is not None:
            self._lines.close()
        self.lineage.close()

    def wait_for_change(self, since: int, timeout: float) -> Membership | None:
        """The membership after this epoch, if it comes in time."""
        deadline = time.monotonic() + timeout
        return self.lineage.wait_for_epoch(since + 1, deadline)


def _no_seed(_: Message) -> bool:
    return False


def _nothing(*_: object) -> None:
    """Nobody listens."""


def _lost_in(node: NodeId, cause: str, branch: Branch) -> NexarError:
    rank = branch.membership.rank_of(node)
    return PeerLost(rank=rank, node=node, cause=f"{cause} (the policy is abort: nobody goes on)")
