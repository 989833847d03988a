"""Rounds that survive the loss of members: the same ones, with the same results, on all survivors.

Calls are numbered. Call #k runs its collective, and then a barrier, the commit; only then it returns. When members are
lost, everybody goes on with the successor. There they first compare notes: the highest number whose result each holds.
The lowest of these is what all have *completed*. A rank whose call is not above it returns the result that it holds; a
rank whose call is above gives up what it holds, restores its input, and runs the call again. Nobody does either before
a barrier has shown that all know.

Why no two survivors disagree on a result, or on how many calls there were:

1. Who has returned from #k has passed the commit, or was told that #k is completed. Either way every member of the
   communicator on which it was held #k. Memberships that follow have no others, since who joins is not in the team;
   and what is held is given up only if it is above what all have completed. So from then on #k is completed wherever
   notes are compared: whoever is still in it returns what it holds, and nobody runs it again.
2. If nobody has returned from #k, and somebody does not hold it, #k is not completed: all who are in it run it again.
   Nobody is further: to be in #k + 1, it would have returned.
3. Results that are held at the same time are of the same run. A run on a successor begins after its barrier, and by
   then all its members have given up what they held of earlier runs of that number. So whoever holds a result of that
   run knows that no member holds one of another; and 1 and 2 never mix two runs.
4. Being interrupted while notes are compared changes nothing: what is held stays held, and the next successor asks
   again. Members that are lost only take their notes with them: the lowest of fewer is no lower.

The symmetric collectives of a communicator, carried through on the survivors when members are lost.

How, and why no two survivors ever disagree, is in rounds.py.
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
    """What rounds need of a communicator."""

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
    """Calls of all ranks, made in the same order on each, by one thread at a time."""

    def __init__(self, communicator: R) -> None:
        """Made on all its ranks at the same point."""
        self.communicator = communicator
        """The one that is used now: the first, or its latest successor."""
        self.contributors: Membership = communicator.membership
        """Those of the last result that is held."""
        self.changes: Final[list[MembershipEvent]] = []
        self.last_change: MembershipEvent | None = None
        self._born = communicator.epoch
        self._busy = threading.Lock()  # taken by the thread that is in a call; nobody waits for it
        # What is below is written by that thread; and so is what is above.
        self._call = 0  # the number of the call that is under way, or was last
        self._held = 0  # the highest whose result this rank holds, or has returned
        self._result: Any = None  # of call #held, until it is returned
        self._settled = True  # notes have been compared on this communicator, or none were needed

    def carry_through(
        self, run: Callable[[R], Any], timeout: float | None, restore: Callable[[], object] | None = None
    ) -> Any:
        """The result of `run` on a communicator, once all who are left hold it. `restore` is called before it is run
        again.

        MembershipChanged if others have joined: these have no notes. Other errors pass through; the call is over then.
        """
        if not self._busy.acquire(blocking=False):
            raise UsageError("another call of this team is under way; make one call at a time, from one thread")
        try:
            self._call += 1
            return self._finish(run, timeout, restore)
        except UsageError:
            if self._held < self._call:
                self._call -= 1  # refused before it began: on the others it is no call either
            raise
        finally:
            self._result = None
            self._busy.release()

    def _finish(self, run: Callable[[R], Any], timeout: float | None, restore: Callable[[], object] | None) -> Any:
        while True:
            try:
                if not self._settled:
                    self._settle(timeout)
                    if self._held >= self._call:
                        return self._result
                    if restore is not None:
                        restore()
                self._hold(run(self.communicator))
                self.communicator.barrier(timeout=timeout)
                return self._result
            except MembershipChanged as change:
                self._follow(change)

    def _hold(self, result: Any) -> None:
        self._result, self._held = result, self._call
        self.contributors = self.communicator.membership

    def _follow(self, change: MembershipChanged) -> None:
        old, new = self.communicator, change.communicator
        if new is None or change.joined:
            raise change
        self.last_change = MembershipEvent(
            new.epoch, old.size, new.size, old.rank, new.rank, (), dict(change.lost), communicator=new
        )
        self.changes.append(self.last_change)
        self.communicator, self._settled = new, False

    def _settle(self, timeout: float | None) -> None:
        """Compare notes, and give up what not all have."""
        mine = np.array([self._born, self._call, self._held], np.int64)
        notes = [RoundState(*row) for row in self.communicator.all_gather(mine, timeout=timeout).tolist()]
        self._held = min(self._held, completed_by_all(notes, self.communicator.rank))
        self.communicator.barrier(timeout=timeout)
        self._settled = True

    def __repr__(self) -> str:
        return f"{self._call} calls, {len(self.changes)} changes of {self.communicator!r}"


class RoundState(NamedTuple):
    """What one rank says on a successor."""

    born: int
    """The epoch in which its rounds began."""
    call: int
    """It is in this one."""
    held: int
    """It holds the result of this one, or has returned it."""


def completed_by_all(notes: Sequence[RoundState], me: Rank) -> int:
    """The highest call whose result all hold.

    CollectiveMismatch, on all ranks alike, if those who would run a call again are not in the same one. That is so
    only after errors that some ranks had and others had not, or if rounds of different beginnings meet.
    """
    lowest = min(note.held for note in notes)
    again = {note.call for note in notes if note.call > lowest}
    if len(again) <= 1 and len({note.born for note in notes}) == 1:
        return lowest
    calls = {rank: f"call #{note.call} of the team made in epoch {note.born}" for rank, note in enumerate(notes)}
    other = next(call for call in calls.values() if call != calls[me])
    ranks = [rank for rank, call in calls.items() if call == other]
    raise CollectiveMismatch(expected=calls[me], found=other, ranks=ranks, calls=calls)


class TeamCommunicator(RoundCommunicator, Protocol):
    """What a team needs of a communicator."""

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
    """Options of every verb."""

    timeout: float | None


class MoveOptions(TimeoutOption, total=False):
    """Options of a verb that moves arrays."""

    algorithm: str | None


class ReduceOptions(MoveOptions, total=False):
    """Options of a verb that reduces."""

    deterministic: bool
    commutative: bool


C = TypeVar("C", bound=TeamCommunicator)


class Team(Generic[C]):
    """The symmetric collectives of a communicator, carried through on the survivors when members are lost. Made by
    `comm.resilient()`, on all members at the same point; one at a time, and one thread at a time.

    A verb returns when all who are left hold its result; `contributors` are those whose part is in it, the lost ones
    too if it was complete before they were lost. Other errors than the loss of members pass through. When others have
    joined, MembershipChanged does too: make a new team of its communicator, on all ranks.

    What it costs: a barrier for each call, and a copy of what is worked on in place.

    Not offered: `reduce`, `gather` and `scatter`, whose result or input is at one rank only, and is lost with it; the
    `_v` forms whose lists say what each rank gets; messages, for which there is no round that all could repeat. Use
    `communicator` for these. Results whose shape depends on the number of ranks are new arrays, without `out=`.
    """

    def __init__(self, communicator: C) -> None:
        """It stays the caller's: a team has nothing to close."""
        self._rounds: Final = RetryRounds(communicator)

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def communicator(self) -> C:
        """The one that is used now: the first, or its latest successor."""
        return self._rounds.communicator

    @property
    def rank(self) -> Rank:
        """My place in it."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return self.communicator.size

    @property
    def contributors(self) -> Membership:
        """Whose parts are in the last result, in the order of its rows."""
        return self._rounds.contributors

    @property
    def changes(self) -> list[MembershipEvent]:
        """What has changed so far, the newest last: to scale a learning rate, say. Yours to clear."""
        return self._rounds.changes

    def __repr__(self) -> str:
        return f"<nexar.Team, {self._rounds!r}>"

    # -- verbs -----------------------------------------------------------------------------------------

    def barrier(self, **options: Unpack[TimeoutOption]) -> None:
        """Return when every rank that is left has called it."""
        self._carry_through(lambda _: None, options)  # the commit is the barrier

    def all_reduce(self, array: Any, op: Op = "sum", *, out: Any = None, **options: Unpack[ReduceOptions]) -> Any:
        """As Communicator.all_reduce."""
        written = _Written([array] if out is None or _overlap(array, out) else [])
        return self._carry_through(lambda comm: comm.all_reduce(array, op, out=out, **options), options, written)

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
        return self._carry_through(
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
        """As Communicator.all_reduce_compressed. The residual is that of the run that counts."""
        rewritten = [array] if out is None or _overlap(array, out) else []
        written = _Written(rewritten if residual is None else [*rewritten, residual])
        return self._carry_through(
            lambda comm: comm.all_reduce_compressed(array, compressor, residual=residual, op=op, out=out, **options),
            options,
            written,
        )

    def all_gather(self, array: Any, **options: Unpack[MoveOptions]) -> Any:
        """As Communicator.all_gather: a row for each contributor."""
        return self._carry_through(lambda comm: comm.all_gather(array, **options), options)

    def all_gather_v(self, array: Any, **options: Unpack[TimeoutOption]) -> Any:
        """As Communicator.all_gather_v: an array of each contributor."""
        return self._carry_through(lambda comm: comm.all_gather_v(array, **options), options)

    def all_gather_object(self, value: Any, *, pickle: bool = False, **options: Unpack[TimeoutOption]) -> Any:
        """As Communicator.all_gather_object: a value of each contributor."""
        return self._carry_through(lambda comm: comm.all_gather_object(value, pickle=pickle, **options), options)

    def reduce_scatter(self, array: Any, op: Op = "sum", **options: Unpack[ReduceOptions]) -> Any:
        """As Communicator.reduce_scatter: axis 0 is cut for the contributors. The part of one that is lost after all
        had theirs is lost.
        """
        return self._carry_through(lambda comm: comm.reduce_scatter(array, op, **options), options)

    def scan(self, array: Any, op: Op = "sum", **options: Unpack[ReduceOptions]) -> Any:
        """As Communicator.scan, in the order of the contributors."""
        return self._carry_through(lambda comm: comm.scan(array, op, **options), options)

    def exclusive_scan(self, array: Any, op: Op = "sum", **options: Unpack[ReduceOptions]) -> Any:
        """As Communicator.exclusive_scan, in the order of the contributors."""
        return self._carry_through(lambda comm: comm.exclusive_scan(array, op, **options), options)

    def all_to_all(self, array: Any, **options: Unpack[MoveOptions]) -> Any:
        """As Communicator.all_to_all. Blocks for ranks that are lost are left out, so the result may be shorter: a
        block of each contributor.
        """
        blocks = _Blocks(array, self.communicator.membership)
        return self._carry_through(lambda comm: comm.all_to_all(blocks.for_(comm.membership), **options), options)

    def broadcast(self, array: Any, root: Rank = 0, **options: Unpack[MoveOptions]) -> Any:
        """As Communicator.broadcast. `root` is the node that has this rank when the call is made.

        MembershipChanged, on every rank, if that node is lost before all have its array, or if ranks meant different
        nodes because only some had seen the change: the team has gone on to the successor; call it again with a root
        that is left. The array's content is of no use then.
        """
        return self._from(root, lambda comm, rank: comm.broadcast(array, rank, **options), options)

    def broadcast_object(
        self, value: Any = None, root: Rank = 0, *, pickle: bool = False, **options: Unpack[TimeoutOption]
    ) -> Any:
        """As Communicator.broadcast_object; and as broadcast, if the root is lost."""
        return self._from(
            root, lambda comm, rank: comm.broadcast_object(value, rank, pickle=pickle, **options), options
        )

    # -- inside ----------------------------------------------------------------------------------------

    def _carry_through(self, run: Callable[[C], Any], options: TimeoutOption, written: _Written | None = None) -> Any:
        return self._rounds.carry_through(run, options.get("timeout"), None if written is None else written.restore)

    def _from(self, root: Rank, run: Callable[[C, Rank], Any], options: TimeoutOption) -> Any:
        """From one root. Its loss is a result like any other: all must have it before anybody returns."""
        node = self._node(root)
        timeout = options.get("timeout")

        def rooted(comm: C) -> Any:
            meant = comm.all_gather(np.array([node], np.uint64), timeout=timeout)
            rank = comm.membership.rank_of(node)
            if self._rounds.last_change is not None and (rank is None or (meant != node).any()):
                return _RootLost(self._rounds.last_change)
            assert rank is not None  # nobody has left yet
            return run(comm, rank)

        result = self._carry_through(rooted, options)
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
    """The outcome of a broadcast that cannot be."""

    event: MembershipEvent


class _Written:
    """Arrays that a collective writes to, as they were before."""

    def __init__(self, arrays: Iterable[Any]) -> None:
        self._operands = [adapt(array, writable=True) for array in arrays]
        # An operand that is not the caller's own memory, on a device say, is such a copy already.
        self._copies = [operand.array.copy() if operand.shares else None for operand in self._operands]

    def restore(self) -> None:
        for operand, copy in zip(self._operands, self._copies, strict=True):
            if copy is not None:
                np.copyto(operand.array, copy)
            operand.commit()


def _overlap(array: Any, out: Any) -> bool:
    return adapt(array).may_share_memory(adapt(out, writable=True, read=False))


class _Blocks:
    """Equal blocks of axis 0, one for each member."""

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
        """Those of these members, who were all there then."""
        if membership.size == self._membership.size:
            return self._given
        ranks = [self._membership.rank_of(member.node) for member in membership.members]
        return self._operand.like(np.concatenate([self._parts[rank] for rank in ranks if rank is not None]))
