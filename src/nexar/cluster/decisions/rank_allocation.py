"""Which ranks are still free: whole runs, not single numbers.

A world has many ranks and few runs of free ones, because ranks are mostly taken from the bottom and in blocks. The runs
lie in order, never touch, and are found by bisection, so taking or giving back costs the logarithm of their number.

Who gets which rank. Pure.

Three kinds of claims are promised at once, and never more places than the world has:

- a *block*, reserved by a launcher for the children it will start; only they get its ranks,
- a *rank* that a candidate brought along,
- any place, for a candidate without a wish: which one is settled when everybody is there.

Law: `places left` = ranks that are free − candidates that wait for any. A claim is granted only while that is enough,
so that whoever was let in finds a place at the end, and the ranks are dense when the world is full.
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
    """The free ones of 0..size-1."""

    def __init__(self, size: int) -> None:
        self._starts: list[Rank] = [0] if size else []
        self._ends: list[Rank] = [size] if size else []  # behind the last of each run
        self.count = size
        """How many are free."""

    def __iter__(self) -> Iterator[Rank]:
        """Ascending."""
        for start, end in zip(self._starts, self._ends, strict=True):
            yield from range(start, end)

    def are_free(self, first: Rank, count: int = 1) -> bool:
        """Whether all `count` ranks from `first` on are."""
        run = bisect_right(self._starts, first) - 1
        return run >= 0 and first + count <= self._ends[run]

    def lowest(self, count: int) -> Rank | None:
        """Where the lowest run of at least `count` begins; None: there is none."""
        for start, end in zip(self._starts, self._ends, strict=True):
            if end - start >= count:
                return start
        return None

    def take(self, first: Rank, count: int = 1) -> None:
        """They are free no more. ValueError if one of them was not free."""
        run = bisect_right(self._starts, first) - 1
        if run < 0 or first + count > self._ends[run]:
            raise ValueError(f"ranks {first}..{first + count - 1} are not all free")
        start, end = self._starts[run], self._ends[run]
        rest = [part for part in ((start, first), (first + count, end)) if part[0] < part[1]]
        self._starts[run : run + 1] = [part[0] for part in rest]
        self._ends[run : run + 1] = [part[1] for part in rest]
        self.count -= count

    def give_back(self, rank: Rank) -> None:
        """It is free again, and one run with its neighbours. ValueError if it was free already."""
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
    """Ranks that belong to the children of one launcher."""

    first_rank: Rank
    count: int
    group_rank: int
    """The lowest number no other launcher had when it came: 0, 1, … in the order in which blocks were reserved."""

    @property
    def ranks(self) -> range:
        """All of them."""
        return range(self.first_rank, self.first_rank + self.count)


class RankAllocator:
    """What is promised to whom, until the world is full."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = FreeRanks(size)
        self._holders: dict[Rank, NodeId] = {}
        self._claims: dict[NodeId, Rank | None] = {}
        self._unplaced = 0  # how many of the claims are None
        self._blocks: dict[NodeId, RankBlock] = {}
        self._returned_groups: list[int] = []  # a heap: numbers below len(blocks) + len(this) that nobody has
        self._children: dict[NodeId, NodeId] = {}  # whose rank comes from the block of which launcher

    @property
    def left(self) -> int:
        """Places that nobody holds, waits for or has reserved."""
        return self._free.count - self._unplaced

    @property
    def is_full(self) -> bool:
        """Everybody is there."""
        return len(self._claims) == self.size

    def block_of(self, launcher: NodeId) -> RankBlock | None:
        """What this launcher reserved."""
        return self._blocks.get(launcher)

    def rank_of(self, node: NodeId) -> Rank | None:
        """The rank that this candidate claimed; None if it claimed none."""
        return self._claims.get(node)

    def holder(self, rank: Rank) -> NodeId | None:
        """Who has exactly this rank by now."""
        return self._holders.get(rank)

    def claim(self, node: NodeId, rank: Rank | None, launcher: NodeId) -> None:
        """A place for this candidate. Refusal if its wish cannot be granted."""
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
        """The candidate is gone. Its rank is free, or reserved again for its launcher's next child."""
        rank = self._claims.pop(node)
        launcher = self._children.pop(node, None)
        if rank is None:
            self._unplaced -= 1
            return
        del self._holders[rank]
        if launcher is None:
            self._free.give_back(rank)

    def reserve(self, launcher: NodeId, count: int, first_rank: Rank | None) -> RankBlock:
        """A block, at `first_rank` or the lowest place where it fits. Refusal if it fits nowhere."""
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
        """The launcher is gone: what none of its children holds is free. Those that are here keep their ranks."""
        block = self._blocks.pop(launcher)
        heapq.heappush(self._returned_groups, block.group_rank)
        for rank in block.ranks:
            child = self._holders.get(rank)
            if child is None:
                self._free.give_back(rank)
            else:
                del self._children[child]

    def assign(self, arrivals: Iterable[tuple[NodeId, str]]) -> list[NodeId]:
        """The nodes in order of rank, once everybody is there; `arrivals`: node and host in the order they came.

        Ranks that were claimed stay. The others are filled from the lowest, hosts in the order in which their first
        node came, inside a host in the order of arrival: ranks of one host are neighbours.
        """
        if not self.is_full:
            raise InternalError(f"ranks were assigned when {len(self._claims)} of {self.size} were there")
        waiting = iter(_by_host(arrivals))
        free = iter(self._free)
        seats = dict(self._holders)
        seats |= {next(free): node for node in waiting if self._claims[node] is None}
        return [seats[rank] for rank in range(self.size)]

    def _need(self, count: int) -> None:
        if self.left == 0:
            raise NoRanksLeft(f"all {self.size} places are taken or reserved; start the seed with a larger size")
        if count > self.left:
            raise NoRanksLeft(
                f"{count} places were asked for, {self.left} are left of {self.size}; start fewer ranks, or the seed "
                "with a larger size"
            )

    def _next_group(self) -> int:
        """All numbers below the count of groups are in use or returned, so the count itself is the next new one."""
        return heapq.heappop(self._returned_groups) if self._returned_groups else len(self._blocks)

    def _first_taken(self, ranks: range) -> str:
        return self._why_taken(next(rank for rank in ranks if not self._free.are_free(rank)))

    def _why_taken(self, rank: Rank) -> str:
        """Names the holder. Looks through the blocks, which only a refusal has to pay for."""
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
