"""Collectives of the processes of one host through shared memory.

One process creates a `Region` and sends its `offer` to the others, which open it. Each then makes a `Group` with its
rank. Operations run in the order of their order numbers, which all ranks must take for the same calls. Reductions are
folded in rank order, so all ranks get the same bits.

A fingerprint is what all ranks must agree on: operation, dtype, count, root, reduce op, algorithm (`u8 u8 i64 i32 u8
u8`). The module compares fingerprints and does not interpret them, except that the fast path makes those of its calls.
Codes of dtypes and reduce ops are those of `nexar_native.reduce`. Times are those of `time.monotonic`.

Any thread may use every object. The GIL is released while a thread waits; waits run Python's signal handlers at least
every 50 ms. In a forked child every method raises RuntimeError. The interpreter closes all groups when it exits.
"""

from typing import Final, TypeAlias, final

from typing_extensions import Buffer

__all__ = [
    "ABORTED",
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "BARRIER",
    "BROADCAST",
    "CLOSED",
    "DIED",
    "DONE",
    "FAILED",
    "INTERRUPTED",
    "MAX_RANKS",
    "MISMATCH",
    "REDUCE",
    "REDUCE_SCATTER",
    "WAITING",
    "Group",
    "Pending",
    "Region",
]

MAX_RANKS: Final[int]

BARRIER: Final[int]
"""No rank leaves before all have arrived. No arrays."""
ALL_REDUCE: Final[int]
"""`array` and `out` on all ranks, of the same length; `out` may be `array`."""
REDUCE: Final[int]
"""The root passes `out` too, which may be `array`."""
REDUCE_SCATTER: Final[int]
"""`out` gets this rank's part of the reduced `array`; it may be that part of `array`."""
ALL_GATHER: Final[int]
"""`out` gets every rank's `array` in rank order; `array` may be this rank's part of `out`."""
BROADCAST: Final[int]
"""The root passes `array`, the others `out`."""
ALL_TO_ALL: Final[int]
"""Block i of `array` becomes block r of rank i's `out`, where r is this rank. `out` may be `array`."""

DONE: Final[int]
WAITING: Final[int]
"""Not done when the time was over. Wait again, or cancel."""
INTERRUPTED: Final[int]
"""`Group.interrupt` was called. Wait again, or cancel."""
ABORTED: Final[int]
"""`Pending.rank` has aborted the operation, or closed its group; -1: `cancel` was called here."""
MISMATCH: Final[int]
"""`Pending.rank` has the fingerprint `Pending.theirs`. Later operations fail."""
DIED: Final[int]
"""`Pending.rank` has ended, or is lost (`Group.fail`), before it did its part. Later operations end the same way."""
FAILED: Final[int]
"""`Pending.rank` wrote what no rank writes, or an earlier operation had a mismatch with it."""
CLOSED: Final[int]
"""The group is closed."""

_Fingerprint: TypeAlias = tuple[int, int, int, int, int, int]

@final
class Region:
    """The shared memory, mapped in this process. 256 KiB chunks, less from 65 ranks on: 32 MiB at most."""

    @property
    def offer(self) -> str:
        """What `open` needs: "pid fd ranks chunk_bytes nonce". Not a secret: its users may read the creator's memory."""

    @property
    def ranks(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    @staticmethod
    def create(ranks: int, chunk_bytes: int = 0) -> Region:
        """`chunk_bytes`: length of a slot, a power of two; each rank has two; 0: by the number of ranks. Raises OSError
        if the memory cannot be made, ValueError for other sizes.
        """

    @staticmethod
    def open(offer: str, ranks: int) -> Region:
        """In the same PID namespace, while the creator has the descriptor open. Raises ValueError if the text is no offer
        for so many ranks, OSError if it is not a sealed region of that layout, size and nonce.
        """

    def close_descriptor(self) -> None:
        """No further process can open the region. Idempotent."""

    def close(self) -> None:
        """Release the memory, except for groups that use it. Idempotent."""

@final
class Group:
    """One rank's side of a region, and the table of its calls."""

    def __new__(
        cls,
        region: Region | None,
        rank: int,
        *,
        spin_us: float = 50.0,
        cores: int = 0,
        kept: int = 4096,
        fast: tuple[type, int, int, _Fingerprint] | None = None,
    ) -> Group:
        """`region` None: only the table. `spin_us`: how long to yield before a sleep. `cores`: of the host's ranks; 0: of
        this process. `kept`: recent calls. `fast`: the exact type of arrays that take the fast path, operation and
        algorithm in the fingerprint of their all_reduce, and the fingerprint of a barrier; None: no fast path.
        Allocates the rank's memory. Raises OSError if that fails or the rank has joined already.
        """
    # -- numbers and statistics
    def take(self, orders: int = 0) -> tuple[int, int]:
        """The next sequence number (from 0), and the first of `orders` order numbers (from 1)."""

    def block(self, reasons: int) -> None:
        """Set bits. While one is set, no call takes the fast path."""

    def unblock(self, reasons: int) -> None: ...
    def blocked(self) -> int: ...
    def next_sequence(self) -> int: ...
    def note(
        self,
        sequence: int,
        fingerprint: _Fingerprint,
        began: float,
        ended: float,
        size_bytes: int,
        outcome: int = 0,
        waiting: float = 0.0,
    ) -> None:
        """Record a finished call; a call that the fast path has done is recorded. `outcome`: 0 for success."""

    def recent(self) -> tuple[list[tuple[int, _Fingerprint, float, float, int, int]], int]:
        """The recent calls in the order of their ends: sequence number, fingerprint, begin, end, bytes, outcome; and how
        many earlier ones were dropped.
        """

    def totals(self) -> dict[int, tuple[int, int, float, float, int]]:
        """By operation: calls, bytes, seconds, seconds waiting, errors."""

    def last_success(self) -> tuple[int, int, int, float] | None:
        """The highest successful sequence number; of the last success operation, sequence number and end."""
    # -- the fast path
    def all_reduce(self, array: object, op: str, /) -> bool | Pending:
        """In place. True: done. False: it does not apply, and nothing was done. Otherwise the call has taken its numbers,
        and was published; wait for it. Never sleeps, and leaves a long call after 50 ms.
        """

    def barrier(self) -> bool | Pending: ...
    # -- the general path
    def post(
        self,
        order: int,
        sequence: int,
        fingerprint: _Fingerprint,
        kind: int,
        op: int = 0,
        dtype: int = 0,
        *,
        array: Buffer | None = None,
        out: Buffer | None = None,
        root: int = 0,
        counts: list[int] = ...,
        divisor: int = 0,
        background: bool = False,
    ) -> Pending:
        """Publish the call, and run the operation when its turn comes: in `Pending.wait`, or in a native thread if
        `background`. The buffers are contiguous; `dtype` gives their element size. `counts`: elements of each rank for
        REDUCE_SCATTER and ALL_GATHER; none: as equal as possible. `divisor` of an average; 0: the number of ranks.
        Raises ValueError for arguments that do not fit; then the order number must be skipped.
        """

    def rounds(self, kind: int, size_bytes: int, itemsize: int = 1, counts: list[int] = ...) -> int:
        """The rounds of an operation, for `skip`. `size_bytes`: of the longer of its two arrays."""

    def skip(self, order: int, rounds: int) -> None:
        """Take no part in an operation: the others find it aborted."""

    def publish_call(self, sequence: int, fingerprint: _Fingerprint) -> None:
        """This rank has begun a call that runs elsewhere. The first publication of a call counts."""

    def differing(self, sequence: int) -> tuple[int, _Fingerprint] | None:
        """A rank that has published another fingerprint for this call than this one. The last eight calls are kept."""

    def arrivals(self, sequence: int) -> list[int | None]:
        """When each rank published the call, in nanoseconds."""
    # -- from any thread
    def interrupt(self) -> None:
        """Every `Pending` that is not done reports INTERRUPTED once, now or at the next wait."""

    def fail(self, index: int) -> None:
        """That rank is lost: what it has published counts, more does not come."""

    def fileno(self) -> int:
        """A descriptor that is readable while `finished` has news."""

    def finished(self) -> list[int]:
        """Order numbers of the background operations that have ended since the last call."""

    def close(self) -> None:
        """End all operations; the others find them aborted. On return nothing accesses arrays. Idempotent."""

@final
class Pending:
    """An operation that was not done at once. One that is dropped before it is done is cancelled."""

    @property
    def order(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def fingerprint(self) -> _Fingerprint: ...
    @property
    def began(self) -> float: ...
    @property
    def status(self) -> int: ...
    @property
    def rank(self) -> int:
        """Whom the status concerns; -1: nobody."""

    @property
    def theirs(self) -> _Fingerprint | None:
        """For MISMATCH: the other fingerprint."""

    def wait(self, seconds: float) -> int:
        """Run it, or wait for the thread that does. Returns its status. Raises what a signal handler raises; the operation
        goes on.
        """

    def missing(self) -> list[int]:
        """The ranks that the operation waits for, or the one before it whose turn it is."""

    def moved_at(self) -> float:
        """When it last began a round; 0: it has not begun."""

    def cancel(self) -> None:
        """On return nothing accesses its arrays. The others find it aborted. No effect if it is done."""
