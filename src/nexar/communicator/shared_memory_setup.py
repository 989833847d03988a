"""The ranks of one host, as their arena must know them: who they are, how to wake them, and when they are lost.

The ranks of a new communicator agree whether they share memory, host by host, before its first collective.

All or none: collectives choose their way by facts that must be the same on every rank, and "the ranks of every host
share memory" is one of them. So the ranks of a host first make sure that all pairs of them are linked through memory;
then the first of them makes an arena, the others open it and say whether they could; the firsts of all hosts tell one
another; and each tells its own what came out of it. Where memory cannot be shared, the links serve instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Final

from nexar.cluster.membership import Membership
from nexar.collectives.call_log import CallLog
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.shared_region import SharedRegion
from nexar.collectives.shared_region_layout import PublishedCall, RegionMemory, create_memory, open_memory
from nexar.errors import Cancelled, CollectiveMismatch, NexarError, OperationTimeout
from nexar.group import Group
from nexar.links.messages import collective_tag
from nexar.links.operation import Operation
from nexar.links.sending import MessageHeader
from nexar.topology import FULL_MESH, are_neighbors
from nexar.types import AwaitedPeer, NodeId, Rank
from nexar.wire.frame import Space
from nexar.wire.text import foreign_line


class RegionMembers:
    """See arena.Members."""

    def __init__(self, group: Group, call_log: CallLog, ranks: Sequence[Rank]) -> None:
        """`ranks`: of this host, by their index in the arena."""
        self._group = group
        self._call_log = call_log
        self._ranks = ranks

    def awaited(self, index: int) -> AwaitedPeer:
        """See arena.Members."""
        rank = self._ranks[index]
        return AwaitedPeer(rank=rank, node=self._group.membership.member(rank).node)

    def given_up(self, index: int, operation: str) -> BaseException:
        """See arena.Members. The rank itself says why, to the journal."""
        rank = self._ranks[index]
        return Cancelled(operation=operation, reason=f"rank {rank} has given it up", rank=rank)

    def differs(self, index: int, theirs: Fingerprint, mine: PublishedCall) -> BaseException:
        """See arena.Members. All ranks are told."""
        rank, (sequence, ours) = self._ranks[index], mine
        self._call_log.report_mismatch(sequence, ours, rank, theirs)
        return CollectiveMismatch(expected=ours.describe(), found=theirs.describe(), ranks=[rank], sequence=sequence)

    def wake_calls(self) -> list[Callable[[], None]]:
        """By index; one's own does nothing."""
        links = self._group.links()
        found = [links[rank].wake_peer if rank in links else None for rank in self._ranks]
        return [each or _nobody for each in found]

    def watch(self, region: SharedRegion) -> Callable[[], None]:
        """Fail it when one of them is lost. Returns what ends the watch."""
        nodes = {self._group.membership.member(rank).node for rank in self._ranks}

        def lost(node: NodeId, error: NexarError) -> None:
            if node in nodes:
                region.fail(error)

        return self._group.router.on_peer_lost(lost)


def _nobody() -> None:
    """Oneself is awake."""


_log = logging.getLogger(__name__)

MAX_SHARING: Final = 8
"""Ranks of a host, and hosts: all pairs of a host must be linked, and the first ranks of all hosts, before the first
collective; in larger worlds that would cost more than it gives.
"""
_SEQUENCE: Final = (1 << 64) - 1  # no collective ever has this number
_HELLO, _INVITE, _ANSWER, _HOSTS, _VERDICT = range(5)
_FINE: Final = b"+"
_LONGEST: Final = 1000  # bytes of what others say that is logged
_NAME: Final = "making the communicator"
_MISSING: Final = "its part in it: it has not made the same init, split or group, or it waits for another rank itself"


def may_share(membership: Membership, topology: str = FULL_MESH) -> bool:
    """Is it worth trying? Pure, so that all ranks come to the same answer without a word. `topology`: of these ranks,
    where it is known; those of a host share memory only if all of them are neighbours.
    """
    most = max(len(membership.ranks_on(host)) for host in membership.hosts)
    if most == 1 or not all("shm" in each.capabilities for each in membership.members):
        return False
    if most > MAX_SHARING or len(membership.hosts) > MAX_SHARING:
        _log.info(
            "collectives use links, not shared memory: up to %d hosts with %d ranks each can share it",
            MAX_SHARING,
            MAX_SHARING,
        )
        return False
    return topology == FULL_MESH or all(_are_neighbours(membership, host, topology) for host in membership.hosts)


def _are_neighbours(membership: Membership, host: str, topology: str) -> bool:
    """All ranks of a host of one another."""
    ranks, size = membership.ranks_on(host), membership.size
    return all(are_neighbors(topology, size, *pair) for pair in combinations(ranks, 2))


class SharedMemorySetup:
    """The set-up of one communicator, at one rank."""

    def __init__(self, group: Group, deadline: float) -> None:
        self._group = group
        self._deadline = deadline
        membership = group.membership
        self._local = group.local_ranks
        self._others = [rank for rank in self._local if rank != group.rank]
        self._firsts = [membership.ranks_on(host)[0] for host in membership.hosts]
        self._memory: RegionMemory | None = None
        self._region: SharedRegion | None = None
        self._unwatch: Callable[[], None] | None = None
        self.shared = False
        """The ranks of every host share memory: the same on all ranks, once they have agreed."""

    def agree(self, call_log: CallLog) -> SharedRegion | None:
        """The arena; None on every rank if any host cannot have one. A host with a single rank needs none, and has
        none: `shared` tells the difference. Close the sharing when the communicator ends.
        """
        try:
            reason = self._try()
            self.shared = self._decide(reason)
        except BaseException:
            self.close()
            raise
        if not self.shared or self._memory is None:
            self.close()
            return None
        self._memory.close_door()
        return self._make(call_log, self._memory)

    def _try(self) -> str:
        """What keeps the ranks of this host from sharing memory, as the first of them knows; empty: nothing."""
        if not self._others:
            return ""
        self._group.open_links(self._others, self._deadline)
        self._tell(self._others, _HELLO, b"")
        self._hear(self._others, _HELLO)
        reason = self._missing_link()
        if self._group.rank == self._local[0]:
            return self._invite(reason)
        (offer,) = self._hear([self._local[0]], _INVITE)
        self._tell([self._local[0]], _ANSWER, (reason or self._open(offer)).encode())
        return ""

    def _missing_link(self) -> str:
        links = self._group.links()
        bare = [rank for rank in self._others if rank not in links or "shm" not in links[rank].schemes]
        return f"ranks {bare} are linked to rank {self._group.rank} through the network only" if bare else ""

    def _invite(self, reason: str) -> str:
        offer = ""
        if not reason:
            try:
                self._memory = create_memory(len(self._local))
                offer = self._memory.offer
            except OSError as error:
                reason = str(error)
        self._tell(self._others, _INVITE, offer.encode())
        answers = [answer.decode(errors="replace") for answer in self._hear(self._others, _ANSWER)]
        return reason or next(filter(None, answers), "")

    def _open(self, offer: bytes) -> str:
        if not offer:
            return "the first rank of this host could not make it"
        try:
            self._memory = open_memory(offer.decode(), len(self._local))
        except (OSError, ValueError) as error:
            return f"rank {self._group.rank}: {error}"
        return ""

    def _decide(self, reason: str) -> bool:
        """The same on every rank."""
        first = self._local[0]
        if self._group.rank != first:
            (verdict,) = self._hear([first], _VERDICT)
        else:
            mine = reason.encode() or _FINE
            others = [rank for rank in self._firsts if rank != first]
            self._tell(others, _HOSTS, mine)
            verdicts = [mine, *self._hear(others, _HOSTS)]
            verdict = next((each for each in verdicts if each != _FINE), _FINE)
            self._tell(self._others, _VERDICT, verdict)
        if verdict != _FINE:
            text = foreign_line(verdict[:_LONGEST].decode(errors="replace"))
            _log.info("collectives do not use shared memory, the links serve instead: %s", text)
        return verdict == _FINE

    def _make(self, call_log: CallLog, memory: RegionMemory) -> SharedRegion:
        group = self._group
        housemates = RegionMembers(group, call_log, self._local)
        region = SharedRegion(
            group.progress, memory, self._local.index(group.rank), housemates, housemates.wake_calls()
        )
        self._region = region
        self._unwatch = housemates.watch(region)
        return region

    def close(self) -> None:
        """Idempotent."""
        if self._unwatch is not None:
            self._unwatch()
        if self._region is not None:
            self._region.close()
        elif self._memory is not None:
            self._memory.close()

    # -- words -------------------------------------------------------------------------------------------

    def _tell(self, ranks: Iterable[Rank], step: int, text: bytes) -> None:
        about = MessageHeader(space=Space.COLLECTIVE, sequence=_SEQUENCE, step=step)
        sent: list[Operation] = [
            self._group.post_send(rank, memoryview(text), self._deadline, about=about) for rank in ranks
        ]
        self._wait(sent)

    def _hear(self, ranks: Iterable[Rank], step: int) -> list[bytes]:
        tag = collective_tag(_SEQUENCE, step)
        posted = [self._group.post_receive(rank, None, space=Space.COLLECTIVE, tag=tag) for rank in ranks]
        self._wait(posted)
        return [bytes(receive.into or b"") for receive in posted]

    def _wait(self, operations: Sequence[Operation]) -> None:
        """As for every operation; but the user has heard of no such message, only of the call that needs it."""
        try:
            self._group.wait(operations, self._deadline)
        except OperationTimeout as late:
            found = late.waiting_for
            waiting = found if isinstance(found, str) else [replace(peer, missing=_MISSING) for peer in found]
            raise OperationTimeout(operation=_NAME, waiting_for=waiting, timeout=late.timeout) from late
