"""Set-up of the shared region: the ranks of a new communicator agree whether they share memory.

All hosts share memory or none: the algorithm depends on it and must be the same on every rank. On each host all pairs
must be linked through shared memory; the first rank creates a region, the others open it and report. The hosts' first
ranks exchange the results and announce the decision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Final

from nexar.cluster.membership import Membership
from nexar.collectives.call_log import CallLog
from nexar.collectives.executor import Run
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.shared_region import SharedRegion
from nexar.collectives.shared_region_layout import PublishedCall, RegionMemory, create_memory, open_memory
from nexar.errors import Cancelled, CollectiveMismatch, NexarError
from nexar.group import Group
from nexar.links.carrier_selection import shares_memory
from nexar.links.messages import collective_tag
from nexar.links.operation import Operation, cancelling
from nexar.links.sending import MessageHeader
from nexar.topology import FULL_MESH, are_neighbors
from nexar.types import AwaitedPeer, NodeId, Rank
from nexar.wire.frame import Space
from nexar.wire.text import foreign_line

_log = logging.getLogger(__name__)


class RegionMembers:
    """RegionPeers of one host."""

    def __init__(self, group: Group, call_log: CallLog, ranks: Sequence[Rank]) -> None:
        self._group = group
        self._call_log = call_log
        self._ranks = ranks

    def awaited(self, index: int) -> AwaitedPeer:
        rank = self._ranks[index]
        return AwaitedPeer(rank=rank, node=self._group.membership.member(rank).node)

    def aborted(self, index: int, operation: str) -> BaseException:
        """Without the reason, which that rank sends to the call log."""
        rank = self._ranks[index]
        return Cancelled(operation=operation, reason=f"rank {rank} has given it up", rank=rank)

    def differs(self, index: int, theirs: Fingerprint, mine: PublishedCall) -> BaseException:
        rank, (sequence, ours) = self._ranks[index], mine
        self._call_log.report_mismatch(sequence, ours, rank, theirs)
        return CollectiveMismatch(expected=ours.describe(), found=theirs.describe(), ranks=[rank], sequence=sequence)

    def wake_calls(self) -> list[Callable[[], None]]:
        links = self._group.links()
        found = [links[rank].wake_peer if rank in links else None for rank in self._ranks]
        return [each or _ignore for each in found]

    def watch(self, region: SharedRegion) -> Callable[[], None]:
        """Fail the region when a rank is lost. Returns the function that stops watching."""
        nodes = {self._group.membership.member(rank).node for rank in self._ranks}

        def lost(node: NodeId, error: NexarError) -> None:
            if node in nodes:
                region.fail(error)

        return self._group.router.on_peer_lost(lost)


def _ignore() -> None: ...


# Ranks per host, and hosts. All pairs of a host and the first ranks of all hosts must be linked before the first
# collective, which costs more than it gives in larger worlds.
MAX_SHARING: Final = 8
_SEQUENCE: Final = (1 << 64) - 1  # no collective has this number
_HELLO, _OFFER, _ANSWER, _HOSTS, _DECISION = range(5)
_OK: Final = b"+"
_LONGEST: Final = 1000  # bytes of another rank's text in the log


def may_share(membership: Membership, topology: str = FULL_MESH) -> bool:
    """Pure, so all ranks agree without messages. All pairs of a host must be neighbours in `topology` (FULL_MESH if
    unknown).
    """
    most = max(len(membership.ranks_on(host)) for host in membership.hosts)
    if most == 1 or not all(shares_memory(each.capabilities) for each in membership.members):
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
    ranks, size = membership.ranks_on(host), membership.size
    return all(are_neighbors(topology, size, *pair) for pair in combinations(ranks, 2))


class SharedMemorySetup:
    """Set-up of one communicator at one rank."""

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
        # The ranks of every host share memory. The same on all ranks after `agree`.
        self.shared = False

    def agree(self, call_log: CallLog) -> Run:
        """The run returns the region, or None on every rank if a host cannot have one. A host's only rank always gets
        None, and reads the decision in `shared`. Close this object when the communicator ends.
        """
        try:
            reason = (yield from self._try()) if self._others else ""
            self.shared = yield from self._decide(reason)
        except BaseException:
            self.close()
            raise
        if not self.shared or self._memory is None:
            self.close()
            return None
        self._memory.close_descriptor()
        return self._make(call_log, self._memory)

    def _try(self) -> Run:
        """On the first rank, the run returns why this host cannot share memory; empty: it can."""
        yield (self._group.post_open(self._others, self._deadline),)
        first = self._local[0]
        if self._group.rank == first:
            return (yield from self._offer())
        hello = self._post_sends(self._others, _HELLO, b"")
        *_, offer = yield from self._receive([*((rank, _HELLO) for rank in self._others), (first, _OFFER)], hello)
        answer = (self._missing_link() or self._open(offer)).encode()
        yield self._post_sends([first], _ANSWER, answer)
        return ""

    def _missing_link(self) -> str:
        links = self._group.links()
        unlinked = [rank for rank in self._others if rank not in links or not shares_memory(links[rank].schemes)]
        return f"ranks {unlinked} are linked to rank {self._group.rank} through the network only" if unlinked else ""

    def _offer(self) -> Run:
        """Offers before the others' hello, which saves a round; checks the links after it."""
        reason = offer = ""
        hello = self._post_sends(self._others, _HELLO, b"")  # first: allocating takes milliseconds
        try:
            self._memory = create_memory(len(self._local))
            offer = self._memory.offer
        except OSError as error:
            reason = str(error)
        sent = [*hello, *self._post_sends(self._others, _OFFER, offer.encode())]
        yield from self._receive([(rank, _HELLO) for rank in self._others], sent)
        answers = yield from self._receive([(rank, _ANSWER) for rank in self._others])
        found = (answer.decode(errors="replace") for answer in answers)
        return reason or self._missing_link() or next(filter(None, found), "")

    def _open(self, offer: bytes) -> str:
        if not offer:
            return "the first rank of this host could not make it"
        try:
            self._memory = open_memory(offer.decode(), len(self._local))
        except (OSError, ValueError) as error:
            return f"rank {self._group.rank}: {error}"
        return ""

    def _decide(self, reason: str) -> Run:
        first = self._local[0]
        if self._group.rank != first:
            (decision,) = yield from self._receive([(first, _DECISION)])
        else:
            mine = reason.encode() or _OK
            others = [rank for rank in self._firsts if rank != first]
            yield (self._group.post_open(others, self._deadline),)
            sent = self._post_sends(others, _HOSTS, mine)
            decisions = [mine, *(yield from self._receive([(rank, _HOSTS) for rank in others], sent))]
            decision = next((each for each in decisions if each != _OK), _OK)
            yield self._post_sends(self._others, _DECISION, decision)
        if decision != _OK:
            text = foreign_line(decision[:_LONGEST].decode(errors="replace"))
            _log.info("collectives use links, not shared memory: %s", text)
        return decision == _OK

    def _make(self, call_log: CallLog, memory: RegionMemory) -> SharedRegion:
        group = self._group
        members = RegionMembers(group, call_log, self._local)
        region = SharedRegion(group.progress, memory, self._local.index(group.rank), members, members.wake_calls())
        self._region = region
        self._unwatch = members.watch(region)
        return region

    def close(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
        if self._region is not None:
            self._region.close()
        elif self._memory is not None:
            self._memory.close()

    # -- messages ----------------------------------------------------------------------------------------

    def _post_sends(self, ranks: Iterable[Rank], step: int, text: bytes) -> list[Operation]:
        """The links must be open."""
        about = MessageHeader(space=Space.COLLECTIVE, sequence=_SEQUENCE, step=step)
        return [self._group.post_send(rank, memoryview(text), self._deadline, about=about) for rank in ranks]

    def _receive(self, steps: Iterable[tuple[Rank, int]], sent: Sequence[Operation] = ()) -> Run:
        """The run returns these messages, once `sent` is done too."""
        posted = [
            self._group.post_receive(rank, None, space=Space.COLLECTIVE, tag=collective_tag(_SEQUENCE, step))
            for rank, step in steps
        ]
        with cancelling(posted):
            yield *sent, *posted
        return [bytes(receive.into or b"") for receive in posted]
