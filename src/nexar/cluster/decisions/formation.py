"""Formation at the seed: places, early joiners, and children that died. Pure.

It ends once: `complete` when ready candidates hold all places, or with a `failure` when a rank is late or will never
come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

import msgspec

from nexar.cluster.decisions.admission_checks import (
    AdmissionLimits,
    Compatibility,
    Incompatible,
    JoinConnectionState,
    requested_member,
)
from nexar.cluster.decisions.admission_events import (
    AdmissionAction,
    AdmitNode,
    ChildReported,
    JoinRequested,
    SeedEvent,
    SeedEventKind,
)
from nexar.cluster.decisions.rank_allocation import RankAllocator, RankBlock
from nexar.cluster.decisions.refusals import NoRanksLeft, Refusal, RefusalLog, last_line
from nexar.cluster.membership import MAX_MEMBERS, Member, Membership, PinnedNode, allowed_share_bytes, share_bytes
from nexar.types import NodeId, Rank, format_node, format_seconds
from nexar.wire.hello import Hello
from nexar.wire.join import JoinRequest, ReserveRanks

_FIRST_EPOCH: Final = 1


class DraftMembership:
    """Candidates and launchers of an incomplete cluster."""

    def __init__(self, cluster: str, size: int, seed: PinnedNode | None) -> None:
        self._cluster = cluster
        self._seed = seed
        self._allocator = RankAllocator(size)
        self._allowed_bytes = allowed_share_bytes(size)
        self._candidates: dict[NodeId, Member] = {}  # in order of arrival, like the launchers
        self._launchers: dict[NodeId, PinnedNode] = {}
        self._ready: set[NodeId] = set()  # candidates that show their certificate
        self._on_host: dict[str, dict[NodeId, None]] = {}  # candidates of each host, in order of arrival
        # What `missing` returned since the last arrival or departure: every waiting candidate asks for it.
        self._missing: dict[int, tuple[Rank, ...]] = {}

    @property
    def is_complete(self) -> bool:
        return self._allocator.is_full and len(self._ready) == len(self._candidates)

    def admit(self, member: Member, rank: Rank | None) -> None:
        """Raises Refusal if no place, or not that rank, is free."""
        self._check_name(member.node)
        self._check_share(member)
        self._allocator.claim(member.node, rank, member.launcher)
        self._candidates[member.node] = member
        self._on_host.setdefault(member.host, {})[member.node] = None
        self._missing.clear()

    def make_ready(self, node: NodeId) -> None:
        self._ready.add(node)

    def why_not_ready(self, node: NodeId) -> str:
        return "" if node in self._ready else " (admitted, but not ready)"

    def reserve(self, launcher: PinnedNode, count: int, first_rank: Rank | None) -> RankBlock:
        """Raises Refusal if the block does not fit."""
        self._check_name(launcher.node)
        block = self._allocator.reserve(launcher.node, count, first_rank)
        self._launchers[launcher.node] = launcher
        return block

    @property
    def has_room(self) -> bool:
        return self._allocator.left > 0

    def withdraw(self, node: NodeId) -> None:
        """No effect for a node that claimed nothing."""
        if self._launchers.pop(node, None) is not None:
            self._allocator.release(node)
        elif node in self._candidates:
            member = self._candidates.pop(node)
            del self._on_host[member.host][node]
            self._ready.discard(node)
            self._allocator.give_up(node)
            self._missing.clear()

    def make_membership(self) -> Membership:
        """Requires `is_complete`."""
        order = self._allocator.assign((node, member.host) for node, member in self._candidates.items())
        members = tuple(self._candidates[node] for node in order)
        return Membership(self._cluster, _FIRST_EPOCH, members, tuple(self._launchers.values()), self._seed)

    def missing(self, most: int) -> tuple[Rank, ...]:
        """The lowest free ranks; empty if a candidate waits for any rank."""
        if most not in self._missing:
            free = (rank for rank in range(self._allocator.size) if self._allocator.holder(rank) is None)
            self._missing[most] = () if self._allocator.has_unplaced else tuple(islice(free, most))
        return self._missing[most]

    def is_first(self, node: NodeId) -> bool:
        """Whether it was its host's first candidate."""
        member = self._candidates.get(node)
        return member is not None and next(iter(self._on_host[member.host])) == node

    def rank_of(self, node: NodeId) -> Rank | None:
        return self._allocator.rank_of(node)

    def holder(self, rank: Rank) -> NodeId | None:
        return self._allocator.holder(rank)

    def has_block(self, launcher: NodeId) -> bool:
        return self._allocator.block_of(launcher) is not None

    def ranks_of(self, launcher: NodeId) -> range:
        block = self._allocator.block_of(launcher)
        return range(0) if block is None else block.ranks

    def is_child(self, launcher: NodeId, rank: Rank) -> bool:
        return rank in self.ranks_of(launcher)

    def _check_name(self, node: NodeId) -> None:
        if self._seed is not None and node == self._seed.node:
            raise Refusal(f"node {format_node(node)} is the seed")

    def _check_share(self, member: Member) -> None:
        # An admitted member must not make the membership too large for one message.
        share = share_bytes(member)
        if share > self._allowed_bytes:
            raise Refusal(
                f"it describes itself in {share} bytes and {self._allowed_bytes} are allowed in a world of this size; "
                "advertise fewer addresses (NEXAR_ADVERTISE, NEXAR_IFACE)"
            )


@dataclass(slots=True)
class EarlyJoiner:
    """A node that waits for a place."""

    joiner: JoinConnectionState
    member: Member
    ready: bool = False  # it can be dialed


class EarlyJoiners:
    """Nodes without a place in an elastic cluster that has not formed, in order of arrival.

    Invariant: members and waiting nodes never exceed the maximum world size.
    """

    def __init__(self, size: int, limits: AdmissionLimits) -> None:
        self._size = size
        self._elastic = limits.elastic
        self._most = min(limits.most or MAX_MEMBERS, MAX_MEMBERS)
        self._waiting: dict[NodeId, EarlyJoiner] = {}

    def find(self, node: NodeId) -> JoinConnectionState | None:
        found = self._waiting.get(node)
        return None if found is None else found.joiner

    def admit(self, formation: DraftMembership, joiner: JoinConnectionState, member: Member, rank: Rank | None) -> bool:
        """Whether a candidate got a place; otherwise it waits. Raises Refusal."""
        try:
            formation.admit(member, rank)
        except NoRanksLeft as none_left:
            self._check(none_left, 1)
            self._waiting[member.node] = EarlyJoiner(joiner, member)
            return False
        return True

    def reserve(self, formation: DraftMembership, launcher: PinnedNode, asked: ReserveRanks) -> RankBlock | None:
        """None: the children join without ranks. Raises Refusal."""
        try:
            return formation.reserve(launcher, asked.count, asked.first_rank)
        except NoRanksLeft as none_left:
            self._check(none_left, asked.count)
            return None

    def _check(self, none_left: NoRanksLeft, count: int) -> None:
        # Raises Refusal if `count` more may not wait.
        if not self._elastic:
            raise none_left
        if self._size + len(self._waiting) + count > self._most:
            raise Refusal(
                f"the cluster is formed of {self._size}, {len(self._waiting)} wait to join, and no more than "
                f"{self._most} are allowed; start it with a larger --max (NEXAR_ELASTIC_MAX_WORLD_SIZE)",
                code="full",
            )

    def make_ready(self, joiner: JoinConnectionState) -> bool:
        if joiner.node is None or self.find(joiner.node) is not joiner:
            return False
        self._waiting[joiner.node].ready = True
        return True

    def withdraw(self, joiner: JoinConnectionState) -> None:
        if joiner.node is not None and self.find(joiner.node) is joiner:
            del self._waiting[joiner.node]

    def promote(self, formation: DraftMembership) -> EarlyJoiner | None:
        """Cannot raise Refusal: all but the room was checked on arrival."""
        first = self.take() if formation.has_room else None
        if first is not None:
            formation.admit(first.member, None)
        return first

    def take(self) -> EarlyJoiner | None:
        return self._waiting.pop(next(iter(self._waiting))) if self._waiting else None

    def clear(self) -> tuple[int, ...]:
        connections = tuple(each.joiner.connection for each in self._waiting.values())
        self._waiting.clear()
        return connections


_MAX_CAUSE: Final = 4096  # the last characters of a child's traceback that are logged


class LauncherChildren:
    """Ends of children before the cluster has formed.

    A dead child is not replaced, so formation fails. A child that ended well may never have wanted to join: that is
    known when another rank waits for it.
    """

    def __init__(self, launchers: Mapping[NodeId, JoinConnectionState]) -> None:
        self._launchers = launchers
        self._ended: dict[NodeId, ChildReported] = {}  # by launcher: a child that ended well without joining

    def ended(
        self, formation: DraftMembership, joiner: JoinConnectionState, event: ChildReported, *, others_wait: bool
    ) -> tuple[SeedEvent, bool]:
        """The log entry, and whether formation waits for the child in vain. Raises Refusal for another launcher's
        child.
        """
        if joiner.node is None or self._launchers.get(joiner.node) is not joiner:
            raise Refusal("it reported the end of a child, but is no launcher")
        has_ranks = formation.has_block(joiner.node)
        if has_ranks and not formation.is_child(joiner.node, event.rank):
            raise Refusal(f"it reported rank {event.rank} as its child, which it is not")
        holder = formation.holder(event.rank) if has_ranks else None
        died = SeedEvent("child died", joiner.address, holder, event.rank, event.cause[-_MAX_CAUSE:])
        if has_ranks and event.well and not others_wait:  # perhaps no rank wants to join: then nothing has failed
            self._ended[joiner.node] = event
            return died, False
        return died, has_ranks

    def forget(self, launcher: NodeId) -> None:
        self._ended.pop(launcher, None)

    @property
    def missing(self) -> list[ChildReported]:
        return list(self._ended.values())


class SeedEventMaker(Protocol):
    """Makes a log entry about a connection. A protocol because Callable cannot express the default argument."""

    def __call__(self, kind: SeedEventKind, joiner: JoinConnectionState, reason: str = "") -> SeedEvent: ...


class Forming:
    """Authenticated connections that become members and launchers."""

    def __init__(
        self,
        formation: DraftMembership,
        size: int,
        limits: AdmissionLimits,
        *,
        members: dict[NodeId, JoinConnectionState],
        launchers: dict[NodeId, JoinConnectionState],
        refusals: RefusalLog,
        compatibility: Compatibility,
        note: SeedEventMaker,
    ) -> None:
        """Owns `members` and `launchers` until the formation ends."""
        self.formation: Final = formation
        self.early: Final = EarlyJoiners(size, limits)
        self.complete = False  # all candidates are there and can be dialed
        self.failure = ""  # why the cluster will never form; empty if it may
        self.expired = False  # the time is over: that is the failure
        self.confirming: Final[set[NodeId]] = set()  # candidates that will report when they are connected
        self._size = size
        self._members = members
        self._launchers = launchers
        self._children = LauncherChildren(launchers)
        self._refusals = refusals
        self._compatibility = compatibility
        self._note = note

    def expire(self, timeout: float) -> None:
        self.failure = f"the cluster did not form within {format_seconds(timeout)}"
        self.expired = True

    def join_requested(self, joiner: JoinConnectionState, hello: Hello, event: JoinRequested) -> list[AdmissionAction]:
        """Raises Refusal."""
        asked = event.application
        self._check_new(hello.node, asked.epoch)
        member = requested_member(joiner, hello, asked)
        self._check_size(asked)
        self._check_compatible(joiner, member, event)
        actions = self._admit(joiner, hello, member, asked)
        self._compatibility.add(member, asked, joiner.address)
        if asked.confirms:
            self.confirming.add(member.node)
        return actions

    def _check_size(self, asked: JoinRequest) -> None:
        # Raises Refusal for a rank started for a world of another size.
        if asked.rank is not None and asked.size not in (0, self._size):
            raise Refusal(
                f"rank {asked.rank} was started as one of {asked.size}, and this cluster forms with {self._size}",
                "give the seed and all launchers the same size",
                code="incompatible",
            )

    def _check_compatible(self, joiner: JoinConnectionState, member: Member, event: JoinRequested) -> None:
        # Raises Refusal for an incompatible candidate. If it brings a rank, the formation fails: no other node may have
        # that rank, so all would wait for it in vain.
        try:
            self._compatibility.check(member, event.application, event.clock, joiner.address)
        except Incompatible as why:
            if event.application.rank is not None:
                self.failure = self.failure or why.lines
            raise

    def _admit(
        self, joiner: JoinConnectionState, hello: Hello, member: Member, asked: JoinRequest
    ) -> list[AdmissionAction]:
        admit = AdmitNode(joiner.connection, hello.node, joiner.address, self._size, rank=asked.rank)
        if not self.early.admit(self.formation, joiner, member, asked.rank):
            return [admit, self._note("admitted", joiner, "it waits to join")]
        self._place(joiner, hello.node)
        return [admit, self._note("admitted", joiner)]

    def ready(self, joiner: JoinConnectionState) -> None:
        """Raises Refusal if the candidate has not joined."""
        if self.early.make_ready(joiner):
            return
        if joiner.node is None or self._members.get(joiner.node) is not joiner:
            raise Refusal("it reported that it is ready, but has not joined")
        self.formation.make_ready(joiner.node)
        self.complete = self.formation.is_complete

    def reserved(self, joiner: JoinConnectionState, hello: Hello, asked: ReserveRanks) -> list[AdmissionAction]:
        """Raises Refusal."""
        self._check_new(hello.node, asked.epoch)
        block = self.early.reserve(self.formation, PinnedNode(hello.node, joiner.fingerprint), asked)
        self._launchers[hello.node] = joiner
        admit = AdmitNode(joiner.connection, hello.node, joiner.address, self._size)
        if block is None:
            return [admit, self._note("reserved", joiner, "no ranks yet")]
        admit = msgspec.structs.replace(admit, first_rank=block.first_rank, group_rank=block.group_rank)
        return [admit, self._note("reserved", joiner, f"ranks {block.ranks.start}..{block.ranks.stop - 1}")]

    def child_died(self, joiner: JoinConnectionState, event: ChildReported) -> list[AdmissionAction]:
        """Raises Refusal if it is not the launcher's child."""
        died, is_lost = self._children.ended(self.formation, joiner, event, others_wait=bool(self._members))
        if is_lost:
            self._fail_without(event)
        return [died]

    def withdrawn(self, joiner: JoinConnectionState) -> None:
        if joiner.node is not None and self.early.find(joiner.node) is joiner:
            self._leave(joiner.node)
        self.early.withdraw(joiner)
        for directory in (self._members, self._launchers):
            if joiner.node is not None and directory.get(joiner.node) is joiner:
                del directory[joiner.node]
                self._children.forget(joiner.node)
                self.formation.withdraw(joiner.node)
                self._leave(joiner.node)
        self._promote()

    def _leave(self, node: NodeId) -> None:
        self.confirming.discard(node)
        self._compatibility.remove(node)

    def _place(self, joiner: JoinConnectionState, node: NodeId) -> None:
        # Give the node a place. It now waits, also for children that ended well and will never come.
        self._members[node] = joiner
        for event in self._children.missing:
            self._fail_without(event)

    def _promote(self) -> None:
        while not (self.complete or self.failure) and (first := self.early.promote(self.formation)):
            self._place(first.joiner, first.member.node)
            if first.ready and not self.failure:
                self.ready(first.joiner)

    def _check_new(self, node: NodeId, epoch: int) -> None:
        # Raises Refusal for a node that has joined already and for members of an earlier seed's cluster.
        if epoch:
            raise Refusal("its cluster has formed, and this seed does not know it: it was started without its state")
        present = self._members.get(node) or self._launchers.get(node) or self.early.find(node)
        if present is not None:
            raise Refusal(f"node {format_node(node)} has joined already, from {present.address}")

    def _fail_without(self, event: ChildReported) -> None:
        # No other node may have this rank and the launcher starts no replacement: waiting is in vain.
        if self.failure:
            return
        verb, remedy = ("ended", "; every rank must call nexar.init()") if event.well else ("died", "")
        cause = f"it {verb} before the cluster had formed: {last_line(event.cause)}{remedy}"
        self._refusals.add(f"rank {event.rank}", cause)
        self.failure = f"rank {event.rank} {verb} before the cluster had formed"
