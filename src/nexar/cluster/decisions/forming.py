"""The seed's mind while a cluster forms: who has a place, who waits for one, and for whom all wait in vain. Pure.

It ends once: `complete`, when all places are taken by candidates that can be dialed, or with a `failure`, when a rank
will never come, or not in time. Admission, which asks it, sees to what follows. Until then everything here can be taken
back: who goes leaves its place to who waits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Protocol

from nexar.cluster.decisions.admission_events import Action, Admit, Applied, ChildDied, Note, NoteKind
from nexar.cluster.decisions.authenticating import describe_member
from nexar.cluster.decisions.children import Children
from nexar.cluster.decisions.compatibility import Compatibility, Incompatible
from nexar.cluster.decisions.door_rules import DoorRules
from nexar.cluster.decisions.early_joiners import EarlyJoiners
from nexar.cluster.decisions.formation import Formation
from nexar.cluster.decisions.guest import Guest
from nexar.cluster.decisions.refusals import Refusal, Refusals, last_line
from nexar.cluster.membership import Attendant, Member
from nexar.types import NodeId, format_node, format_seconds
from nexar.wire.handshake import Hello
from nexar.wire.joining import Apply, Reserve


class Noting(Protocol):
    """What makes a note of a guest, with all that is known of it."""

    def __call__(self, kind: NoteKind, guest: Guest, reason: str = "") -> Note:
        """See Note."""


class Forming:
    """Guests that have proven themselves, on their way to be members and launchers."""

    def __init__(
        self,
        formation: Formation,
        size: int,
        rules: DoorRules,
        *,
        members: dict[NodeId, Guest],
        launchers: dict[NodeId, Guest],
        refusals: Refusals,
        compatibility: Compatibility,
        note: Noting,
    ) -> None:
        """`members` and `launchers` are those that are in, by node: written here until it ends."""
        self.formation: Final = formation
        self.early: Final = EarlyJoiners(size, rules)
        self.complete = False
        """Everybody is there, and can be dialed."""
        self.failure = ""
        """Why the cluster will never form; empty: it may."""
        self.expired = False
        """The time is up: that is why."""
        self.confirming: Final[set[NodeId]] = set()
        """Candidates that will say when they are connected."""
        self._size = size
        self._members = members
        self._launchers = launchers
        self._children = Children(launchers)
        self._refusals = refusals
        self._compatibility = compatibility
        self._note = note

    def expire(self, timeout: float) -> None:
        """Its time is over."""
        self.failure = f"the cluster did not form within {format_seconds(timeout)}"
        self.expired = True

    def applied(self, guest: Guest, hello: Hello, event: Applied) -> list[Action]:
        """A candidate. Refusal."""
        asked = event.application
        self._check_new(hello.node, asked.epoch)
        member = describe_member(guest, hello, asked)
        self._check_size(asked)
        self._check_compatible(guest, member, event)
        actions = self._admit(guest, hello, member, asked)
        self._compatibility.add(member, asked, guest.address)
        if asked.confirms:
            self.confirming.add(member.node)
        return actions

    def _check_size(self, asked: Apply) -> None:
        """Refusal for who was started as a rank of a world of another size."""
        if asked.rank is not None and asked.size not in (0, self._size):
            raise Refusal(
                f"rank {asked.rank} was started as one of {asked.size}, and this cluster forms with {self._size}",
                "give the seed and all launchers the same size",
            )

    def _check_compatible(self, guest: Guest, member: Member, event: Applied) -> None:
        """Refusal for who cannot work with those that are in. Nobody else may have a rank that was given to it, so all
        would wait for that rank in vain: then the cluster does not form.
        """
        try:
            self._compatibility.check(member, event.application, event.clock, guest.address)
        except Incompatible as why:
            if event.application.rank is not None:
                self.failure = self.failure or why.lines
            raise

    def _admit(self, guest: Guest, hello: Hello, member: Member, asked: Apply) -> list[Action]:
        admit = Admit(guest.connection, hello.node, guest.address, self._size, rank=asked.rank)
        if not self.early.admit(self.formation, guest, member, asked.rank):
            return [admit, self._note("admitted", guest, "it waits to come in")]
        self._seat(guest, hello.node)
        return [admit, self._note("admitted", guest)]

    def ready(self, guest: Guest) -> None:
        """It can be dialed. Refusal for who has not joined."""
        if self.early.make_ready(guest):
            return
        if guest.node is None or self._members.get(guest.node) is not guest:
            raise Refusal("it said that it is ready, and has not joined")
        self.formation.make_ready(guest.node)
        self.complete = self.formation.is_complete

    def reserved(self, guest: Guest, hello: Hello, asked: Reserve) -> list[Action]:
        """A launcher. Refusal."""
        self._check_new(hello.node, asked.epoch)
        block = self.early.reserve(self.formation, Attendant(hello.node, guest.fingerprint), asked)
        self._launchers[hello.node] = guest
        admit = Admit(guest.connection, hello.node, guest.address, self._size)
        if block is None:
            return [admit, self._note("reserved", guest, "no ranks yet")]
        admit = replace(admit, first_rank=block.first_rank, group_rank=block.group_rank)
        return [admit, self._note("reserved", guest, f"ranks {block.ranks.start}..{block.ranks.stop - 1}")]

    def child_died(self, guest: Guest, event: ChildDied) -> list[Action]:
        """A launcher tells of the end of a child. Refusal if it is not its."""
        died, in_vain = self._children.ended(self.formation, guest, event, somebody_waits=bool(self._members))
        if in_vain:
            self._fail_without(event)
        return [died]

    def withdrawn(self, guest: Guest) -> None:
        """Its connection has ended: what its node has claimed is free again, for who waits."""
        if guest.node is not None and self.early.find(guest.node) is guest:
            self._leave(guest.node)
        self.early.withdraw(guest)
        for circle in (self._members, self._launchers):
            if guest.node is not None and circle.get(guest.node) is guest:
                del circle[guest.node]
                self._children.forget(guest.node)
                self.formation.withdraw(guest.node)
                self._leave(guest.node)
        self._promote()

    def _leave(self, node: NodeId) -> None:
        self.confirming.discard(node)
        self._compatibility.remove(node)

    def _seat(self, guest: Guest, node: NodeId) -> None:
        """It has a place, and waits: also for children that ended well, and will never come."""
        self._members[node] = guest
        for event in self._children.missing:
            self._fail_without(event)

    def _promote(self) -> None:
        """As many as places have become free do not wait any more."""
        while not (self.complete or self.failure) and (first := self.early.promote(self.formation)):
            self._seat(first.guest, first.member.node)
            if first.ready and not self.failure:
                self.ready(first.guest)

    def _check_new(self, node: NodeId, epoch: int) -> None:
        """Refusal for who has come already, and for members of the cluster of a seed that was here before."""
        if epoch:
            raise Refusal("its cluster has formed, and this seed does not know it: it was started without its state")
        present = self._members.get(node) or self._launchers.get(node) or self.early.find(node)
        if present is not None:
            raise Refusal(f"node {format_node(node)} has joined already, from {present.address}")

    def _fail_without(self, event: ChildDied) -> None:
        """Nobody else may have its rank, and its launcher starts nobody in its place: waiting would be in vain."""
        if self.failure:
            return
        verb, remedy = ("ended", "; every rank must call nexar.init()") if event.well else ("died", "")
        cause = f"it {verb} before the cluster had formed: {last_line(event.cause)}{remedy}"
        self._refusals.add(f"rank {event.rank}", cause)
        self.failure = f"rank {event.rank} {verb} before the cluster had formed"
