"""A membership in the making: who has been let in so far, and what was promised to them. Pure.

Admission decides whether somebody may come in at all; here it is decided whether there is a place, and, when everybody
is there, which one it is.

Who comes to an elastic cluster before it has formed, and finds every place promised. Pure.

It is let in and waits: for a place that becomes free again, or for the members, who take it at a checkpoint like any
other joiner. Law: members and all who wait are never more than the largest world that is allowed.

What launchers say of their children before the cluster has formed. Pure.

A child that has died is not replaced, so the formation waits in vain for its rank. One that ended well may never have
wanted to come: that is known only when somebody else waits for it.

The seed's mind while a cluster forms: who has a place, who waits for one, and for whom all wait in vain. Pure.

It ends once: `complete`, when all places are taken by candidates that can be dialed, or with a `failure`, when a rank
will never come, or not in time. Admission, which asks it, sees to what follows. Until then everything here can be taken
back: who goes leaves its place to who waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, Protocol

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
    """Candidates and launchers of a cluster that is not yet complete. Each node comes in once."""

    def __init__(self, cluster: str, size: int, seed: PinnedNode | None) -> None:
        self._cluster = cluster
        self._seed = seed
        self._allocator = RankAllocator(size)
        self._allowed_bytes = allowed_share_bytes(size)
        self._candidates: dict[NodeId, Member] = {}  # in the order of arrival, like the launchers
        self._launchers: dict[NodeId, PinnedNode] = {}
        self._ready: set[NodeId] = set()  # candidates that show their certificate

    @property
    def is_complete(self) -> bool:
        """Everybody is there, and can be dialed."""
        return self._allocator.is_full and len(self._ready) == len(self._candidates)

    def admit(self, member: Member, rank: Rank | None) -> None:
        """A candidate, with the rank it brought. Refusal if there is no place for it, or not that one."""
        self._check_name(member.node)
        self._check_share(member)
        self._allocator.claim(member.node, rank, member.launcher)
        self._candidates[member.node] = member

    def make_ready(self, node: NodeId) -> None:
        """A candidate that was admitted can be dialed from now on."""
        self._ready.add(node)

    def flaw_of(self, node: NodeId) -> str:
        """What keeps a candidate that was let in from being a member, in brackets; empty: nothing does."""
        return "" if node in self._ready else " (let in, but not ready)"

    def reserve(self, launcher: PinnedNode, count: int, first_rank: Rank | None) -> RankBlock:
        """A block of ranks for the children of this launcher. Refusal if it fits nowhere, or not there."""
        self._check_name(launcher.node)
        block = self._allocator.reserve(launcher.node, count, first_rank)
        self._launchers[launcher.node] = launcher
        return block

    @property
    def has_room(self) -> bool:
        """Whether a candidate without a wish finds a place."""
        return self._allocator.left > 0

    def withdraw(self, node: NodeId) -> None:
        """A candidate or launcher is gone, and what it had claimed is free. A launcher may have claimed nothing."""
        if self._launchers.pop(node, None) is not None:
            self._allocator.release(node)
        elif node in self._candidates:
            del self._candidates[node]
            self._ready.discard(node)
            self._allocator.give_up(node)

    def make_membership(self) -> Membership:
        """The first one, once everybody is there."""
        order = self._allocator.assign((node, member.host) for node, member in self._candidates.items())
        members = tuple(self._candidates[node] for node in order)
        return Membership(self._cluster, _FIRST_EPOCH, members, tuple(self._launchers.values()), self._seed)

    def missing(self, most: int) -> tuple[Rank, ...]:
        """The lowest ranks that no candidate holds; none of them where a candidate waits for any rank."""
        if any(self._allocator.rank_of(node) is None for node in self._candidates):
            return ()
        free = (rank for rank in range(self._allocator.size) if self._allocator.holder(rank) is None)
        return tuple(islice(free, most))

    def is_first(self, node: NodeId) -> bool:
        """Whether this candidate was the first of its host, of those that are here."""
        member = self._candidates.get(node)
        others = (each for each in self._candidates.values() if member is not None and each.host == member.host)
        first = next(others, None)
        return first is not None and first.node == node

    def rank_of(self, node: NodeId) -> Rank | None:
        """The rank this candidate will have, if that is settled."""
        return self._allocator.rank_of(node)

    def holder(self, rank: Rank) -> NodeId | None:
        """The candidate that will have this rank, if that is settled."""
        return self._allocator.holder(rank)

    def has_block(self, launcher: NodeId) -> bool:
        """Whether ranks are reserved for the children of this launcher."""
        return self._allocator.block_of(launcher) is not None

    def ranks_of(self, launcher: NodeId) -> range:
        """The ranks that are reserved for the children of this launcher."""
        block = self._allocator.block_of(launcher)
        return range(0) if block is None else block.ranks

    def is_child(self, launcher: NodeId, rank: Rank) -> bool:
        """Whether the launcher has reserved this rank."""
        return rank in self.ranks_of(launcher)

    def _check_name(self, node: NodeId) -> None:
        if self._seed is not None and node == self._seed.node:
            raise Refusal(f"node {format_node(node)} is the seed")

    def _check_share(self, member: Member) -> None:
        """Whoever is let in must not make the membership too large to be sent to everybody else."""
        share = share_bytes(member)
        if share > self._allowed_bytes:
            raise Refusal(
                f"it describes itself in {share} bytes and {self._allowed_bytes} are allowed in a world of this size; "
                "advertise fewer addresses (NEXAR_ADVERTISE, NEXAR_IFACE)"
            )


@dataclass(slots=True)
class EarlyJoiner:
    """One of them."""

    joiner: JoinConnectionState
    member: Member
    ready: bool = False
    """It can be dialed."""


class EarlyJoiners:
    """In the order in which they came."""

    def __init__(self, size: int, limits: AdmissionLimits) -> None:
        """Of a cluster that is formed of `size`."""
        self._size = size
        self._elastic = limits.elastic
        self._most = min(limits.most or MAX_MEMBERS, MAX_MEMBERS)
        self._waiting: dict[NodeId, EarlyJoiner] = {}

    def find(self, node: NodeId) -> JoinConnectionState | None:
        """The connection of one of them."""
        found = self._waiting.get(node)
        return None if found is None else found.joiner

    def admit(self, formation: DraftMembership, joiner: JoinConnectionState, member: Member, rank: Rank | None) -> bool:
        """A candidate: whether it has a place; else it waits. Refusal if it may not, or something else is wrong."""
        try:
            formation.admit(member, rank)
        except NoRanksLeft as none_left:
            self._check(none_left, 1)
            self._waiting[member.node] = EarlyJoiner(joiner, member)
            return False
        return True

    def reserve(self, formation: DraftMembership, launcher: PinnedNode, asked: ReserveRanks) -> RankBlock | None:
        """A block of ranks; None: its children will be joiners, without ranks. Refusal as above."""
        try:
            return formation.reserve(launcher, asked.count, asked.first_rank)
        except NoRanksLeft as none_left:
            self._check(none_left, asked.count)
            return None

    def _check(self, none_left: NoRanksLeft, count: int) -> None:
        """Whether so many more may wait."""
        if not self._elastic:
            raise none_left
        if self._size + len(self._waiting) + count > self._most:
            raise Refusal(
                f"the cluster is formed of {self._size}, {len(self._waiting)} wait to come in, and no more than "
                f"{self._most} are allowed; start it with a larger --max (NEXAR_ELASTIC_MAX_WORLD_SIZE)"
            )

    def make_ready(self, joiner: JoinConnectionState) -> bool:
        """It can be dialed from now on. False: it is none of them."""
        if joiner.node is None or self.find(joiner.node) is not joiner:
            return False
        self._waiting[joiner.node].ready = True
        return True

    def withdraw(self, joiner: JoinConnectionState) -> None:
        """Its connection has ended. Nothing happens if it is none of them."""
        if joiner.node is not None and self.find(joiner.node) is joiner:
            del self._waiting[joiner.node]

    def promote(self, formation: DraftMembership) -> EarlyJoiner | None:
        """The first has a place now, if one is free; None: nobody waits, or for no place. It is refused no more: all
        but the want of room was found to be right when it came.
        """
        first = self.take() if formation.has_room else None
        if first is not None:
            formation.admit(first.member, None)
        return first

    def take(self) -> EarlyJoiner | None:
        """The first does not wait any more; None: nobody does."""
        return self._waiting.pop(next(iter(self._waiting))) if self._waiting else None

    def clear(self) -> tuple[int, ...]:
        """Nobody waits any more. Their connections."""
        connections = tuple(each.joiner.connection for each in self._waiting.values())
        self._waiting.clear()
        return connections


_MAX_CAUSE: Final = 4096  # characters of a child's traceback that are noted, the last ones


class LauncherChildren:
    """Of all launchers."""

    def __init__(self, launchers: Mapping[NodeId, JoinConnectionState]) -> None:
        """`launchers`: those that are connected."""
        self._launchers = launchers
        self._ended: dict[NodeId, ChildReported] = {}  # by launcher: a child that ended well and had never come

    def ended(
        self, formation: DraftMembership, joiner: JoinConnectionState, event: ChildReported, *, somebody_waits: bool
    ) -> tuple[SeedEvent, bool]:
        """What is to be noted of the end of a child, and whether the formation waits for it in vain. Refusal if it is
        not this guest's. Children without ranks are not waited for.
        """
        if joiner.node is None or self._launchers.get(joiner.node) is not joiner:
            raise Refusal("it reported the end of a child, and is no launcher")
        has_ranks = formation.has_block(joiner.node)
        if has_ranks and not formation.is_child(joiner.node, event.rank):
            raise Refusal(f"it reported rank {event.rank} as its child, which it is not")
        holder = formation.holder(event.rank) if has_ranks else None
        died = SeedEvent("child died", joiner.address, holder, event.rank, event.cause[-_MAX_CAUSE:])
        if has_ranks and event.well and not somebody_waits:  # perhaps none wants to come: then nothing has failed
            self._ended[joiner.node] = event
            return died, False
        return died, has_ranks

    def forget(self, launcher: NodeId) -> None:
        """Its launcher is gone. Idempotent."""
        self._ended.pop(launcher, None)

    @property
    def missing(self) -> list[ChildReported]:
        """Those that ended well when nobody waited for them."""
        return list(self._ended.values())


class SeedEventMaker(Protocol):
    """What makes a note of a guest, with all that is known of it."""

    def __call__(self, kind: SeedEventKind, joiner: JoinConnectionState, reason: str = "") -> SeedEvent:
        """See Note."""


class Forming:
    """Guests that have proven themselves, on their way to be members and launchers."""

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
        """`members` and `launchers` are those that are in, by node: written here until it ends."""
        self.formation: Final = formation
        self.early: Final = EarlyJoiners(size, limits)
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
        self._children = LauncherChildren(launchers)
        self._refusals = refusals
        self._compatibility = compatibility
        self._note = note

    def expire(self, timeout: float) -> None:
        """Its time is over."""
        self.failure = f"the cluster did not form within {format_seconds(timeout)}"
        self.expired = True

    def applied(self, joiner: JoinConnectionState, hello: Hello, event: JoinRequested) -> list[AdmissionAction]:
        """A candidate. Refusal."""
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
        """Refusal for who was started as a rank of a world of another size."""
        if asked.rank is not None and asked.size not in (0, self._size):
            raise Refusal(
                f"rank {asked.rank} was started as one of {asked.size}, and this cluster forms with {self._size}",
                "give the seed and all launchers the same size",
            )

    def _check_compatible(self, joiner: JoinConnectionState, member: Member, event: JoinRequested) -> None:
        """Refusal for who cannot work with those that are in. Nobody else may have a rank that was given to it, so all
        would wait for that rank in vain: then the cluster does not form.
        """
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
            return [admit, self._note("admitted", joiner, "it waits to come in")]
        self._seat(joiner, hello.node)
        return [admit, self._note("admitted", joiner)]

    def ready(self, joiner: JoinConnectionState) -> None:
        """It can be dialed. Refusal for who has not joined."""
        if self.early.make_ready(joiner):
            return
        if joiner.node is None or self._members.get(joiner.node) is not joiner:
            raise Refusal("it said that it is ready, and has not joined")
        self.formation.make_ready(joiner.node)
        self.complete = self.formation.is_complete

    def reserved(self, joiner: JoinConnectionState, hello: Hello, asked: ReserveRanks) -> list[AdmissionAction]:
        """A launcher. Refusal."""
        self._check_new(hello.node, asked.epoch)
        block = self.early.reserve(self.formation, PinnedNode(hello.node, joiner.fingerprint), asked)
        self._launchers[hello.node] = joiner
        admit = AdmitNode(joiner.connection, hello.node, joiner.address, self._size)
        if block is None:
            return [admit, self._note("reserved", joiner, "no ranks yet")]
        admit = replace(admit, first_rank=block.first_rank, group_rank=block.group_rank)
        return [admit, self._note("reserved", joiner, f"ranks {block.ranks.start}..{block.ranks.stop - 1}")]

    def child_died(self, joiner: JoinConnectionState, event: ChildReported) -> list[AdmissionAction]:
        """A launcher tells of the end of a child. Refusal if it is not its."""
        died, in_vain = self._children.ended(self.formation, joiner, event, somebody_waits=bool(self._members))
        if in_vain:
            self._fail_without(event)
        return [died]

    def withdrawn(self, joiner: JoinConnectionState) -> None:
        """Its connection has ended: what its node has claimed is free again, for who waits."""
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

    def _seat(self, joiner: JoinConnectionState, node: NodeId) -> None:
        """It has a place, and waits: also for children that ended well, and will never come."""
        self._members[node] = joiner
        for event in self._children.missing:
            self._fail_without(event)

    def _promote(self) -> None:
        """As many as places have become free do not wait any more."""
        while not (self.complete or self.failure) and (first := self.early.promote(self.formation)):
            self._seat(first.joiner, first.member.node)
            if first.ready and not self.failure:
                self.ready(first.joiner)

    def _check_new(self, node: NodeId, epoch: int) -> None:
        """Refusal for who has come already, and for members of the cluster of a seed that was here before."""
        if epoch:
            raise Refusal("its cluster has formed, and this seed does not know it: it was started without its state")
        present = self._members.get(node) or self._launchers.get(node) or self.early.find(node)
        if present is not None:
            raise Refusal(f"node {format_node(node)} has joined already, from {present.address}")

    def _fail_without(self, event: ChildReported) -> None:
        """Nobody else may have its rank, and its launcher starts nobody in its place: waiting would be in vain."""
        if self.failure:
            return
        verb, remedy = ("ended", "; every rank must call nexar.init()") if event.well else ("died", "")
        cause = f"it {verb} before the cluster had formed: {last_line(event.cause)}{remedy}"
        self._refusals.add(f"rank {event.rank}", cause)
        self.failure = f"rank {event.rank} {verb} before the cluster had formed"
