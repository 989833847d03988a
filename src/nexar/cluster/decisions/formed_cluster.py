"""Who is in a cluster that has formed, who would like to come in, and who may not come back. Pure.

Law: the members that are present, and all who wait, are never more than the largest world that is allowed, and find
room in one message. A member is present until its line breaks, and again when it is back: who died makes room at once,
though the others still have to agree that it is gone.

The seed's mind once the cluster has formed: members come back, others wait to come in, the members go on. Pure.

    joiner ──Ready──→ waits, and members know of it ──chosen──→ member ──line broken──→ absent ──back──→ member
                                                                  └──────chosen without it──────→ told why, and gone

Law: nobody becomes or ceases to be a member here. The members choose, the seed is a witness at most; what was chosen is
kept before anybody hears of it, told to all, and followed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias, TypeVar

from nexar.cluster.decisions.admission_checks import Compatibility, JoinConnectionState, requested_member
from nexar.cluster.decisions.admission_events import (
    AdmissionAction,
    AdmitNode,
    ChildReported,
    CommitMembership,
    DropConnection,
    JoinRequested,
    MemberAnswered,
    MemberMessageReceived,
    NotifyConnections,
    RefuseConnection,
    SeedEvent,
    SeedEventKind,
)
from nexar.cluster.decisions.formation import EarlyJoiners
from nexar.cluster.decisions.membership_events import MembershipMessage
from nexar.cluster.decisions.refusals import Refusal, brief, last_line
from nexar.cluster.decisions.seed_voter import SeedVoter, SeedVoteService, VoteAction
from nexar.cluster.membership import (
    MAX_MEMBERS,
    MAX_MEMBERSHIP_BYTES,
    Change,
    Member,
    Membership,
    encode_member,
    share_bytes,
)
from nexar.types import NodeId, Rank, format_node
from nexar.wire.hello import Hello
from nexar.wire.join import Current, JoinMessage, MemberDied, ReserveRanks, WaitingJoiners

_What = TypeVar("_What")
_MOST_REMEMBERED: Final = 4096
"""Nodes that left, and nodes that were let in: the newest."""


class FormerMember(NamedTuple):
    """Why somebody is a member no more."""

    reason: str
    expelled: int
    """Since which epoch; 0: it left by its own will."""


class MemberRegister:
    """Of one cluster, from its formation on. Nobody's connection is known here."""

    def __init__(self, membership: Membership, *, elastic: bool = False, most: int = 0) -> None:
        """`elastic`: others may come in, while there are not more than `most` of all; 0: any number."""
        self.membership = membership
        self.elastic: Final = elastic
        self._most = min(most or MAX_MEMBERS, MAX_MEMBERS)
        self._bytes = len(membership.encode())
        self._absent: set[NodeId] = set()
        self._joiners: dict[NodeId, Member] = {}  # in the order in which they came
        self._ready: set[NodeId] = set()
        self._admitted: OrderedDict[NodeId, None] = OrderedDict()
        self._former: OrderedDict[NodeId, FormerMember] = OrderedDict()
        self._children = _children(membership)

    # -- members -----------------------------------------------------------------------------------------

    @property
    def present(self) -> int:
        """Members whose line has not been seen to break."""
        return self.membership.size - len(self._absent)

    def check_member(self, node: NodeId, fingerprint: bytes) -> Rank | None:
        """The rank of a member that shows its key; None for who is no member. Refusal for another key."""
        rank = self.membership.rank_of(node)
        if rank is not None and self.membership.member(rank).fingerprint != fingerprint:
            raise Refusal(f"node {format_node(node)} is known with another key")
        return rank

    def why_former(self, node: NodeId, epoch: int) -> FormerMember | None:
        """Why a node that was a member in this epoch (0: it does not say) is one no more; None: it never was."""
        if node in self._former:
            return self._former[node]
        now = self.membership.epoch
        gone = FormerMember(f"expelled: it is no member of epoch {now} any more", now)
        return gone if 0 < epoch <= now else None

    def set_present(self, node: NodeId, *, present: bool) -> None:
        """The line of a member has come back, or broken."""
        if present:
            self._absent.discard(node)
        elif self.membership.rank_of(node) is not None:
            self._absent.add(node)

    def child(self, launcher: NodeId, rank: Rank) -> NodeId | None:
        """Whom this launcher started for this rank of the first membership; None: that is not known, or not so."""
        return self._children.get((launcher, rank))

    @property
    def knows_children(self) -> bool:
        """Whether this register goes back to the first membership, whose ranks launchers speak of."""
        return bool(self._children)

    # -- joiners -----------------------------------------------------------------------------------------

    @property
    def admitted(self) -> frozenset[NodeId]:
        """Who was let in after the cluster had formed: of them, and of nobody else, members may take new ones."""
        return frozenset(self._admitted)

    @property
    def waiting(self) -> tuple[Member, ...]:
        """Who would like to come in, and can be dialed, in the order in which they came."""
        return tuple(member for node, member in self._joiners.items() if node in self._ready)

    @property
    def late(self) -> str:
        """What those are told who come after the formation of a cluster that is not elastic."""
        return f"the cluster has formed with {self.membership.size} members and is not elastic"

    def check_room(self, count: int) -> None:
        """Refusal if so many more may not come in."""
        if not self.elastic:
            raise Refusal(self.late)
        if self.present + len(self._joiners) + count > self._most:
            raise Refusal(
                f"the cluster has {self.present} members and {len(self._joiners)} that wait to come in, and no more "
                f"than {self._most} are allowed; start it with a larger --max (NEXAR_ELASTIC_MAX_WORLD_SIZE)"
            )

    def admit(self, member: Member) -> None:
        """Somebody who would like to come in. Refusal if there is no room."""
        self.withdraw(member.node)
        self.check_room(1)
        if self._bytes + sum(map(share_bytes, self._joiners.values())) + share_bytes(member) > MAX_MEMBERSHIP_BYTES:
            raise Refusal("the members and those who wait fill a message; advertise fewer addresses (NEXAR_ADVERTISE)")
        self._joiners[member.node] = member
        _remember(self._admitted, member.node, None)

    def make_ready(self, node: NodeId) -> None:
        """It can be dialed from now on."""
        self._ready.add(node)

    def withdraw(self, node: NodeId) -> bool:
        """It does not wait any more. True: members had been told that it does."""
        self._joiners.pop(node, None)
        told = node in self._ready
        self._ready.discard(node)
        return told

    # -- changes -----------------------------------------------------------------------------------------

    def follow(self, change: Change) -> None:
        """The members went on by this change of the membership. MembershipError if it is none."""
        self.membership = change.apply(self.membership)
        self._bytes = len(self.membership.encode())
        for departure in change.left:
            self._absent.discard(departure.node)
            verb, expelled = ("left", 0) if departure.willing else ("expelled", change.epoch)
            why = f"{verb} in epoch {change.epoch}: {departure.cause}"
            _remember(self._former, departure.node, FormerMember(why, expelled))
        for member in change.joined:
            if member.node not in self._joiners:
                self._absent.add(member.node)  # its line broke, or the seed had never heard of it
            self.withdraw(member.node)
            self._former.pop(member.node, None)


def _remember(memory: OrderedDict[NodeId, _What], node: NodeId, what: _What) -> None:
    memory[node] = what
    memory.move_to_end(node)
    if len(memory) > _MOST_REMEMBERED:
        memory.popitem(last=False)


def _children(membership: Membership) -> dict[tuple[NodeId, Rank], NodeId]:
    """Known only from the first membership: later ranks are others."""
    if membership.epoch > 1:
        return {}
    members = enumerate(membership.members)
    return {(member.launcher, rank): member.node for rank, member in members if member.launcher}


SEED_CONNECTION_BROKE: Final = "its line to the seed broke"
"""The seed's own hint that a member may be gone: who knows more, says more."""
_REPLACED: Final = "the node has come back on another connection"
_NOBODY_LEFT: Final = "every member has left or died: nobody is left who could let it in"
_BEHIND: Final = "the seed does not know the newest membership yet; try again"
_MAX_CAUSE: Final = 4096  # characters of a child's traceback that are noted and told, the last ones

EndConnection: TypeAlias = Callable[[JoinConnectionState, SeedEventKind, str], list[AdmissionAction]]
"""Forget a connection, with a note."""


class FormedCluster:
    """Told by admission of what those do who have proven that they know the secret."""

    def __init__(
        self,
        register: MemberRegister,
        seed_voter: SeedVoter,
        members: dict[NodeId, JoinConnectionState],
        launchers: dict[NodeId, JoinConnectionState],
        end: EndConnection,
        *,
        compatibility: Compatibility | None = None,
    ) -> None:
        """`members`, `launchers`: those that are connected."""
        self._compatibility = compatibility or Compatibility()
        self._register = register
        self._seed_voter = seed_voter
        self._members = members
        self._launchers = launchers
        self._joiners: dict[NodeId, JoinConnectionState] = {}
        self._end = end
        self._awaited = {member.node for member in register.membership.members} - set(members)
        self._vote_service = SeedVoteService(seed_voter, members, self._awaited.__contains__)

    @property
    def membership(self) -> Membership:
        """The newest that the seed knows."""
        return self._register.membership

    @property
    def joined(self) -> int:
        """Members that are connected."""
        return len(self._members)

    def rank_of(self, joiner: JoinConnectionState) -> Rank | None:
        """The rank of a member on the line that counts."""
        is_member = joiner.node is not None and self._members.get(joiner.node) is joiner
        return self.membership.rank_of(joiner.node) if is_member and joiner.node is not None else None

    # ------------------------------------------------------------ coming

    def applied(self, joiner: JoinConnectionState, hello: Hello, event: JoinRequested) -> list[AdmissionAction]:
        """A candidate with the secret: a member that is back, or a joiner. Refusal for all others."""
        asked = event.application
        rank = self._register.check_member(hello.node, joiner.fingerprint)
        if rank is not None:
            member = self.membership.member(rank)
            self._compatibility.add(member, asked, joiner.address)
            return self._returned(joiner, hello.node, rank)
        why = self._register.why_former(hello.node, asked.epoch)
        if why is not None:
            raise Refusal(why.reason, expelled=why.expelled)
        if asked.epoch:  # of a membership that this seed does not know: whoever has a line tells it
            return [DropConnection(joiner.connection, _BEHIND), *self._end(joiner, "dropped", _BEHIND)]
        return self._joined(joiner, hello, event)

    def _returned(self, joiner: JoinConnectionState, node: NodeId, rank: Rank) -> list[AdmissionAction]:
        replaced = self._replace(self._members, node)
        self._members[node] = joiner
        self._awaited.discard(node)
        self._register.set_present(node, present=True)
        admit = AdmitNode(joiner.connection, node, joiner.address, self.membership.size, rank=rank)
        note = _note("returned", joiner, rank)
        waiting = self._waiting([joiner]) if self._register.elastic else []
        asked = self._do(self._vote_service.returned(node))
        return [*replaced, admit, note, self._commit([joiner]), *waiting, *asked]

    def _joined(self, joiner: JoinConnectionState, hello: Hello, event: JoinRequested) -> list[AdmissionAction]:
        asked = event.application
        self._check_stranger(hello.node, asked.rank)
        self._check_anybody()
        old = self._joiners.get(hello.node)
        if old is not None and old.fingerprint != joiner.fingerprint:
            raise Refusal(f"node {format_node(hello.node)} is known with another key")
        replaced = self._replace(self._joiners, hello.node)
        member = requested_member(joiner, hello, asked)
        self._compatibility.check(member, asked, event.clock, joiner.address)
        self._expect(joiner, member)
        self._compatibility.add(member, asked, joiner.address)
        admit = AdmitNode(joiner.connection, hello.node, joiner.address, self.membership.size)
        return [*replaced, admit, _note("admitted", joiner, None, "it waits to come in")]

    def take_over(self, early: EarlyJoiners) -> list[AdmissionAction]:
        """Joiners that came before the cluster had formed: they wait no longer there."""
        actions: list[AdmissionAction] = []
        while (joiner := early.take()) is not None:
            try:
                self._expect(joiner.joiner, joiner.member)
                actions += self.ready(joiner.joiner) if joiner.ready else []
            except Refusal as why:
                reason = brief(str(why))
                actions += [
                    RefuseConnection(joiner.joiner.connection, reason),
                    *self._end(joiner.joiner, "refused", reason),
                ]
        return actions

    def _expect(self, joiner: JoinConnectionState, member: Member) -> None:
        self._register.admit(member)
        self._seed_voter.admitted = self._register.admitted
        self._joiners[member.node] = joiner

    def _check_stranger(self, node: NodeId, rank: Rank | None) -> None:
        """Refusal for who may not come in: nobody may, it is somebody else already, or there is no room."""
        again = "" if rank is None else f"; rank {rank} is one of them: nexar.init() is called once for each rank"
        if not self._register.elastic:
            raise Refusal(self._register.late + again)
        if self.membership.pin(node) is not None:
            raise Refusal(f"node {format_node(node)} is known to the cluster, and not as a member")

    def ready(self, joiner: JoinConnectionState) -> list[AdmissionAction]:
        """A joiner can be dialed. Of a member that is back it is no news. Refusal from all others."""
        node = joiner.node
        if node is not None and self._members.get(node) is joiner:
            return []
        if node is None or self._joiners.get(node) is not joiner:
            raise Refusal("it said that it is ready, and has not joined")
        self._register.make_ready(node)
        return self._current([joiner]) + self._waiting(self._members.values())

    def reserved(self, joiner: JoinConnectionState, hello: Hello, asked: ReserveRanks) -> list[AdmissionAction]:
        """A launcher that is back, or one whose children will be joiners, without ranks. Refusal for all others."""
        membership, node = self.membership, hello.node
        is_launcher = self.is_launcher(node)
        if not is_launcher and node not in self._launchers:
            self._check_stranger(node, None)
            self._register.check_room(asked.count)
        elif joiner.fingerprint != (membership.pin(node) or self._launchers[node].fingerprint):
            raise Refusal(f"node {format_node(node)} is known with another key")
        replaced = self._replace(self._launchers, node)
        self._launchers[node] = joiner
        admit = AdmitNode(joiner.connection, node, joiner.address, membership.size)
        note = _note("returned" if is_launcher else "reserved", joiner, None, "" if is_launcher else "no ranks yet")
        return [*replaced, admit, note, self._commit([joiner])]

    def is_launcher(self, node: NodeId) -> bool:
        """Whether this is a launcher that had reserved ranks when the cluster formed."""
        return any(attendant.node == node for attendant in self.membership.attendants)

    def _check_anybody(self) -> None:
        """Refusal if nobody is left who could take a joiner."""
        if not self._register.present:
            raise Refusal(_NOBODY_LEFT, nobody_left=True)

    def _replace(self, directory: dict[NodeId, JoinConnectionState], node: NodeId) -> list[AdmissionAction]:
        """The newest line counts: the node has lost its old one, though we may not have noticed."""
        old = directory.pop(node, None)
        return [] if old is None else [DropConnection(old.connection, _REPLACED), *self._end(old, "gone", _REPLACED)]

    # ------------------------------------------------------------ going

    def withdrawn(
        self, joiner: JoinConnectionState, kind: SeedEventKind, reason: str, now: float
    ) -> list[AdmissionAction]:
        """The connection of this guest has ended, and is forgotten."""
        node = joiner.node
        if node is None:
            return []
        if self._launchers.get(node) is joiner:
            del self._launchers[node]
        elif self._joiners.get(node) is joiner:
            del self._joiners[node]
            self._compatibility.remove(node)
            return self._waiting(self._members.values()) if self._register.withdraw(node) else []
        elif self._members.get(node) is joiner:
            del self._members[node]
            self._register.set_present(node, present=False)
            cause = f"{SEED_CONNECTION_BROKE}: {reason}"
            hint = [] if kind == "left" else self._hint(node, cause)
            return [*hint, *self._do(self._vote_service.lost(node, cause, now)), *self._send_away()]
        return []

    def _send_away(self) -> list[AdmissionAction]:
        """Joiners wait in vain when the last member has gone."""
        if self._register.present:
            return []
        actions: list[AdmissionAction] = []
        for joiner in list(self._joiners.values()):
            actions += [
                RefuseConnection(joiner.connection, _NOBODY_LEFT, nobody_left=True),
                *self._end(joiner, "refused", _NOBODY_LEFT),
            ]
        return actions

    def child_died(self, joiner: JoinConnectionState, event: ChildReported) -> list[AdmissionAction]:
        """A launcher reports the end of a child. Refusal if it is none, as far as that is known."""
        if joiner.node is None or self._launchers.get(joiner.node) is not joiner:
            raise Refusal("it reported the end of a child, and is no launcher")
        node = self._register.child(joiner.node, event.rank)
        if node is None and self._register.knows_children:
            raise Refusal(f"it reported rank {event.rank} as its child, which it is not")
        if event.well:
            return []  # it has left the cluster by itself
        cause = event.cause[-_MAX_CAUSE:]
        died = SeedEvent("child died", joiner.address, node, event.rank, cause)
        return [died] if node is None else [died, *self._hint(node, cause)]

    def _hint(self, node: NodeId, cause: str) -> list[AdmissionAction]:
        """Members look at once whether it is so."""
        if self.membership.rank_of(node) is None:
            return []
        others = [joiner for other, joiner in self._members.items() if other != node]
        return _tell(MemberDied(node, self.membership.epoch, cause), others)

    # ------------------------------------------------------------ changing

    def said(self, joiner: JoinConnectionState, event: MemberMessageReceived, now: float) -> list[AdmissionAction]:
        """A word for the witness. Refusal from who is no member."""
        return (
            self._do(self._vote_service.heard(self._member(joiner), event.message, now))
            if isinstance(event.message, MembershipMessage)
            else []
        )

    def answered(self, joiner: JoinConnectionState, event: MemberAnswered, now: float) -> list[AdmissionAction]:
        """A member is there. Refusal from who is none."""
        return self._do(self._vote_service.answered(self._member(joiner), event.number, now))

    def _member(self, joiner: JoinConnectionState) -> NodeId:
        if joiner.node is None or self._members.get(joiner.node) is not joiner:
            raise Refusal("it spoke like a member, and is none")
        return joiner.node

    def tick(self, now: float) -> list[AdmissionAction]:
        """Time has passed."""
        return self._do(self._vote_service.tick(now))

    def due(self, now: float) -> float | None:
        """When the next tick is needed."""
        return self._vote_service.due(now)

    def _do(self, deeds: Iterable[VoteAction]) -> list[AdmissionAction]:
        """Who is no longer a member hears what was chosen before its line ends."""
        actions: list[AdmissionAction] = []
        partings: list[AdmissionAction] = []
        for deed in deeds:
            if isinstance(deed, Change):
                actions += self._follow(deed)
                partings += self._part(deed)
            else:
                actions.append(deed)
        return actions + partings

    def _follow(self, change: Change) -> list[AdmissionAction]:
        before = self._register.waiting
        self._register.follow(change)
        for departure in change.left:
            self._compatibility.remove(departure.node)
        new = [self._joiners.pop(member.node) for member in change.joined if member.node in self._joiners]
        self._members |= {joiner.node: joiner for joiner in new if joiner.node is not None}
        self._awaited &= {member.node for member in self.membership.members}
        size, epoch = self.membership.size, self.membership.epoch
        note = SeedEvent(
            "moved on", reason=f"to epoch {epoch}: {size} members, {len(new)} new, {len(change.left)} gone"
        )
        told = list(self._members.values()) if before != self._register.waiting else new
        willing = frozenset(departure.node for departure in change.left if departure.willing)
        commit = replace(self._commit(new), willing=willing)
        return [commit, note, *self._current(self._waiting_joiners()), *self._waiting(told)]

    def _part(self, change: Change) -> list[AdmissionAction]:
        actions: list[AdmissionAction] = []
        for departure in change.left:
            joiner = self._members.get(departure.node)
            if joiner is not None:
                former = self._register.why_former(departure.node, 0)
                reason = "" if former is None else former.reason
                kind: SeedEventKind = "left" if departure.willing else "gone"
                refuse = RefuseConnection(joiner.connection, brief(reason), change.epoch)
                end = DropConnection(joiner.connection, brief(reason)) if departure.willing else refuse
                actions += [end, *self._end(joiner, kind, brief(last_line(reason)))]
        return actions

    # ------------------------------------------------------------ words

    def _commit(self, joiners: Iterable[JoinConnectionState]) -> CommitMembership:
        present = frozenset(node for node in self._members if self.membership.rank_of(node) is not None)
        return CommitMembership(self.membership, _connections(joiners), present)

    def _current(self, joiners: Iterable[JoinConnectionState]) -> list[AdmissionAction]:
        return _tell(Current(self.membership.encode()), joiners)

    def _waiting(self, joiners: Iterable[JoinConnectionState]) -> list[AdmissionAction]:
        return _tell(WaitingJoiners(tuple(map(encode_member, self._register.waiting))), joiners)

    def _waiting_joiners(self) -> list[JoinConnectionState]:
        waiting = {member.node for member in self._register.waiting}
        return [joiner for node, joiner in self._joiners.items() if node in waiting]


def _connections(joiners: Iterable[JoinConnectionState]) -> tuple[int, ...]:
    return tuple(joiner.connection for joiner in joiners)


def _tell(message: JoinMessage, joiners: Iterable[JoinConnectionState]) -> list[AdmissionAction]:
    connections = _connections(joiners)
    return [NotifyConnections(message, connections)] if connections else []


def _note(kind: SeedEventKind, joiner: JoinConnectionState, rank: Rank | None, reason: str = "") -> SeedEvent:
    return SeedEvent(kind, joiner.address, joiner.node, rank, reason)
