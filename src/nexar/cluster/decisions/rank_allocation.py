"""Allocation of ranks to candidates and launchers. Pure.

Invariant: places left = free ranks − candidates that wait for any rank. A claim is granted only while enough are left,
so every admitted candidate finds a place and the ranks are dense when the world is full.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nexar.cluster.decisions.refusals import NoRanksLeft, Refusal
from nexar.errors import InternalError
from nexar.types import NodeId, Rank, format_node


class FreeRanks:
    """Ordered runs that never touch. Ranks are mostly taken from the bottom and in blocks, so runs are few."""

    def __init__(self, size: int) -> None:
        self._starts: list[Rank] = [0] if size else []
        self._ends: list[Rank] = [size] if size else []  # one past the last of each run
        self.count = size  # free ranks

    def __iter__(self) -> Iterator[Rank]:
        for start, end in zip(self._starts, self._ends, strict=True):
            yield from range(start, end)

    def are_free(self, first: Rank, count: int = 1) -> bool:
        run = bisect_right(self._starts, first) - 1
        return run >= 0 and first + count <= self._ends[run]

    def lowest(self, count: int) -> Rank | None:
        for start, end in zip(self._starts, self._ends, strict=True):
            if end - start >= count:
                return start
        return None

    def take(self, first: Rank, count: int = 1) -> None:
        """Raises ValueError if one is not free."""
        run = bisect_right(self._starts, first) - 1
        if run < 0 or first + count > self._ends[run]:
            raise ValueError(f"ranks {first}..{first + count - 1} are not all free")
        start, end = self._starts[run], self._ends[run]
        rest = [part for part in ((start, first), (first + count, end)) if part[0] < part[1]]
        self._starts[run : run + 1] = [part[0] for part in rest]
        self._ends[run : run + 1] = [part[1] for part in rest]
        self.count -= count

    def give_back(self, rank: Rank) -> None:
        """Raises ValueError if it is free."""
        after = bisect_right(self._starts, rank)
        if after and self._ends[after - 1] > rank:
            raise ValueError(f"rank {rank} is free already")
        joins_before = after > 0 and self._ends[after - 1] == rank
        joins_after = after < len(self._starts) and self._starts[after] == rank + 1
        first, last = after - joins_before, after + joins_after
        start = self._starts[first] if joins_before else rank
        end = self._ends[last - 1] if joins_after else rank + 1
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        self.count += 1


@dataclass(frozen=True, slots=True)
class RankBlock:
    """Ranks reserved for the children of one launcher."""

    first_rank: Rank
    count: int
    group_rank: int  # The lowest number that no other launcher had: 0, 1, … in order of reservation.

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.count)


class RankAllocator:
    """Grants a block that a launcher reserves for its children, a rank that a candidate brings, or any rank, settled
    when all candidates are there.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = FreeRanks(size)
        self._holders: dict[Rank, NodeId] = {}
        self._claims: dict[NodeId, Rank | None] = {}
        self._unplaced = 0  # claims that are None
        self._blocks: dict[NodeId, RankBlock] = {}
        self._returned_groups: list[int] = []  # a heap: unused numbers below len(blocks) + len(this)
        self._children: dict[NodeId, NodeId] = {}  # node → launcher whose block its rank comes from

    @property
    def left(self) -> int:
        return self._free.count - self._unplaced

    @property
    def has_unplaced(self) -> bool:
        """Whether a candidate waits for any rank."""
        return self._unplaced > 0

    @property
    def is_full(self) -> bool:
        return len(self._claims) == self.size

    def block_of(self, launcher: NodeId) -> RankBlock | None:
        return self._blocks.get(launcher)

    def rank_of(self, node: NodeId) -> Rank | None:
        return self._claims.get(node)

    def holder(self, rank: Rank) -> NodeId | None:
        return self._holders.get(rank)

    def claim(self, node: NodeId, rank: Rank | None, launcher: NodeId) -> None:
        """Raises Refusal."""
        block = self._blocks.get(launcher)
        if rank is not None and block is not None:
            self._claim_from_block(node, rank, launcher, block)
        elif rank is not None:
            self._claim_rank(node, rank)
        else:
            self._claim_any(node)
        self._claims[node] = rank

    def _claim_from_block(self, node: NodeId, rank: Rank, launcher: NodeId, block: RankBlock) -> None:
        if rank not in block.ranks:
            raise Refusal(f"rank {rank} is outside the ranks {_span(block.ranks)} that its launcher has reserved")
        if rank in self._holders:
            raise Refusal(self._why_taken(rank))
        self._holders[rank] = node
        self._children[node] = launcher

    def _claim_rank(self, node: NodeId, rank: Rank) -> None:
        if rank >= self.size:
            raise Refusal(f"rank {rank} is outside 0..{self.size - 1}: the cluster is formed of {self.size}")
        if not self._free.are_free(rank):
            raise Refusal(self._why_taken(rank))
        self._need(1)
        self._free.take(rank)
        self._holders[rank] = node

    def _claim_any(self, node: NodeId) -> None:
        self._need(1)
        self._unplaced += 1

    def give_up(self, node: NodeId) -> None:
        rank = self._claims.pop(node)
        launcher = self._children.pop(node, None)
        if rank is None:
            self._unplaced -= 1
            return
        del self._holders[rank]
        if launcher is None:
            self._free.give_back(rank)

    def reserve(self, launcher: NodeId, count: int, first_rank: Rank | None) -> RankBlock:
        """A block at `first_rank`, or at the lowest place where it fits. Raises Refusal."""
        self._need(count)
        start = self._free.lowest(count) if first_rank is None else first_rank
        if start is None:
            raise NoRanksLeft(f"no {count} neighbouring ranks are left of {self.size}")
        if start + count > self.size:
            raise Refusal(
                f"the ranks {_span(range(start, start + count))} are not all in 0..{self.size - 1}; choose a lower "
                "first rank, or start the seed with a larger size"
            )
        if not self._free.are_free(start, count):
            raise Refusal(self._first_taken(range(start, start + count)))
        self._free.take(start, count)
        self._blocks[launcher] = RankBlock(start, count, self._next_group())
        return self._blocks[launcher]

    def release(self, launcher: NodeId) -> None:
        """Children keep the ranks they hold."""
        block = self._blocks.pop(launcher)
        heapq.heappush(self._returned_groups, block.group_rank)
        for rank in block.ranks:
            child = self._holders.get(rank)
            if child is None:
                self._free.give_back(rank)
            else:
                del self._children[child]

    def assign(self, arrivals: Iterable[tuple[NodeId, str]]) -> list[NodeId]:
        """The nodes by rank. `arrivals`: node and host in order. Claimed ranks stay; the others go to hosts by first
        arrival, so that ranks of one host are neighbours.
        """
        if not self.is_full:
            raise InternalError(f"ranks were assigned when {len(self._claims)} of {self.size} were there")
        waiting = iter(_by_host(arrivals))
        free = iter(self._free)
        holders = dict(self._holders)
        holders |= {next(free): node for node in waiting if self._claims[node] is None}
        return [holders[rank] for rank in range(self.size)]

    def _need(self, count: int) -> None:
        if self.left == 0:
            raise NoRanksLeft(f"all {self.size} places are taken or reserved; start the seed with a larger size")
        if count > self.left:
            raise NoRanksLeft(
                f"{count} places were asked for, {self.left} are left of {self.size}; start fewer ranks, or the seed "
                "with a larger size"
            )

    def _next_group(self) -> int:
        # All numbers below the group count are in use or returned, so the count is the next new one.
        return heapq.heappop(self._returned_groups) if self._returned_groups else len(self._blocks)

    def _first_taken(self, ranks: range) -> str:
        return self._why_taken(next(rank for rank in ranks if not self._free.are_free(rank)))

    def _why_taken(self, rank: Rank) -> str:
        # Names the holder. Searches the blocks; only a refusal pays for it.
        holder = self._holders.get(rank)
        if holder is not None:
            return f"rank {rank} is held by node {format_node(holder)}; give every process a rank of its own"
        launcher = next(launcher for launcher, block in self._blocks.items() if rank in block.ranks)
        return f"rank {rank} is reserved by launcher {format_node(launcher)}; ask for another one, or for any"


def _by_host(arrivals: Iterable[tuple[NodeId, str]]) -> Iterable[NodeId]:
    hosts: dict[str, list[NodeId]] = {}
    for node, host in arrivals:
        hosts.setdefault(host, []).append(node)
    return (node for neighbours in hosts.values() for node in neighbours)


def _span(ranks: range) -> str:
    return f"{ranks.start}..{ranks.stop - 1}"
