"""The seed's mind once the cluster has formed: members come back, others wait to come in, the members go on. Pure.

    joiner ──Ready──→ waits, and members know of it ──chosen──→ member ──line broken──→ absent ──back──→ member
                                                                  └──────chosen without it──────→ told why, and gone

Law: nobody becomes or ceases to be a member here. The members choose, the seed is a witness at most; what was chosen is
kept before anybody hears of it, told to all, and followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, TypeAlias

from nexar.cluster.change import Change
from nexar.cluster.decisions.admission_events import (
    Action,
    Admit,
    Answered,
    Applied,
    ChildDied,
    Commit,
    Drop,
    Note,
    NoteKind,
    Refuse,
    Said,
    Tell,
)
from nexar.cluster.decisions.authenticating import describe_member
from nexar.cluster.decisions.compatibility import Compatibility
from nexar.cluster.decisions.early_joiners import EarlyJoiners
from nexar.cluster.decisions.guest import Guest
from nexar.cluster.decisions.refusals import Refusal, brief, last_line
from nexar.cluster.decisions.register import Register
from nexar.cluster.decisions.seat import Deed, Seat
from nexar.cluster.decisions.succession_events import Word
from nexar.cluster.decisions.witness import Witness
from nexar.cluster.membership import Member, Membership, encode_member
from nexar.types import NodeId, Rank, format_node
from nexar.wire.handshake import Hello
from nexar.wire.joining import Current, Died, JoinMessage, Reserve, Waiting

LINE_BROKE: Final = "its line to the seed broke"
"""The seed's own hint that a member may be gone: who knows more, says more."""
_REPLACED: Final = "the node has come back on another connection"
_NOBODY: Final = "every member has left or died: nobody is left who could let it in"
_BEHIND: Final = "the seed does not know the newest membership yet; try again"
_MAX_CAUSE: Final = 4096  # characters of a child's traceback that are noted and told, the last ones

End: TypeAlias = Callable[[Guest, NoteKind, str], list[Action]]
"""Forget a connection, with a note."""


class FormedCluster:
    """Told by admission of what those do who have proven that they know the secret."""

    def __init__(
        self,
        register: Register,
        witness: Witness,
        members: dict[NodeId, Guest],
        launchers: dict[NodeId, Guest],
        end: End,
        *,
        compatibility: Compatibility | None = None,
    ) -> None:
        """`members`, `launchers`: those that are connected."""
        self._compatibility = compatibility or Compatibility()
        self._register = register
        self._witness = witness
        self._members = members
        self._launchers = launchers
        self._joiners: dict[NodeId, Guest] = {}
        self._end = end
        self._awaited = {member.node for member in register.membership.members} - set(members)
        self._seat = Seat(witness, members, self._awaited.__contains__)

    @property
    def membership(self) -> Membership:
        """The newest that the seed knows."""
        return self._register.membership

    @property
    def joined(self) -> int:
        """Members that are connected."""
        return len(self._members)

    def rank_of(self, guest: Guest) -> Rank | None:
        """The rank of a member on the line that counts."""
        is_member = guest.node is not None and self._members.get(guest.node) is guest
        return self.membership.rank_of(guest.node) if is_member and guest.node is not None else None

    # ------------------------------------------------------------ coming

    def applied(self, guest: Guest, hello: Hello, event: Applied) -> list[Action]:
        """A candidate with the secret: a member that is back, or a joiner. Refusal for all others."""
        asked = event.application
        rank = self._register.check_member(hello.node, guest.fingerprint)
        if rank is not None:
            member = self.membership.member(rank)
            self._compatibility.add(member, asked, guest.address)
            return self._returned(guest, hello.node, rank)
        why = self._register.why_former(hello.node, asked.epoch)
        if why is not None:
            raise Refusal(why.reason, expelled=why.expelled)
        if asked.epoch:  # of a membership that this seed does not know: whoever has a line tells it
            return [Drop(guest.connection, _BEHIND), *self._end(guest, "dropped", _BEHIND)]
        return self._joined(guest, hello, event)

    def _returned(self, guest: Guest, node: NodeId, rank: Rank) -> list[Action]:
        replaced = self._replace(self._members, node)
        self._members[node] = guest
        self._awaited.discard(node)
        self._register.set_present(node, present=True)
        admit = Admit(guest.connection, node, guest.address, self.membership.size, rank=rank)
        note = _note("returned", guest, rank)
        waiting = self._waiting([guest]) if self._register.elastic else []
        asked = self._do(self._seat.returned(node))
        return [*replaced, admit, note, self._commit([guest]), *waiting, *asked]

    def _joined(self, guest: Guest, hello: Hello, event: Applied) -> list[Action]:
        asked = event.application
        self._check_stranger(hello.node, asked.rank)
        self._check_anybody()
        old = self._joiners.get(hello.node)
        if old is not None and old.fingerprint != guest.fingerprint:
            raise Refusal(f"node {format_node(hello.node)} is known with another key")
        replaced = self._replace(self._joiners, hello.node)
        member = describe_member(guest, hello, asked)
        self._compatibility.check(member, asked, event.clock, guest.address)
        self._expect(guest, member)
        self._compatibility.add(member, asked, guest.address)
        admit = Admit(guest.connection, hello.node, guest.address, self.membership.size)
        return [*replaced, admit, _note("admitted", guest, None, "it waits to come in")]

    def take_over(self, early: EarlyJoiners) -> list[Action]:
        """Joiners that came before the cluster had formed: they wait no longer there."""
        actions: list[Action] = []
        while (joiner := early.take()) is not None:
            try:
                self._expect(joiner.guest, joiner.member)
                actions += self.ready(joiner.guest) if joiner.ready else []
            except Refusal as why:
                reason = brief(str(why))
                actions += [Refuse(joiner.guest.connection, reason), *self._end(joiner.guest, "refused", reason)]
        return actions

    def _expect(self, guest: Guest, member: Member) -> None:
        self._register.admit(member)
        self._witness.admitted = self._register.admitted
        self._joiners[member.node] = guest

    def _check_stranger(self, node: NodeId, rank: Rank | None) -> None:
        """Refusal for who may not come in: nobody may, it is somebody else already, or there is no room."""
        again = "" if rank is None else f"; rank {rank} is one of them: nexar.init() is called once for each rank"
        if not self._register.elastic:
            raise Refusal(self._register.late + again)
        if self.membership.pin(node) is not None:
            raise Refusal(f"node {format_node(node)} is known to the cluster, and not as a member")

    def ready(self, guest: Guest) -> list[Action]:
        """A joiner can be dialed. Of a member that is back it is no news. Refusal from all others."""
        node = guest.node
        if node is not None and self._members.get(node) is guest:
            return []
        if node is None or self._joiners.get(node) is not guest:
            raise Refusal("it said that it is ready, and has not joined")
        self._register.make_ready(node)
        return self._current([guest]) + self._waiting(self._members.values())

    def reserved(self, guest: Guest, hello: Hello, asked: Reserve) -> list[Action]:
        """A launcher that is back, or one whose children will be joiners, without ranks. Refusal for all others."""
        membership, node = self.membership, hello.node
        is_attendant = self.is_attendant(node)
        if not is_attendant and node not in self._launchers:
            self._check_stranger(node, None)
            self._register.check_room(asked.count)
        elif guest.fingerprint != (membership.pin(node) or self._launchers[node].fingerprint):
            raise Refusal(f"node {format_node(node)} is known with another key")
        replaced = self._replace(self._launchers, node)
        self._launchers[node] = guest
        admit = Admit(guest.connection, node, guest.address, membership.size)
        note = _note("returned" if is_attendant else "reserved", guest, None, "" if is_attendant else "no ranks yet")
        return [*replaced, admit, note, self._commit([guest])]

    def is_attendant(self, node: NodeId) -> bool:
        """Whether this is a launcher that had reserved ranks when the cluster formed."""
        return any(attendant.node == node for attendant in self.membership.attendants)

    def _check_anybody(self) -> None:
        """Refusal if nobody is left who could take a joiner."""
        if not self._register.present:
            raise Refusal(_NOBODY, nobody_left=True)

    def _replace(self, circle: dict[NodeId, Guest], node: NodeId) -> list[Action]:
        """The newest line counts: the node has lost its old one, though we may not have noticed."""
        old = circle.pop(node, None)
        return [] if old is None else [Drop(old.connection, _REPLACED), *self._end(old, "gone", _REPLACED)]

    # ------------------------------------------------------------ going

    def withdrawn(self, guest: Guest, kind: NoteKind, reason: str, now: float) -> list[Action]:
        """The connection of this guest has ended, and is forgotten."""
        node = guest.node
        if node is None:
            return []
        if self._launchers.get(node) is guest:
            del self._launchers[node]
        elif self._joiners.get(node) is guest:
            del self._joiners[node]
            self._compatibility.remove(node)
            return self._waiting(self._members.values()) if self._register.withdraw(node) else []
        elif self._members.get(node) is guest:
            del self._members[node]
            self._register.set_present(node, present=False)
            cause = f"{LINE_BROKE}: {reason}"
            hint = [] if kind == "left" else self._hint(node, cause)
            return [*hint, *self._do(self._seat.lost(node, cause, now)), *self._send_away()]
        return []

    def _send_away(self) -> list[Action]:
        """Joiners wait in vain when the last member has gone."""
        if self._register.present:
            return []
        actions: list[Action] = []
        for guest in list(self._joiners.values()):
            actions += [Refuse(guest.connection, _NOBODY, nobody_left=True), *self._end(guest, "refused", _NOBODY)]
        return actions

    def child_died(self, guest: Guest, event: ChildDied) -> list[Action]:
        """A launcher reports the end of a child. Refusal if it is none, as far as that is known."""
        if guest.node is None or self._launchers.get(guest.node) is not guest:
            raise Refusal("it reported the end of a child, and is no launcher")
        node = self._register.child(guest.node, event.rank)
        if node is None and self._register.knows_children:
            raise Refusal(f"it reported rank {event.rank} as its child, which it is not")
        if event.well:
            return []  # it has left the cluster by itself
        cause = event.cause[-_MAX_CAUSE:]
        died = Note("child died", guest.address, node, event.rank, cause)
        return [died] if node is None else [died, *self._hint(node, cause)]

    def _hint(self, node: NodeId, cause: str) -> list[Action]:
        """Members look at once whether it is so."""
        if self.membership.rank_of(node) is None:
            return []
        others = [guest for other, guest in self._members.items() if other != node]
        return _tell(Died(node, self.membership.epoch, cause), others)

    # ------------------------------------------------------------ changing

    def said(self, guest: Guest, event: Said, now: float) -> list[Action]:
        """A word for the witness. Refusal from who is no member."""
        return self._do(self._seat.heard(self._member(guest), event.word, now)) if isinstance(event.word, Word) else []

    def answered(self, guest: Guest, event: Answered, now: float) -> list[Action]:
        """A member is there. Refusal from who is none."""
        return self._do(self._seat.answered(self._member(guest), event.number, now))

    def _member(self, guest: Guest) -> NodeId:
        if guest.node is None or self._members.get(guest.node) is not guest:
            raise Refusal("it spoke like a member, and is none")
        return guest.node

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        return self._do(self._seat.tick(now))

    def due(self, now: float) -> float | None:
        """When the next tick is needed."""
        return self._seat.due(now)

    def _do(self, deeds: Iterable[Deed]) -> list[Action]:
        """Who is no longer a member hears what was chosen before its line ends."""
        actions: list[Action] = []
        partings: list[Action] = []
        for deed in deeds:
            if isinstance(deed, Change):
                actions += self._follow(deed)
                partings += self._part(deed)
            else:
                actions.append(deed)
        return actions + partings

    def _follow(self, change: Change) -> list[Action]:
        before = self._register.waiting
        self._register.follow(change)
        for departure in change.left:
            self._compatibility.remove(departure.node)
        new = [self._joiners.pop(member.node) for member in change.joined if member.node in self._joiners]
        self._members |= {guest.node: guest for guest in new if guest.node is not None}
        self._awaited &= {member.node for member in self.membership.members}
        size, epoch = self.membership.size, self.membership.epoch
        note = Note("moved on", reason=f"to epoch {epoch}: {size} members, {len(new)} new, {len(change.left)} gone")
        told = list(self._members.values()) if before != self._register.waiting else new
        willing = frozenset(departure.node for departure in change.left if departure.willing)
        commit = replace(self._commit(new), willing=willing)
        return [commit, note, *self._current(self._waiting_guests()), *self._waiting(told)]

    def _part(self, change: Change) -> list[Action]:
        actions: list[Action] = []
        for departure in change.left:
            guest = self._members.get(departure.node)
            if guest is not None:
                former = self._register.why_former(departure.node, 0)
                reason = "" if former is None else former.reason
                kind: NoteKind = "left" if departure.willing else "gone"
                refuse = Refuse(guest.connection, brief(reason), change.epoch)
                end = Drop(guest.connection, brief(reason)) if departure.willing else refuse
                actions += [end, *self._end(guest, kind, brief(last_line(reason)))]
        return actions

    # ------------------------------------------------------------ words

    def _commit(self, guests: Iterable[Guest]) -> Commit:
        present = frozenset(node for node in self._members if self.membership.rank_of(node) is not None)
        return Commit(self.membership, _connections(guests), present)

    def _current(self, guests: Iterable[Guest]) -> list[Action]:
        return _tell(Current(self.membership.encode()), guests)

    def _waiting(self, guests: Iterable[Guest]) -> list[Action]:
        return _tell(Waiting(tuple(map(encode_member, self._register.waiting))), guests)

    def _waiting_guests(self) -> list[Guest]:
        waiting = {member.node for member in self._register.waiting}
        return [guest for node, guest in self._joiners.items() if node in waiting]


def _connections(guests: Iterable[Guest]) -> tuple[int, ...]:
    return tuple(guest.connection for guest in guests)


def _tell(message: JoinMessage, guests: Iterable[Guest]) -> list[Action]:
    connections = _connections(guests)
    return [Tell(message, connections)] if connections else []


def _note(kind: NoteKind, guest: Guest, rank: Rank | None, reason: str = "") -> Note:
    return Note(kind, guest.address, guest.node, rank, reason)
