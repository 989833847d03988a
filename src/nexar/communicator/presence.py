"""This node as a member of a cluster: everything that keeps it one, from its links to the line of its communicators.

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

from nexar.cluster.ballots import Ballots
from nexar.cluster.change import WORLD, Change
from nexar.cluster.death_lines import DeathLines
from nexar.cluster.decisions.failure_detector import Known
from nexar.cluster.decisions.succession_events import Event, Found, Lost, Stall, Wanted, Word
from nexar.cluster.decisions.watchers import watched, watchers
from nexar.cluster.heartbeat import Heartbeat
from nexar.cluster.lookout import LEFT, Lookout, Noticed
from nexar.cluster.membership import Member, Membership
from nexar.cluster.mesh import Mesh
from nexar.cluster.node import Node
from nexar.cluster.opening import EAGER_WORLD
from nexar.cluster.pings import Pings
from nexar.cluster.recovery import WORDS, Recovery
from nexar.cluster.switchboard import Switchboard
from nexar.cluster.wishes import Wishes
from nexar.communicator.branch import Branch
from nexar.communicator.bulletin import write_bulletin
from nexar.communicator.demand import Demand
from nexar.communicator.events import FailureEvent
from nexar.communicator.lineage import Lineage
from nexar.communicator.maker import Maker
from nexar.communicator.revocations import Revocations
from nexar.errors import Expelled, LinkClosed, NexarError, PeerLost
from nexar.errors.base import sendable, told
from nexar.group import Group
from nexar.links.link import Link
from nexar.transport.foreign_text import one_line, several_lines
from nexar.types import NodeId, format_seconds
from nexar.wire.bulletin import Bulletin
from nexar.wire.messages import (
    MAX_CAUSE_CHARACTERS,
    Beat,
    Doing,
    Goodbye,
    Message,
    Ping,
    Pong,
    Revoke,
    Suspect,
)

_log = logging.getLogger(__name__)


class Presence:
    """Of one node. Any thread. Close it before the mesh; `say_goodbye` first."""

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
        self.seed_answers: Callable[[float], bool] = _is_there
        """Whether the seed answers within so many seconds. Blocks. Likewise."""
        self.node: Final = node
        self.mesh: Final = mesh
        self.lineage: Final = Lineage(Maker(node, mesh, node.config), membership)
        pings = Pings()
        self._lookout = Lookout(
            node,
            mesh,
            pings,
            tell=self._tell,
            noticed=self._notice,
            known=self._known,
            own_delay=lambda: node.delay_meter.seconds,
        )
        self.recovery: Final = Recovery(
            node,
            mesh,
            membership,
            heir=self,
            probe=self._lookout.probe,
            tell_seed=self._say_to_seed,
            own_delay=lambda: node.delay_meter.seconds,
        )
        self.demand: Final = Demand(self.lineage, self.recovery, self._lookout)
        """For what comes after a communicator."""
        self.wishes: Final = Wishes()
        """For the next checkpoint."""
        self.has_left = False
        """As it was agreed at a checkpoint. Written by whoever performs, before the communicators are over."""
        self._expelling = threading.Lock()  # taken by the first that says so, never given back
        self.state: Any = None
        """What the members handed over when this node joined. Written once, before the first communicator."""
        self.lineage.missed = self._lookout.missed
        self.lineage.renew = lambda which, epoch: self.recovery.put(Wanted(renewed=which, epoch=epoch))
        self.lineage.opened = self._opened
        self.revocations: Final = Revocations(node.id, self.lineage, self._say_to)
        self.lineage.listed = self.revocations.listed
        self.lineage.absent = self.revocations.absent
        self.ballots: Final = Ballots(node.id, node.progress, self.recovery.say)
        self.heartbeat: Heartbeat | None = None
        self._lines: DeathLines | None = None
        board.on_lost = self._lookout.link_lost
        board.connect(self._lookout.said_goodbye, Goodbye)
        board.connect(pings.arrived, Ping, Pong)
        board.connect(self._heard, *WORDS)
        board.connect(self.revocations.heard, Revoke)
        mesh.on_expelled = self.expelled
        mesh.relaying.doubted, mesh.relaying.cut_off = self._lookout.doubted, self._lookout.cut_off
        if node.meets_strangers:
            self._watch(board, membership)

    def _watch(self, board: Switchboard, membership: Membership) -> None:
        """Where a member can die without a word: not in a world of threads."""
        self.heartbeat = Heartbeat(
            self.node, self.mesh.links, self.doing, self._lookout.found, meter=self.node.delay_meter
        )
        self._lines = DeathLines(self.node, self.mesh.links, self._lookout.line_ended)
        self.mesh.death_lines = self._lines
        board.connect(self._beaten, Beat)
        self.heartbeat.adopt(membership)
        self._lines.adopt(membership)

    def look_around(self) -> None:
        """See that there are links to those who watch this node and whom it watches. Never blocks."""
        membership = self.recovery.membership
        rank = membership.rank_of(self.node.id)
        if rank is not None and self.heartbeat is not None and membership.size > EAGER_WORLD:
            size, topology = membership.size, self.node.config.topology
            ranks = {*watchers(size, rank, topology), *watched(size, rank, topology)}
            wanted = [membership.members[other].node for other in ranks]
            self.node.dialer.aside(partial(self._link, wanted))

    def _link(self, nodes: Sequence[NodeId]) -> None:
        for node in filter(self.mesh.relaying.wants, nodes):
            try:
                self.mesh.dial(node, time.monotonic() + self._longest_silence())
            except NexarError as error:
                self._lookout.missed(node, str(error))

    # -- from the driving thread -------------------------------------------------------------------------------

    def _heard(self, link: Link, message: Message) -> None:
        assert isinstance(message, Word)
        if isinstance(message, Suspect) or (message.instance[0] == WORLD and message.instance[2] == 0):
            self.recovery.heard(link.peer, message)
        else:
            self.ballots.hear(link.peer, message)

    def _opened(self, branch: Branch) -> None:
        about = branch.communicator, branch.membership.epoch
        self.ballots.know(*about, branch.nodes)
        branch.when_closed.append(partial(self.ballots.end, *about))

    def _beaten(self, link: Link, message: Message) -> None:
        assert isinstance(message, Beat)
        assert self.heartbeat is not None
        self.heartbeat.arrived(link.peer, message)
        if message.epoch < self.recovery.membership.epoch:
            self.recovery.behind(link.peer, message.epoch)

    def _say_to(self, node: NodeId, message: Message) -> None:
        if not self.is_gone(node):
            self.recovery.say(node, message)

    def _say_to_seed(self, message: Message) -> bool:
        return self.tell_seed(message)

    # -- from the seed -----------------------------------------------------------------------------------------

    def seed_said(self, message: Message) -> None:
        """A word of the seed about who comes next."""
        seed = self.recovery.membership.seed
        if seed is not None and isinstance(message, Word):
            if seed.node in self.recovery.suspects():
                self.recovery.put(Found(seed.node))
            self.recovery.heard(seed.node, message)

    def seed_lost(self, cause: str) -> None:
        """There is no line to the seed: who counts votes need not wait for its."""
        seed = self.recovery.membership.seed
        if seed is not None:
            self.recovery.put(Lost(seed.node, cause))

    def seed_back(self, epoch: int) -> None:
        """There is one again. The seed may have missed what was chosen since this epoch."""
        seed = self.recovery.membership.seed
        if seed is not None:
            self.recovery.put(Found(seed.node))
            self.recovery.behind(seed.node, epoch)

    def seed_told_of(self, node: NodeId, epoch: int, cause: str) -> None:
        """The seed, or a launcher by it, has seen a member's end."""
        del epoch  # a node that has ended has ended, whatever the epoch is by now
        self._lookout.told_of(node, cause)

    def seed_refused(self, reason: str, expelled: int) -> None:
        """The seed wants nothing more to do with this node: if the others went on without it, all is over here."""
        if expelled:
            self.expelled(expelled, reason)
        elif not self.has_left:
            _log.warning("the seed refused this node, which goes on without it: %s", one_line(reason))

    def seed_told_of_waiting(self, members: tuple[Member, ...]) -> None:
        """The seed says who waits to come in. Who does not any more has become a member, or is gone."""
        before = self.wishes.mine().waiting
        self.wishes.set_waiting(members)
        for guest in before:
            if guest not in members and self.is_gone(guest.node):
                self._lookout.guest_missed(guest)
        self.expect(members)

    def expect(self, members: Sequence[Member]) -> None:
        """These may have links with this node before they are members."""
        self.mesh.expect({each.node: each for each in (*self.wishes.mine().waiting, *members)}.values())

    # -- between the parts -------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """Where a member is lost, the vote of the seed may be needed: is it still there? A line need not show that."""
        self.recovery.put(event)
        if isinstance(event, Lost) and not event.willing and self.recovery.membership.seed is not None:
            self.node.dialer.aside(self._look_for_seed)

    def _look_for_seed(self) -> None:
        timeout = self._longest_silence()
        if not self.seed_answers(timeout):
            self.seed_lost(f"it does not answer within {format_seconds(timeout)}")

    def _longest_silence(self) -> float:
        """Seconds after which who has not answered is missed."""
        return self.node.config.heartbeat_timeout + self.node.delay_meter.seconds

    def _known(self, node: NodeId) -> Known | None:
        return None if self.heartbeat is None else self.heartbeat.known(node)

    def _notice(self, node: NodeId, state: Noticed, cause: str) -> None:
        cause = several_lines(cause)  # it may be the member's own
        for branch in self.lineage.branches():
            rank = branch.membership.rank_of(node)
            if rank is not None:
                branch.failures.publish(FailureEvent(rank, node, cause, state, branch.membership.epoch))
        if state == "back":
            self._renew_stalled()
        if state == "lost" and self.node.config.recovery_policy == "abort":
            self._end_all(partial(_lost_in, node, cause))

    def _renew_stalled(self) -> None:
        """Communicators that were given up for want of a majority, and all of whose members are here again, go on with
        a successor: what was sent on them meanwhile may be lost.
        """
        suspects = self.recovery.suspects().keys()
        stalled = (each for each in self.lineage.branches() if each.is_stalled)
        again = tuple(each.communicator for each in stalled if not suspects & each.nodes)
        if again:
            self.recovery.put(Wanted(renewed=again))

    def doing(self) -> tuple[tuple[Doing, ...], str]:
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

    def bulletin(self) -> Bulletin | None:
        """For the seed's board. None: this node is no member any more."""
        journals = [branch.assembly.journal for branch in self.lineage.branches()]
        return write_bulletin(self.recovery.membership, self.node.id, journals, self.mesh.links())

    # -- Heir --------------------------------------------------------------------------------------------------

    def changes(self, change: Change, after: Membership) -> None:
        """See Heir."""
        self.lineage.changes(change, after)

    def changed(self, change: Change, after: Membership) -> None:
        """See Heir."""
        self._lookout.adopt(after)
        self.wishes.settle(change.gone)
        if self.heartbeat is not None:
            self.heartbeat.adopt(after)
        if self._lines is not None:
            self._lines.adopt(after)
        self.look_around()
        self.lineage.changed(change, after)
        self.ballots.lose(change.left)

    def stalled(self, stall: Stall) -> None:
        """See Heir."""
        self.lineage.stalled(stall)

    def expelled(self, epoch: int, reason: str, *, willing: bool = False) -> None:
        """See Heir; also said by a peer that this node has dialed."""
        self.has_left = self.has_left or willing
        if not self._expelling.acquire(blocking=False):
            return  # members, the seed and the ballot all say it
        if not self.has_left:
            _log.warning("this node was expelled in epoch %d: %s", epoch, one_line(reason))
        elastic = self.node.config.elastic_enabled
        self._end_all(lambda group: Expelled(epoch=epoch, reason=reason, rank=group.rank, elastic=elastic))

    def _end_all(self, error_of: Callable[[Group], NexarError]) -> None:
        """Every communicator is over, and every ballot: the others' votes do not come any more."""
        self.lineage.end_all(error_of)
        self.ballots.end_all(LinkClosed(owner="this node's place in the cluster"))

    # -- what users ask for --------------------------------------------------------------------------------------

    def is_gone(self, node: NodeId) -> bool:
        """Whether it is no member any more."""
        return self.recovery.membership.rank_of(node) is None

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
            _say(link, goodbye)

    def close(self) -> None:
        """Every communicator, and all that watches. Idempotent. The mesh is the caller's to close. First what was sent
        over others arrives: new connections may be needed for it, and nobody makes any afterwards.
        """
        try:
            self.mesh.settle(self._lookout.has_left)
        finally:
            self._end()

    def _end(self) -> None:
        self._lookout.close()
        self.recovery.close()
        self.node.recall.make()  # who makes a communicator may be dialing for it, and is waited for below
        self.ballots.close()
        if self.heartbeat is not None:
            self.heartbeat.close()
        if self._lines is not None:
            self._lines.close()
        self.lineage.close()


def _say(link: Link, message: Message) -> None:
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
