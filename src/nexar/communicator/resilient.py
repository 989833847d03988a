"""Team: collectives that survive the loss of members, with the same results on all survivors.

Call #k runs its collective, then a barrier (the commit), then returns. After a loss, each rank reports on the successor
the highest call whose result it holds. The minimum is the last *completed* call. A rank in a completed call returns the
result it holds; a rank in a later call drops its result, restores its input and repeats the call. Both first pass a
barrier, after which all ranks know the minimum.

Why survivors never disagree on a result or on the number of calls:

1. A rank that returned from #k passed the commit or learned that #k is completed, so every member held #k. Later
   memberships have no other members (joiners are not in the team), and only results above the minimum are dropped. So
   #k stays completed: ranks still in it return their result.
2. If no rank returned from #k and one does not hold it, all ranks in #k repeat it. No rank is in #k + 1: it would have
   returned from #k.
3. Results held at the same time are of the same run: a run on a successor begins after its barrier, when all members
   have dropped earlier results of that number.
4. The next successor repeats an interrupted comparison. No rank has returned from a call above the interrupted one's
   minimum, and the minimum of fewer values is no lower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.compression.base import Compressor
from nexar.arrays.operand import adapt
from nexar.cluster.membership import Membership
from nexar.communicator.collective_calls import Op
from nexar.communicator.events import MembershipEvent
from nexar.errors import CollectiveMismatch, MembershipChanged, UsageError
from nexar.types import NodeId, Rank, whole


class RoundCommunicator(Protocol):
    """Communicator methods that rounds use."""

    @property
    def rank(self) -> Rank: ...
    @property
    def size(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def membership(self) -> Membership: ...
    def barrier(self, *, algorithm: str | None = None, timeout: float | None = None) -> Any: ...
    def all_gather(
        self, array: Any, *, out: Any = None, algorithm: str | None = None, timeout: float | None = None
    ) -> Any: ...


R = TypeVar("R", bound=RoundCommunicator)


class RetryRounds(Generic[R]):
    """Numbered calls, in the same order on all ranks, by one thread."""

    def __init__(self, communicator: R) -> None:
        """Call it at the same point on all ranks."""
        # the first one, or its latest successor
        self.communicator = communicator
        # members whose input is in the last held result
        self.contributors: Membership = communicator.membership
        self.changes: Final[list[MembershipEvent]] = []
        self.last_change: MembershipEvent | None = None
        self._first_epoch = communicator.epoch
        self._busy = threading.Lock()  # held by the thread in a call; never waited for
        # Only that thread writes the attributes.
        self._call = 0  # number of the current or last call
        self._held = 0  # highest call whose result this rank holds or has returned
        self._result: Any = None  # of call #held, until returned
        self._compared = True  # the states were compared on this communicator, or it is the first

    def run_to_completion(
        self, run: Callable[[R], Any], timeout: float | None, restore: Callable[[], object] | None = None
    ) -> Any:
        """Return the result of `run` once all remaining ranks hold it; calls `restore` before a repetition. Raises
        MembershipChanged if ranks joined, which hold no results. Other errors end the call.
        """
        if not self._busy.acquire(blocking=False):
            raise UsageError("another call of this team is under way; make one call at a time, from one thread")
        try:
            self._call += 1
            return self._finish(run, timeout, restore)
        except UsageError:
            if self._held < self._call:
                self._call -= 1  # rejected on all ranks before it began: it does not count
            raise
        finally:
            self._result = None
            self._busy.release()

    def _finish(self, run: Callable[[R], Any], timeout: float | None, restore: Callable[[], object] | None) -> Any:
        while True:
            try:
                if not self._compared:
                    self._compare_states(timeout)
                    if self._held >= self._call:
                        return self._result
                    if restore is not None:
                        restore()
                self._hold(run(self.communicator))
                self.communicator.barrier(timeout=timeout)
                return self._result
            except MembershipChanged as change:
                self._continue_on(change)

    def _hold(self, result: Any) -> None:
        self._result, self._held = result, self._call
        self.contributors = self.communicator.membership

    def _continue_on(self, change: MembershipChanged) -> None:
        old, new = self.communicator, change.communicator
        if new is None or change.joined:
            raise change
        self.last_change = MembershipEvent(
            new.epoch, old.size, new.size, old.rank, new.rank, (), dict(change.lost), communicator=new
        )
        self.changes.append(self.last_change)
        self.communicator, self._compared = new, False

    def _compare_states(self, timeout: float | None) -> None:
        mine = np.array([self._first_epoch, self._call, self._held], np.int64)
        states = [RoundState(*row) for row in self.communicator.all_gather(mine, timeout=timeout).tolist()]
        self._held = min(self._held, completed_by_all(states, self.communicator.rank))
        self.communicator.barrier(timeout=timeout)
        self._compared = True

    def __repr__(self) -> str:
        return f"{self._call} calls, {len(self.changes)} changes of {self.communicator!r}"


class RoundState(NamedTuple):
    """A rank's report on a successor."""

    # epoch in which its rounds began
    first_epoch: int
    # current call
    call: int
    # last call whose result it holds or has returned
    held: int


def completed_by_all(states: Sequence[RoundState], me: Rank) -> int:
    """Return the highest call whose result all ranks hold. Raises CollectiveMismatch on all ranks if they would repeat
    different calls: after errors on only some ranks, or if rounds of different epochs meet.
    """
    lowest = min(state.held for state in states)
    again = {state.call for state in states if state.call > lowest}
    if len(again) <= 1 and len({state.first_epoch for state in states}) == 1:
        return lowest
    calls = {
        rank: f"call #{state.call} of the team made in epoch {state.first_epoch}" for rank, state in enumerate(states)
    }
    other = next(call for call in calls.values() if call != calls[me])
    ranks = [rank for rank, call in calls.items() if call == other]
    raise CollectiveMismatch(expected=calls[me], found=other, ranks=ranks, calls=calls)


class TeamCommunicator(RoundCommunicator, Protocol):
    """Communicator methods that a team uses."""

    @property
    def all_reduce(self) -> Callable[..., Any]: ...
    @property
    def all_reduce_bucketed(self) -> Callable[..., Any]: ...
    @property
    def all_reduce_compressed(self) -> Callable[..., Any]: ...
    @property
    def broadcast(self) -> Callable[..., Any]: ...
    @property
    def broadcast_object(self) -> Callable[..., Any]: ...
    @property
    def all_gather_v(self) -> Callable[..., Any]: ...
    @property
    def all_gather_object(self) -> Callable[..., Any]: ...
    @property
    def reduce_scatter(self) -> Callable[..., Any]: ...
    @property
    def all_to_all(self) -> Callable[..., Any]: ...
    @property
    def scan(self) -> Callable[..., Any]: ...
    @property
    def exclusive_scan(self) -> Callable[..., Any]: ...


class TimeoutOption(TypedDict, total=False):
    """Options of every method."""

    timeout: float | None


class MoveOptions(TimeoutOption, total=False):
    """Options of data movement."""

    algorithm: str | None


class ReduceOptions(MoveOptions, total=False):
    """Options of reductions."""

    deterministic: bool
    commutative: bool


C = TypeVar("C", bound=TeamCommunicator)


class Team(Generic[C]):
    """Collectives that are repeated on the survivors of a loss. All members make it with `comm.resilient()` at the same
    point. One team per communicator, one thread at a time.

    A method returns when all remaining ranks hold its result. `contributors` are the members whose input is in it,
    including members lost since. It raises errors other than losses. If ranks joined, it raises MembershipChanged: make
    a new team of its communicator, on all ranks.

    Cost: a barrier per call, and a copy of arrays changed in place.

    Not available: `reduce`, `gather` and `scatter`, whose result or input is lost with one rank; `_v` methods with a
    list entry per rank; messages. Use `communicator` for these. Results whose shape depends on the number of ranks are
    new arrays, without `out=`.
    """

    def __init__(self, communicator: C) -> None:
        """The caller closes the communicator, not the team."""
        self._rounds: Final = RetryRounds(communicator)

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def communicator(self) -> C:
        """The first communicator, or its latest successor."""
        return self._rounds.communicator

    @property
    def rank(self) -> Rank:
        """This process's rank in `communicator`."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """Number of ranks of `communicator`."""
        return self.communicator.size

    @property
    def contributors(self) -> Membership:
        """Members whose input is in the last result, in row order."""
        return self._rounds.contributors

    @property
    def changes(self) -> list[MembershipEvent]:
        """Membership changes so far, newest last. You may clear it."""
        return self._rounds.changes

    def __repr__(self) -> str:
        return f"<nexar.Team, {self._rounds!r}>"

    # -- collectives -----------------------------------------------------------------------------------

    def barrier(self, **options: Unpack[TimeoutOption]) -> None:
        """Block until every remaining rank has called it."""
        self._run(lambda _: None, options)  # the commit is a barrier

    def all_reduce(self, array: Any, op: Op = "sum", *, out: Any = None, **options: Unpack[ReduceOptions]) -> Any:
        """As Communicator.all_reduce."""
        written = _Written([array] if out is None or _overlap(array, out) else [])
        return self._run(lambda comm: comm.all_reduce(array, op, out=out, **options), options, written)

    def all_reduce_bucketed(
        self,
        arrays: Sequence[Any],
        op: Op = "sum",
        *,
        bucket_bytes: int | None = None,
        **options: Unpack[ReduceOptions],
    ) -> Any:
        """As Communicator.all_reduce_bucketed."""
        if hasattr(arrays, "dtype"):
            raise UsageError("all_reduce_bucketed takes a list of arrays, and got one array; call all_reduce for it")
        given = list(arrays)
        return self._run(
            lambda comm: comm.all_reduce_bucketed(given, op, bucket_bytes=bucket_bytes, **options),
            options,
            _Written(given),
        )

    def all_reduce_compressed(
        self,
        array: Any,
        compressor: Compressor,
        *,
        residual: Any = None,
        op: Op = "sum",
        out: Any = None,
        **options: Unpack[TimeoutOption],
    ) -> Any:
        """As Communicator.all_reduce_compressed, with the residual of the successful run."""
        rewritten = [array] if out is None or _overlap(array, out) else []
        written = _Written(rewritten if residual is None else [*rewritten, residual])
        return self._run(
            lambda comm: comm.all_reduce_compressed(array, compressor, residual=residual, op=op, out=out, **options),
            options,
            written,
        )

    def all_gather(self, array: Any, **options: Unpack[MoveOptions]) -> Any:
        """As Communicator.all_gather, with a row per contributor."""
        return self._run(lambda comm: comm.all_gather(array, **options), options)

    def all_gather_v(self, array: Any, **options: Unpack[TimeoutOption]) -> Any:
        """As Communicator.all_gather_v, with an array per contributor."""
        return self._run(lambda comm: comm.all_gather_v(array, **options), options)

    def all_gather_object(self, value: Any, *, pickle: bool = False, **options: Unpack[TimeoutOption]) -> Any:
        """As Communicator.all_gather_object, with a value per contributor."""
        return self._run(lambda comm: comm.all_gather_object(value, pickle=pickle, **options), options)

    def reduce_scatter(self, array: Any, op: Op = "sum", **options: Unpack[ReduceOptions]) -> Any:
        """As Communicator.reduce_scatter, split among the contributors. A contributor lost since loses its part."""
        return self._run(lambda comm: comm.reduce_scatter(array, op, **options), options)

    def scan(self, array: Any, op: Op = "sum", **options: Unpack[ReduceOptions]) -> Any:
        """As Communicator.scan, in contributor order."""
        return self._run(lambda comm: comm.scan(array, op, **options), options)

    def exclusive_scan(self, array: Any, op: Op = "sum", **options: Unpack[ReduceOptions]) -> Any:
        """As Communicator.exclusive_scan, in contributor order."""
        return self._run(lambda comm: comm.exclusive_scan(array, op, **options), options)

    def all_to_all(self, array: Any, **options: Unpack[MoveOptions]) -> Any:
        """As Communicator.all_to_all, with a block per contributor."""
        blocks = _Blocks(array, self.communicator.membership)
        return self._run(lambda comm: comm.all_to_all(blocks.for_(comm.membership), **options), options)

    def broadcast(self, array: Any, root: Rank = 0, **options: Unpack[MoveOptions]) -> Any:
        """As Communicator.broadcast. `root` means the node that has this rank when the call is made.

        Raises MembershipChanged on every rank if that node is lost before all ranks have its array, or if ranks meant
        different nodes because only some had seen a change. The array is then undefined, and the team uses the
        successor: call again with a remaining root.
        """
        return self._from(root, lambda comm, rank: comm.broadcast(array, rank, **options), options)

    def broadcast_object(
        self, value: Any = None, root: Rank = 0, *, pickle: bool = False, **options: Unpack[TimeoutOption]
    ) -> Any:
        """As Communicator.broadcast_object; a lost root is handled as in broadcast."""
        return self._from(
            root, lambda comm, rank: comm.broadcast_object(value, rank, pickle=pickle, **options), options
        )

    # -- inside ----------------------------------------------------------------------------------------

    def _run(self, run: Callable[[C], Any], options: TimeoutOption, written: _Written | None = None) -> Any:
        return self._rounds.run_to_completion(run, options.get("timeout"), None if written is None else written.restore)

    def _from(self, root: Rank, run: Callable[[C, Rank], Any], options: TimeoutOption) -> Any:
        """A lost root is a result, which all ranks must hold before any raises."""
        node = self._node(root)
        timeout = options.get("timeout")

        def rooted(comm: C) -> Any:
            meant = comm.all_gather(np.array([node], np.uint64), timeout=timeout)
            rank = comm.membership.rank_of(node)
            if self._rounds.last_change is not None and (rank is None or (meant != node).any()):
                return _RootLost(self._rounds.last_change)
            assert rank is not None  # no member has left yet
            return run(comm, rank)

        result = self._run(rooted, options)
        if isinstance(result, _RootLost):
            lost = result.event.left
            raise MembershipChanged(communicator=self.communicator, lost=lost, joined=(), completed_by_all=None)
        return result

    def _node(self, root: Rank) -> NodeId:
        number = whole(root)
        if number is None or not 0 <= number < self.size:
            raise UsageError(f"there is no rank {root!r}; this team has ranks 0 to {self.size - 1}")
        return self.communicator.membership.member(number).node


class _RootLost(NamedTuple):
    event: MembershipEvent


class _Written:
    def __init__(self, arrays: Iterable[Any]) -> None:
        self._operands = [adapt(array, writable=True) for array in arrays]
        # An operand that does not share the caller's memory (a device's) is a copy already.
        self._copies = [operand.array.copy() if operand.shares else None for operand in self._operands]

    def restore(self) -> None:
        for operand, copy in zip(self._operands, self._copies, strict=True):
            if copy is not None:
                np.copyto(operand.array, copy)
            operand.commit()


def _overlap(array: Any, out: Any) -> bool:
    return adapt(array).may_share_memory(adapt(out, writable=True, read=False))


class _Blocks:
    def __init__(self, array: Any, membership: Membership) -> None:
        self._given = array
        self._operand = adapt(array)
        self._membership = membership
        rows = self._operand.array
        if not rows.ndim or len(rows) % membership.size:
            raise UsageError(
                f"all_to_all needs axis 0 in {membership.size} equal blocks, which shape {list(rows.shape)} does not "
                "give; pad it"
            )
        self._parts: list[NDArray[Any]] = np.split(rows, membership.size)

    def for_(self, membership: Membership) -> Any:
        if membership.size == self._membership.size:
            return self._given
        ranks = [self._membership.rank_of(member.node) for member in membership.members]
        return self._operand.like(np.concatenate([self._parts[rank] for rank in ranks if rank is not None]))
