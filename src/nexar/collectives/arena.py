"""The arena: where the ranks of one host run collectives through memory that they share.

Law of rounds. Every operation is a number of rounds, which follows from what the operation is; `round` is a running
number, the same on all ranks for the same moment of the same operation. A rank *publishes* round r when its part of it
is in its slot, and when it has read all that it needs of round r - 1. It goes on when all others have published r.
So nobody is ever more than one round ahead, and of two slots, used in turn, one is always free to be written:
the slot of round r + 1 was last read in round r - 1, and whoever has published r has done with that.

Order. An operation has a *slip*; operations run one at a time, in the order of slips, on every rank. Slips are
reserved at the call, in the order of the calls, so they are the same everywhere.

Giving up. An operation that is cancelled, too late or failed is marked as given up; then this rank's word moves on to
the operation's end. Others find that word far enough and the mark, in this order, whenever they come; they give up too.
Who gave up has not waited for the others, though, who may still be reading. So the next operation begins with waiting
for all to have come to the end of this one: after that the law holds again.

Turn. One thread at a time has the *turn*: it advances the operation at the head. That is whoever leads the node (the
arena is a Poller), or a thread that just called and finds nobody at it: it runs its operation at once, looking at the
words for a while (`spin`), and only then leaves it to the queue and waits as all do. The turn is taken without waiting,
but for giving up. It comes before the node's lock.

Waking. After publishing, a rank nudges those that have published the same round already: they may sleep waiting for it.
The others will look before they sleep. Between storing the round and looking at theirs there is a fence, as between
their arming and their last look: one of the two sees the other (see transport.shm.doorbell).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from nexar.arrays.operations import Reduction
from nexar.arrays.partition import Span
from nexar.collectives import shared_memory
from nexar.collectives.arena_memory import ArenaMemory
from nexar.collectives.arena_plans import Fold, folding
from nexar.collectives.arena_queue import ArenaQueue, Members
from nexar.collectives.arena_records import Announcement
from nexar.collectives.fingerprint import Fingerprint
from nexar.links.operation import Operation
from nexar.links.progress import Progress

Row = NDArray[Any]
"""Flat and contiguous; nobody else touches it until the operation is done."""


class Arena:
    """One rank's way into it. Close it before the node; its operations may be waited for by any thread.

    With `spin`, for callers that wait anyway, an operation is run in place as far as it gets in that time, often to its
    end. It compares its `announcement`, if it has one, with those of the others.
    """

    def __init__(
        self,
        progress: Progress,
        memory: ArenaMemory,
        rank: int,
        members: Members,
        nudges: Sequence[Callable[[], None]],
    ) -> None:
        """`rank`: this one's index among the ranks of the arena. `nudges`: one for each of them (this one's is not
        used), which wakes the rank's process if it sleeps. The memory is the arena's to close.
        """
        self.rank = rank
        self.size = memory.geometry.size
        self._queue = ArenaQueue(progress, memory, rank, members, nudges)
        self._slots = self._queue.slots
        self._records = self._queue.records
        self._plans = self._queue.plans
        self._reserved = 1

    # -- slips and announcements ---------------------------------------------------------------------

    def reserve(self, count: int = 1) -> int:
        """The first of `count` slips in a row. Each must be used, or given back with `skip`. Callers see to it that
        slips are reserved in the same order on all ranks, so not by two threads at once.
        """
        slip = self._reserved
        self._reserved += count
        return slip

    def skip(self, slip: int, rounds: int) -> None:
        """This rank takes no part in that operation, of so many rounds: others find that it was given up."""
        self._queue.skip(slip, rounds)

    def announce(self, sequence: int, fingerprint: Fingerprint) -> None:
        """This rank has come to its collective number `sequence`, whether that runs here or elsewhere. UsageError, once
        the arena is closed: also with the node, or in a forked child.
        """
        self._queue.check()
        self._records.announce(sequence, fingerprint)

    def disagreement(self, sequence: int) -> tuple[int, Fingerprint] | None:
        """A rank that has announced something else as that collective than this one has, and what. Only the last eight
        collectives are remembered.
        """
        return None if self._queue.closed else self._records.disagreement(sequence)

    def arrivals(self, sequence: int) -> list[int | None]:
        """When each rank came to that collective (of time.monotonic_ns); None: it has not, or it was too long ago."""
        return [None] * self.size if self._queue.closed else self._records.arrivals(sequence)

    # -- operations ------------------------------------------------------------------------------------

    def barrier(self, slip: int, *, announcement: Announcement | None = None, spin: bool = False) -> Operation:
        """Done when all have come."""
        return self._queue.start("barrier", slip, announcement, shared_memory.barrier(), spin)

    def all_reduce(
        self,
        slip: int,
        array: Row,
        reduction: Reduction,
        out: Row | None = None,
        *,
        announcement: Announcement | None = None,
        spin: bool = False,
    ) -> Operation:
        """`out` (default: `array`) becomes the reduction of all arrays, in the order of ranks."""
        rounds = shared_memory.all_reduce(self._plans, array, reduction, array if out is None else out)
        return self._queue.start("all_reduce", slip, announcement, rounds, spin)

    def reduce(
        self,
        slip: int,
        array: Row,
        out: Row | None,
        reduction: Reduction,
        root: int,
        *,
        announcement: Announcement | None = None,
        spin: bool = False,
    ) -> Operation:
        """`out` of `root`, which may be its `array`, becomes the reduction of all arrays; that of others is ignored."""
        rounds = shared_memory.all_reduce(self._plans, array, reduction, out if self.rank == root else None, root)
        return self._queue.start("reduce", slip, announcement, rounds, spin)

    def reduce_scatter(
        self,
        slip: int,
        array: Row,
        out: Row,
        spans: Sequence[Span],
        reduction: Reduction,
        *,
        fold: Fold | None = None,
        announcement: Announcement | None = None,
        spin: bool = False,
    ) -> Operation:
        """`out`, which may lie in `array`, becomes this rank's span of the reduction of all arrays. `fold`: to be used
        in place of the reduction's own, where `out` has another dtype or the ranks of this host are not all.
        """
        fold = fold or folding(self.size, array.dtype, reduction)
        rounds = shared_memory.reduce_scatter(self._slots, array, out, spans, fold)
        return self._queue.start("reduce_scatter", slip, announcement, rounds, spin)

    def all_gather(
        self,
        slip: int,
        array: Row,
        out: Row,
        spans: Sequence[Span],
        *,
        announcement: Announcement | None = None,
        spin: bool = False,
    ) -> Operation:
        """`out` becomes everybody's array, each in its span. `array` may be that span of `out`."""
        rounds = shared_memory.all_gather(self._slots, array, out, spans)
        return self._queue.start("all_gather", slip, announcement, rounds, spin)

    def broadcast(
        self,
        slip: int,
        array: Row,
        root: int,
        *,
        announcement: Announcement | None = None,
        spin: bool = False,
    ) -> Operation:
        """`array` becomes that of `root`."""
        return self._queue.start(
            "broadcast", slip, announcement, shared_memory.broadcast(self._slots, array, root), spin
        )

    # -- the end ---------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Everything that cannot be completed with what the others have published fails with it, now and later. From
        any thread, also under the node's lock; whoever leads sees to it at once.
        """
        self._queue.fail(error)

    def close(self) -> None:
        """Unmap it; what is pending fails. Touches nobody else. Idempotent."""
        self._queue.close()
