"""The seed after the cluster has formed. Pure.

    joiner ──ready──→ waits, known to members ──chosen──→ member ──session broken──→ absent ──returns──→ member
                                                            └──chosen without it──→ informed and closed

Invariants:
- The seed never makes or removes a member: the members choose, and the seed at most votes. A chosen change is persisted
  before it is sent.
- Present members and waiting nodes never exceed the maximum world size and fit in one message. A member whose session
  broke is absent until it returns, so a dead member makes room before the others agree that it is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgspec

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
from nexar.cluster.decisions.membership_events import Loss, LossKind, MembershipMessage
from nexar.cluster.decisions.refusals import Refusal, brief, last_line
from nexar.cluster.decisions.seed_voter import SeedVoter, SeedVoteService, VoteAction
from nexar.cluster.membership import (
    MAX_MEMBERS,
    MAX_MEMBERSHIP_BYTES,
    Change,
    Member,
    Membership,
    encode_member,
    encode_membership,
    pin_of,
    share_bytes,
)
from nexar.types import NodeId, Rank, format_node
from nexar.wire.hello import Hello
from nexar.wire.join import (
    REPORTED_BY_LAUNCHER,
    REPORTED_BY_SEED,
    Current,
    JoinMessage,
    MemberDied,
    ReserveRanks,
    WaitingJoiners,
)

_Value = TypeVar("_Value")
_MOST_REMEMBERED: Final = 4096  # former members, and admitted nodes: the newest


class FormerMember(NamedTuple):
    """Why a node is no longer a member."""

    reason: str
    expelled: int  # since which epoch; 0: it left of its own will


class MemberRegister:
    """Members, waiting joiners and former members."""

    def __init__(self, membership: Membership, *, elastic: bool = False, most: int = 0) -> None:
        """`most`: limit of nodes; 0: none."""
        self.membership = membership
        self.elastic: Final = elastic
        self._most = min(most or MAX_MEMBERS, MAX_MEMBERS)
        self._bytes = len(encode_membership(membership))
        self._absent: set[NodeId] = set()
        self._joiners: dict[NodeId, Member] = {}  # in order of arrival
        self._ready: set[NodeId] = set()
        self._admitted: OrderedDict[NodeId, None] = OrderedDict()
        self._former: OrderedDict[NodeId, FormerMember] = OrderedDict()
        self._children = _children(membership)

    # -- members -----------------------------------------------------------------------------------------

    @property
    def present(self) -> int:
        return self.membership.size - len(self._absent)

    def check_member(self, node: NodeId, fingerprint: bytes) -> Rank | None:
        """Raises Refusal for another key."""
        rank = self.membership.rank_of(node)
        if rank is not None and self.membership.member(rank).fingerprint != fingerprint:
            raise Refusal(f"node {format_node(node)} is known with another key")
        return rank

    def why_former(self, node: NodeId, epoch: int) -> FormerMember | None:
        """Why a node that claims membership in `epoch` (0: no claim) is no member, if it was one."""
        if node in self._former:
            return self._former[node]
        now = self.membership.epoch
        gone = FormerMember(f"expelled: it is not a member of epoch {now}", now)
        return gone if 0 < epoch <= now else None

    def set_present(self, node: NodeId, *, present: bool) -> None:
        if present:
            self._absent.discard(node)
        elif self.membership.rank_of(node) is not None:
            self._absent.add(node)

    def child(self, launcher: NodeId, rank: Rank) -> NodeId | None:
        """The node that the launcher started for this rank, if known."""
        return self._children.get((launcher, rank))

    @property
    def knows_children(self) -> bool:
        """Whether this register began with the first membership, whose ranks launchers use."""
        return bool(self._children)

    # -- joiners -----------------------------------------------------------------------------------------

    @property
    def admitted(self) -> frozenset[NodeId]:
        """Only these may become new members."""
        return frozenset(self._admitted)

    @property
    def waiting(self) -> tuple[Member, ...]:
        """Ready joiners, in order of arrival."""
        return tuple(member for node, member in self._joiners.items() if node in self._ready)

    @property
    def late(self) -> str:
        return f"the cluster has formed with {self.membership.size} members and is not elastic"

    def check_room(self, count: int) -> None:
        """Raises Refusal."""
        if not self.elastic:
            raise Refusal(self.late, code="not_elastic")
        if self.present + len(self._joiners) + count > self._most:
            raise Refusal(
                f"the cluster has {self.present} members and {len(self._joiners)} that wait to join, and no more "
                f"than {self._most} are allowed; start it with a larger --max (NEXAR_ELASTIC_MAX_WORLD_SIZE)",
                code="full",
            )

    def admit(self, member: Member) -> None:
        """Raises Refusal."""
        self.withdraw(member.node)
        self.check_room(1)
        if self._bytes + sum(map(share_bytes, self._joiners.values())) + share_bytes(member) > MAX_MEMBERSHIP_BYTES:
            raise Refusal(
                "the members and waiting nodes exceed one message; advertise fewer addresses (NEXAR_ADVERTISE)",
                code="full",
            )
        self._joiners[member.node] = member
        _remember(self._admitted, member.node, None)

    def make_ready(self, node: NodeId) -> None:
        self._ready.add(node)

    def withdraw(self, node: NodeId) -> bool:
        """Returns whether members know that it waits."""
        self._joiners.pop(node, None)
        informed = node in self._ready
        self._ready.discard(node)
        return informed

    # -- changes -----------------------------------------------------------------------------------------

    def follow(self, change: Change) -> None:
        """Raises MembershipError."""
        self.membership = change.apply(self.membership)
        self._bytes = len(encode_membership(self.membership))
        for departure in change.left:
            self._absent.discard(departure.node)
            former = FormerMember(departure.cause, change.epoch)
            if departure.willing:
                former = FormerMember(f"left in epoch {change.epoch}: {departure.cause}", 0)
            _remember(self._former, departure.node, former)
        for member in change.joined:
            if member.node not in self._joiners:
                self._absent.add(member.node)  # its session broke, or the seed never saw it
            self.withdraw(member.node)
            self._former.pop(member.node, None)


def _remember(memory: OrderedDict[NodeId, _Value], node: NodeId, value: _Value) -> None:
    memory[node] = value
    memory.move_to_end(node)
    if len(memory) > _MOST_REMEMBERED:
        memory.popitem(last=False)


def _children(membership: Membership) -> dict[tuple[NodeId, Rank], NodeId]:
    # Known only from the first membership: later ranks differ.
    if membership.epoch > 1:
        return {}
    members = enumerate(membership.members)
    return {(member.launcher, rank): member.node for rank, member in members if member.launcher}


# Do not change these words: nodes that do not know MemberDied.reported_by recognize the seed's report by them.
_CONNECTION_BROKE: Final = "its connection to the seed broke"
_REPLACED: Final = "the node has come back on another connection"
_NOBODY_LEFT: Final = "every member has left or died: no member is left that could admit it"
_BEHIND: Final = "the seed does not know the newest membership yet; try again"
_MAX_CAUSE: Final = 4096  # the last characters of a child's traceback that are logged and sent

# forgets a connection and logs it
EndConnection: TypeAlias = Callable[[JoinConnectionState, SeedEventKind, str], list[AdmissionAction]]


class FormedCluster:
    """Authenticated connections of a formed cluster."""

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
        return self._register.membership

    # ------------------------------------------------------------ joining and returning

    def join_requested(self, joiner: JoinConnectionState, hello: Hello, event: JoinRequested) -> list[AdmissionAction]:
        """A returning member or a joiner. Raises Refusal."""
        asked = event.application
        rank = self._register.check_member(hello.node, joiner.fingerprint)
        if rank is not None:
            member = self.membership.member(rank)
            self._compatibility.add(member, asked, joiner.address)
            return self._returned(joiner, hello.node, rank)
        why = self._register.why_former(hello.node, asked.epoch)
        if why is not None:
            raise Refusal(why.reason, expelled=why.expelled)
        if asked.epoch:  # a membership that this seed does not know; a connected member will send it
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
        self._check_may_join(hello.node, asked.rank)
        self._check_any_present()
        old = self._joiners.get(hello.node)
        if old is not None and old.fingerprint != joiner.fingerprint:
            raise Refusal(f"node {format_node(hello.node)} is known with another key")
        replaced = self._replace(self._joiners, hello.node)
        member = requested_member(joiner, hello, asked)
        self._compatibility.check(member, asked, event.clock, joiner.address)
        self._expect(joiner, member)
        self._compatibility.add(member, asked, joiner.address)
        admit = AdmitNode(joiner.connection, hello.node, joiner.address, self.membership.size)
        return [*replaced, admit, _note("admitted", joiner, None, "it waits to join")]

    def take_over(self, early: EarlyJoiners) -> list[AdmissionAction]:
        actions: list[AdmissionAction] = []
        while (joiner := early.take()) is not None:
            try:
                self._expect(joiner.joiner, joiner.member)
                actions += self.ready(joiner.joiner) if joiner.ready else []
            except Refusal as why:
                reason = brief(str(why))
                actions += [
                    RefuseConnection(joiner.joiner.connection, reason, code=why.code),
                    *self._end(joiner.joiner, "refused", reason),
                ]
        return actions

    def _expect(self, joiner: JoinConnectionState, member: Member) -> None:
        self._register.admit(member)
        self._seed_voter.admitted = self._register.admitted
        self._joiners[member.node] = joiner

    def _check_may_join(self, node: NodeId, rank: Rank | None) -> None:
        # Raises Refusal if the node may not join: the cluster is not elastic, or knows the node in another role.
        again = "" if rank is None else f"; rank {rank} is one of them: nexar.init() is called once for each rank"
        if not self._register.elastic:
            raise Refusal(self._register.late + again, code="not_elastic")
        if pin_of(self.membership, node) is not None:
            raise Refusal(f"node {format_node(node)} is known to the cluster in another role")

    def ready(self, joiner: JoinConnectionState) -> list[AdmissionAction]:
        """No effect for a returning member. Raises Refusal for non-joiners."""
        node = joiner.node
        if node is not None and self._members.get(node) is joiner:
            return []
        if node is None or self._joiners.get(node) is not joiner:
            raise Refusal("it reported that it is ready, but has not joined")
        self._register.make_ready(node)
        return self._current([joiner]) + self._waiting(self._members.values())

    def reserved(self, joiner: JoinConnectionState, hello: Hello, asked: ReserveRanks) -> list[AdmissionAction]:
        """For a returning launcher, or one whose children join without ranks. Raises Refusal."""
        membership, node = self.membership, hello.node
        is_launcher = self.is_launcher(node)
        if not is_launcher and node not in self._launchers:
            self._check_may_join(node, None)
            self._register.check_room(asked.count)
        elif joiner.fingerprint != (pin_of(membership, node) or self._launchers[node].fingerprint):
            raise Refusal(f"node {format_node(node)} is known with another key")
        replaced = self._replace(self._launchers, node)
        self._launchers[node] = joiner
        admit = AdmitNode(joiner.connection, node, joiner.address, membership.size)
        note = _note("returned" if is_launcher else "reserved", joiner, None, "" if is_launcher else "no ranks yet")
        return [*replaced, admit, note, self._commit([joiner])]

    def is_launcher(self, node: NodeId) -> bool:
        return any(attendant.node == node for attendant in self.membership.attendants)

    def _check_any_present(self) -> None:
        # Raises Refusal if no member is left that could take a joiner.
        if not self._register.present:
            raise Refusal(_NOBODY_LEFT, code="nobody_left")

    def _replace(self, directory: dict[NodeId, JoinConnectionState], node: NodeId) -> list[AdmissionAction]:
        # The newest connection counts: the node lost its old one, perhaps unnoticed.
        old = directory.pop(node, None)
        return [] if old is None else [DropConnection(old.connection, _REPLACED), *self._end(old, "gone", _REPLACED)]

    # ------------------------------------------------------------ departures

    def withdrawn(
        self, joiner: JoinConnectionState, kind: SeedEventKind, reason: str, now: float
    ) -> list[AdmissionAction]:
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
            loss = Loss(LossKind.SEED_CONNECTION_BROKEN, f"{_CONNECTION_BROKE}: {reason}")
            hint = [] if kind == "left" else self._hint(node, loss)
            return [*hint, *self._do(self._vote_service.lost(node, loss, now)), *self._refuse_joiners()]
        return []

    def _refuse_joiners(self) -> list[AdmissionAction]:
        # When the last member is gone, joiners wait in vain.
        if self._register.present:
            return []
        actions: list[AdmissionAction] = []
        for joiner in list(self._joiners.values()):
            actions += [
                RefuseConnection(joiner.connection, _NOBODY_LEFT, code="nobody_left"),
                *self._end(joiner, "refused", _NOBODY_LEFT),
            ]
        return actions

    def child_died(self, joiner: JoinConnectionState, event: ChildReported) -> list[AdmissionAction]:
        """Raises Refusal if it is known not to be the launcher's child."""
        if joiner.node is None or self._launchers.get(joiner.node) is not joiner:
            raise Refusal("it reported the end of a child, but is no launcher")
        node = self._register.child(joiner.node, event.rank)
        if node is None and self._register.knows_children:
            raise Refusal(f"it reported rank {event.rank} as its child, which it is not")
        if event.well:
            return []  # it left the cluster by itself
        cause = event.cause[-_MAX_CAUSE:]
        died = SeedEvent("child died", joiner.address, node, event.rank, cause)
        return [died] if node is None else [died, *self._hint(node, Loss(LossKind.LAUNCHER_REPORT, cause))]

    def _hint(self, node: NodeId, loss: Loss) -> list[AdmissionAction]:
        # The members probe the node at once.
        if self.membership.rank_of(node) is None:
            return []
        others = [joiner for other, joiner in self._members.items() if other != node]
        by = REPORTED_BY_LAUNCHER if loss.kind is LossKind.LAUNCHER_REPORT else REPORTED_BY_SEED
        return _notify(MemberDied(node, self.membership.epoch, loss.text, by), others)

    # ------------------------------------------------------------ changes of the membership

    def message_received(
        self, joiner: JoinConnectionState, event: MemberMessageReceived, now: float
    ) -> list[AdmissionAction]:
        """Raises Refusal if the sender is no member."""
        return (
            self._do(self._vote_service.message_received(self._member(joiner), event.message, now))
            if isinstance(event.message, MembershipMessage)
            else []
        )

    def answered(self, joiner: JoinConnectionState, event: MemberAnswered, now: float) -> list[AdmissionAction]:
        """Raises Refusal if the sender is no member."""
        return self._do(self._vote_service.answered(self._member(joiner), event.number, now))

    def _member(self, joiner: JoinConnectionState) -> NodeId:
        if joiner.node is None or self._members.get(joiner.node) is not joiner:
            raise Refusal("it sent a member's message, but is no member")
        return joiner.node

    def tick(self, now: float) -> list[AdmissionAction]:
        return self._do(self._vote_service.tick(now))

    def due(self, now: float) -> float | None:
        return self._vote_service.due(now)

    def _do(self, vote_actions: Iterable[VoteAction]) -> list[AdmissionAction]:
        # A removed member is sent the chosen change before its connection ends.
        actions: list[AdmissionAction] = []
        closings: list[AdmissionAction] = []
        for action in vote_actions:
            if isinstance(action, Change):
                actions += self._follow(action)
                closings += self._close_removed(action)
            else:
                actions.append(action)
        return actions + closings

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
        informed = list(self._members.values()) if before != self._register.waiting else new
        willing = frozenset(departure.node for departure in change.left if departure.willing)
        commit = msgspec.structs.replace(self._commit(new), willing=willing)
        return [commit, note, *self._current(self._waiting_joiners()), *self._waiting(informed)]

    def _close_removed(self, change: Change) -> list[AdmissionAction]:
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

    # ------------------------------------------------------------ messages

    def _commit(self, joiners: Iterable[JoinConnectionState]) -> CommitMembership:
        present = frozenset(node for node in self._members if self.membership.rank_of(node) is not None)
        return CommitMembership(self.membership, _connections(joiners), present)

    def _current(self, joiners: Iterable[JoinConnectionState]) -> list[AdmissionAction]:
        return _notify(Current(encode_membership(self.membership)), joiners)

    def _waiting(self, joiners: Iterable[JoinConnectionState]) -> list[AdmissionAction]:
        return _notify(WaitingJoiners(tuple(map(encode_member, self._register.waiting))), joiners)

    def _waiting_joiners(self) -> list[JoinConnectionState]:
        waiting = {member.node for member in self._register.waiting}
        return [joiner for node, joiner in self._joiners.items() if node in waiting]


def _connections(joiners: Iterable[JoinConnectionState]) -> tuple[int, ...]:
    return tuple(joiner.connection for joiner in joiners)


def _notify(message: JoinMessage, joiners: Iterable[JoinConnectionState]) -> list[AdmissionAction]:
    connections = _connections(joiners)
    return [NotifyConnections(message, connections)] if connections else []


def _note(kind: SeedEventKind, joiner: JoinConnectionState, rank: Rank | None, reason: str = "") -> SeedEvent:
    return SeedEvent(kind, joiner.address, joiner.node, rank, reason)
