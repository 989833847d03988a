"""Communicators whose members are lost at scripted moments.

The nth operation of a rank on one communicator is its operation n. A `Loss` says whom it takes, and, for each rank, how
many operations end well there before it is hit: the next one raises. Ranks run in threads, but nothing depends on how
these take turns: a script gives the same run every time.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from nexar.cluster.membership import Member, Membership
from nexar.errors import MembershipChanged
from tests.ranks import EVENT_TIMEOUT

Needs = Callable[[int, int, int], range]
"""(rank, size, operation) → the ranks without whose part that operation does not end there."""


def everybody(rank: int, size: int, operation: int) -> range:
    return range(size)


class Killed(BaseException):
    """The end of a process, as its thread has it."""


@dataclass(frozen=True)
class Loss:
    victim: int
    """Its rank."""
    ended_well: tuple[int, ...]
    """By rank."""


def losses(size: int, longest: int, needs: Needs = everybody) -> Iterator[Loss]:
    """Everything that can be: an operation ends at a rank only if those that it needs have come to it."""
    for ended_well in product(range(longest + 1), repeat=size):
        if _can_be(ended_well, needs):
            for victim in range(size):
                yield Loss(victim, ended_well)


def _can_be(ended_well: Sequence[int], needs: Needs) -> bool:
    size = len(ended_well)
    return all(
        ended_well[other] >= operation
        for rank in range(size)
        for operation in range(ended_well[rank])
        for other in needs(rank, size, operation)
    )


def membership(nodes: Sequence[int], epoch: int) -> Membership:
    return Membership("scripted", epoch, tuple(Member(node, "host", bytes(32), {}) for node in nodes))


@dataclass
class Scripted:
    """One communicator, as all its ranks see it together, and all its successors."""

    membership: Membership
    script: Sequence[Loss]
    changed: threading.Condition = field(default_factory=threading.Condition)
    parts: dict[int, dict[int, tuple[str, Any]]] = field(default_factory=dict)  # operation → rank → what it brought
    _successor: "Scripted | None" = None

    def at(self, rank: int) -> "Communicator":
        return Communicator(self, rank)

    def successor(self) -> "Scripted":
        with self.changed:
            if self._successor is None:
                gone = self.script[0].victim
                left = [member.node for rank, member in enumerate(self.membership.members) if rank != gone]
                self._successor = Scripted(membership(left, self.membership.epoch + 1), self.script[1:])
            return self._successor

    def run(self, task: Callable[["Communicator"], Any], pool: ThreadPoolExecutor) -> list[Any]:
        """What the task gives, by rank; None for those who were killed."""

        def rank(number: int) -> Any:
            try:
                return task(self.at(number))
            except Killed:
                return None

        return [each.result() for each in [pool.submit(rank, number) for number in range(self.membership.size)]]


class Communicator:
    """As one rank sees it. Reductions add up."""

    def __init__(self, shared: Scripted, rank: int) -> None:
        self._shared = shared
        self._done = 0
        self.rank = rank
        self.membership = shared.membership
        self.size = self.membership.size
        self.epoch = self.membership.epoch
        self.node = self.membership.member(rank).node
        self.calls: Counter[str] = Counter()

    def barrier(self, *, algorithm: str | None = None, timeout: float | None = None) -> Any:
        self._meet("barrier", None)

    def all_gather(
        self, array: Any, *, out: Any = None, algorithm: str | None = None, timeout: float | None = None
    ) -> Any:
        return np.stack(self._meet("all_gather", np.array(array)))

    def all_gather_v(self, array: Any, **options: Any) -> Any:
        return self._meet("all_gather_v", np.array(array))

    def all_gather_object(self, value: Any, **options: Any) -> Any:
        return self._meet("all_gather_object", value)

    def all_reduce(self, array: Any, op: Any = "sum", *, out: Any = None, **options: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return sum(self._meet("all_reduce", array))
        target = array if out is None else out
        brought = array.copy()
        target[...] = -1  # whoever is hit finds it like that
        target[...] = sum(self._meet("all_reduce", brought))
        return target

    def all_reduce_bucketed(self, arrays: Any, op: Any = "sum", **options: Any) -> Any:
        brought = [array.copy() for array in arrays]
        for array in arrays:
            array[...] = -1
        for array, *parts in zip(arrays, *self._meet("all_reduce_bucketed", brought), strict=True):
            array[...] = sum(parts)
        return arrays

    def all_reduce_compressed(
        self, array: Any, compressor: Any, *, residual: Any = None, op: Any = "sum", out: Any = None, **options: Any
    ) -> Any:
        """Everything is sent; a residual grows by one."""
        target, brought = array if out is None else out, array if residual is None else array + residual
        found = sum(self._meet("all_reduce_compressed", brought.copy()))
        target[...] = found
        if residual is not None:
            residual += 1
        return target

    def reduce_scatter(self, array: Any, op: Any = "sum", **options: Any) -> Any:
        return np.array_split(sum(self._meet("reduce_scatter", np.array(array))), self.size)[self.rank]

    def all_to_all(self, array: Any, **options: Any) -> Any:
        found = self._meet("all_to_all", np.array(array))
        return np.concatenate([np.split(each, self.size)[self.rank] for each in found])

    def broadcast(self, array: Any, root: int = 0, **options: Any) -> Any:
        array[...] = self._meet(f"broadcast from {root}", np.array(array))[root]
        return array

    def broadcast_object(self, value: Any = None, root: int = 0, **options: Any) -> Any:
        return self._meet(f"broadcast_object from {root}", value)[root]

    def scan(self, array: Any, op: Any = "sum", **options: Any) -> Any:
        return sum(self._meet("scan", np.array(array), range(self.rank + 1)))

    def exclusive_scan(self, array: Any, op: Any = "sum", **options: Any) -> Any:
        return sum(self._meet("exclusive_scan", np.array(array), range(self.rank)), np.zeros_like(array))

    def _meet(self, verb: str, brought: Any, needed: range | None = None) -> list[Any]:
        """What the needed ranks brought to this operation."""
        shared, operation = self._shared, self._done
        self.calls[verb] += 1
        with shared.changed:
            parts = shared.parts.setdefault(operation, {})
            parts[self.rank] = (verb, brought)
            assert {each for each, _ in parts.values()} == {verb}, f"operation {operation} differs: {parts}"
            shared.changed.notify_all()
        if shared.script and operation >= shared.script[0].ended_well[self.rank]:
            raise self._hit()
        ranks = range(self.size) if needed is None else needed
        with shared.changed:
            assert shared.changed.wait_for(lambda: parts.keys() >= set(ranks), EVENT_TIMEOUT), (
                f"stuck in {verb}: {parts}"
            )
        self._done += 1
        return [parts[rank][1] for rank in ranks]

    def _hit(self) -> BaseException:
        loss, following = self._shared.script[0], self._shared.successor()
        if loss.victim == self.rank:
            return Killed()
        rank = following.membership.rank_of(self.node)
        assert rank is not None
        return MembershipChanged(
            communicator=following.at(rank), lost={loss.victim: "killed"}, joined=(), completed_by_all=None
        )
