"""What each rank says of itself in the arena: how far it is, what it is doing, what it gave up.

A rank writes its own record and nobody else's; each has cache lines of its own. Words are stored and loaded whole, and
on the CPUs that we run on (see transport.shm.support) they become visible in the order in which they were stored.

    word 0      the round that it has published
    words 1, 2  the first and the last slip of the operations in a row that it gave up last
    words 4..7  what it takes the operation to be, for the last even and the last odd slip: a fingerprint, two words
                each. These are on the line of word 0, so that who looks at that has them as well.
    line pair 1 announcements of the last collectives, also of those that do not run here: a ring of entries, each
    and on      with its sequence number, and one, at both ends: new memory is zero and announces nothing. The writer
                stores it first at the front, last at the back, the reader loads it first at the back: an entry that is
                written meanwhile is seen to be.

Why two words say all that was given up: a rank that completed an operation in between knows that everybody had passed
all before it. Whoever still has to come therefore comes to operations in one row, from the first of them to the last.

The memory of an arena: one segment for the ranks of one host in one generation of one communicator.

One of them makes it (`create_memory`) and tells the others its *offer*, a line of text; each opens it with that.
It has no name in any directory: it is a descriptor of its maker, which the others reach through /proc as processes of
the same user, and which the maker closes when all have come (`close_door`). So nothing is left behind, whoever dies
when. Who does not see the maker's processes (another container) or has no right to look is refused, and goes by links
instead. It is sealed, so that nobody can truncate it under the others, and allocated when it is made, so that a lack of
memory is an error then rather than a SIGBUS later. A nonce tells it from what another maker of the same number has.

    records   for each rank, lines of its own: see arena_records
    slots     for each parity of rounds, one for each rank: see arena_slots

The slots of an arena as arrays: for each parity of rounds, one for each rank.

How an all_reduce goes through the slots: in one round, or in two for each chunk.

One    Each rank gives in its array, and folds all that were given in: for few bytes, where a round costs most.
Two    Each rank gives in its array, all but its own share. It folds everybody's part of its share, and writes the
       result over what it read, into the slots of the others; each finds the shares of the others in its own slot. So
       every byte is folded by one rank only. And every cache line goes to and fro between two cores, read and then
       written by each in turn: measured on two cores, that is two to five times as fast as lines that one core only
       writes and the other only reads.

Such calls come in great numbers, and mostly alike. So what can be made beforehand is made once for each count, dtype
and reduction: views of the slots, and the function that folds.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import sys
from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.operators import Reduction
from nexar.arrays.reduce import combiner, folder
from nexar.arrays.views import split
from nexar.collectives.fingerprint import Fingerprint
from nexar.errors import UsageError
from nexar.transport.shm.ring import missing_support

_WORD: Final = 8
_LINES: Final = 16  # words of a pair of cache lines: CPUs fetch them in pairs
_FROM: Final = 1
ABORTED_UP_TO: Final = 2
"""Where in a record the last slip is that its rank gave up."""
_TAKEN_AT: Final = 4
_RING: Final = 8
_ENTRY_WORDS: Final = 8
_ENTRY: Final = struct.Struct("@qqqBBBBiq")  # number, arrival, count, operation, dtype, reduce op, way, root, number
_TAKEN: Final = struct.Struct("@BBBBiq")  # operation, dtype, reduce op, way, root, count

_RECORD_WORDS: Final = _LINES + _RING * _ENTRY_WORDS
RECORD_BYTES: Final = _RECORD_WORDS * _WORD


PublishedCall = tuple[int, Fingerprint]
"""A collective: its sequence number, and what it is."""
ABORTED: Final[PublishedCall] = (-1, Fingerprint(0))
"""In place of an announcement: this rank takes no part in the operation. Nothing of it is run here, since what it would
give in need not be what it should be; others find that it was given up.
"""


class RegionRecords:
    """The records of all ranks, seen by one of them. Only this rank's thread that has the arena's turn publishes; from
    any thread it announces and looks.
    """

    def __init__(self, memory: memoryview, rank: int, size: int) -> None:
        self.bytes = memory
        self.words = memory.cast("q")
        self.mine = rank * _RECORD_WORDS
        """Where this rank's round is in `words`."""
        self.all = tuple(index * _RECORD_WORDS for index in range(size))
        self.others = tuple(word for word in self.all if word != self.mine)
        self._taken: list[Fingerprint | None] = [None, None]  # for the last even and the last odd slip
        self._taken_words = [(0, 0), (0, 0)]  # the same as it is in memory

    def index(self, word: int) -> int:
        """Whose record begins at that word."""
        return word // _RECORD_WORDS

    # -- giving up -------------------------------------------------------------------------------------

    def give_up(self, order_number: int) -> None:
        """This rank will not take part. Before it moves on to the end of the operation."""
        words, mine = self.words, self.mine
        if words[mine + ABORTED_UP_TO] != order_number - 1:
            words[mine + _FROM] = order_number  # first: until the other word follows, the row is empty
        words[mine + ABORTED_UP_TO] = order_number

    def has_aborted(self, word: int, order_number: int) -> bool:
        """Whether the rank of that record gave the operation up."""
        words = self.words
        return words[word + ABORTED_UP_TO] >= order_number >= words[word + _FROM]

    # -- what a turn is taken to be --------------------------------------------------------------------

    def take(self, order_number: int, fingerprint: Fingerprint) -> None:
        """What this rank takes the operation of that slip to be. Before it publishes the first round. Mostly it is
        the same as two slips before, and there is nothing to store.
        """
        parity = order_number & 1
        if fingerprint == self._taken[parity]:
            return
        self._taken[parity] = fingerprint
        operation, dtype, count, root, reduce_op, way = fingerprint
        at = self.mine + _TAKEN_AT + 2 * parity
        _TAKEN.pack_into(self.bytes, at * _WORD, operation, dtype, reduce_op, way, root, count)
        self._taken_words[parity] = self.words[at], self.words[at + 1]

    def differs(self, word: int, order_number: int) -> bool:
        """Whether that rank, which has published the first round, takes it to be something else."""
        words, parity = self.words, order_number & 1
        at = word + _TAKEN_AT + 2 * parity
        return (words[at], words[at + 1]) != self._taken_words[parity]

    def taken(self, word: int, order_number: int) -> Fingerprint:
        """As what that rank takes it."""
        at = (word + _TAKEN_AT + 2 * (order_number & 1)) * _WORD
        operation, dtype, reduce_op, way, root, count = _TAKEN.unpack_from(self.bytes, at)
        return Fingerprint(operation, dtype, count, root, reduce_op, way)

    # -- announcements ---------------------------------------------------------------------------------

    def announce(self, sequence: int, fingerprint: Fingerprint) -> None:
        """This rank has come to its collective `sequence`."""
        operation, dtype, count, root, reduce_op, way = fingerprint
        at = (self.mine + _LINES + sequence % _RING * _ENTRY_WORDS) * _WORD
        now, number = monotonic_ns(), sequence + 1
        _ENTRY.pack_into(self.bytes, at, number, now, count, operation, dtype, reduce_op, way, root, number)

    def disagreement(self, sequence: int) -> tuple[int, Fingerprint] | None:
        """A rank that announced something else than this one did, and what."""
        mine = self.announced(self.mine, sequence)
        for word in self.others:
            theirs = self.announced(word, sequence)
            if mine is not None and theirs is not None and mine[0] != theirs[0]:
                return self.index(word), theirs[0]
        return None

    def arrivals(self, sequence: int) -> list[int | None]:
        """When each rank announced it, of monotonic_ns."""
        announced = [self.announced(word, sequence) for word in self.all]
        return [None if each is None else each[1] for each in announced]

    def announced(self, word: int, sequence: int) -> tuple[Fingerprint, int] | None:
        """What that rank announced, and when (monotonic_ns). None: it has not come, or it was too long ago."""
        at = word + _LINES + sequence % _RING * _ENTRY_WORDS
        if self.words[at + _ENTRY.size // _WORD - 1] != sequence + 1:
            return None
        _, arrival, count, operation, dtype, reduce_op, way, root, _ = _ENTRY.unpack_from(self.bytes, at * _WORD)
        if self.words[at] != sequence + 1:
            return None
        return Fingerprint(operation, dtype, count, root, reduce_op, way), arrival

    def release(self) -> None:
        """Let go of the memory."""
        self.words.release()
        self.bytes.release()


TOTAL_BYTES: Final = 16 << 20
"""At most, whatever the number of ranks."""
SLOT_BYTES: Final = 1 << 20
"""At most, of what one rank gives in at a time."""

_PAGE: Final = 4096
_NONCE_BYTES: Final = 16
_SEALS: Final = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4) | getattr(fcntl, "F_SEAL_SEAL", 1)
_ADD_SEALS: Final = getattr(fcntl, "F_ADD_SEALS", 1033)
_GET_SEALS: Final = getattr(fcntl, "F_GET_SEALS", 1034)


class RegionGeometry(NamedTuple):
    """How the segment of so many ranks is divided: the same for each of them, without a word."""

    size: int
    slot_bytes: int
    """What a rank can give in at a time."""

    @classmethod
    def of(cls, size: int, slot_bytes: int = SLOT_BYTES) -> RegionGeometry:
        """For `size` ranks. Both slots of all ranks stay within TOTAL_BYTES."""
        room = TOTAL_BYTES // (2 * size)
        return cls(size, max(min(slot_bytes, room) // _PAGE, 1) * _PAGE)

    @property
    def slots_at(self) -> int:
        """Where the slots begin. The nonce comes first, then the records."""
        return _PAGE + -(-self.size * RECORD_BYTES // _PAGE) * _PAGE

    @property
    def total_bytes(self) -> int:
        """Of the whole segment."""
        return self.slots_at + 2 * self.size * self.slot_bytes


class RegionMemory:
    """A mapping of the segment. Close it: that unmaps it here, and touches nobody else."""

    def __init__(self, mapping: mmap.mmap, geometry: RegionGeometry, offer: str, descriptor: int | None) -> None:
        self.geometry = geometry
        self.offer = offer
        """What the others must be told. It is no secret: who can use it could also read the maker's memory."""
        self.mapping: mmap.mmap | None = mapping
        self._descriptor = descriptor

    def records(self) -> memoryview:
        """Where the ranks' records are."""
        assert self.mapping is not None
        return memoryview(self.mapping)[_PAGE : self.geometry.slots_at]

    def close_door(self) -> None:
        """All have opened it: nobody else can any more. Idempotent; by its maker."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Idempotent. Whoever keeps an array in it keeps the mapping, until that goes."""
        self.close_door()
        mapping, self.mapping = self.mapping, None
        if mapping is None:
            return
        try:
            mapping.close()
        except BufferError:
            return  # goes with the last array


def create_memory(size: int, slot_bytes: int = SLOT_BYTES) -> RegionMemory:
    """For `size` ranks. OSError, with the reason, where there can be none."""
    reason = missing_support()
    if reason is not None:
        raise OSError(reason)
    geometry = RegionGeometry.of(size, slot_bytes)
    descriptor = os.memfd_create("nexar-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, geometry.total_bytes)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
        mapping = _map(descriptor, geometry.total_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    nonce = secrets.token_bytes(_NONCE_BYTES)
    mapping[:_NONCE_BYTES] = nonce
    offer = f"{os.getpid()} {descriptor} {geometry.slot_bytes} {nonce.hex()}"
    return RegionMemory(mapping, geometry, offer, descriptor)


def open_memory(offer: str, size: int) -> RegionMemory:
    """What a process of this host made for `size` ranks. OSError, with the reason, if it cannot be had from here."""
    reason = missing_support()
    if reason is not None:
        raise OSError(reason)
    process, number, slot_bytes, nonce = offer.split()
    geometry = RegionGeometry.of(size, int(slot_bytes))
    descriptor = os.open(f"/proc/{int(process)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC)
    try:
        _check(descriptor, geometry)
        mapping = _map(descriptor, geometry.total_bytes)
    finally:
        os.close(descriptor)
    if mapping[:_NONCE_BYTES] != bytes.fromhex(nonce):
        mapping.close()
        raise OSError(f"descriptor {number} of process {process} is another segment than the one that was meant")
    return RegionMemory(mapping, geometry, offer, None)


def _check(descriptor: int, geometry: RegionGeometry) -> None:
    """Nothing is believed that could harm."""
    try:
        seals = fcntl.fcntl(descriptor, _GET_SEALS)
    except OSError as error:
        raise OSError("the descriptor is not a memory segment") from error
    facts = os.fstat(descriptor)
    if seals & _SEALS != _SEALS or facts.st_size != geometry.total_bytes or facts.st_blocks * 512 < facts.st_size:
        raise OSError(
            f"the segment has {facts.st_size} bytes, {facts.st_blocks * 512} of them allocated, and seals {seals:#x}; "
            f"expected: {geometry.total_bytes} bytes, sealed"
        )


def _map(descriptor: int, size: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size, trackfd=False)
    return mmap.mmap(descriptor, size)


Rows = tuple[tuple[NDArray[Any], ...], tuple[NDArray[Any], ...]]
"""For each parity, for each rank, a row of elements."""


class RegionSlots:
    """Belongs to who has the arena's turn."""

    def __init__(self, memory: RegionMemory, rank: int) -> None:
        self.rank = rank
        self.size = memory.geometry.size
        self.parity = 0
        """Of the round that the operation which begins now prepares first. The next one has the other, and so on."""
        self.slot_bytes = memory.geometry.slot_bytes
        self._mapping = memory.mapping
        self._begin = memory.geometry.slots_at
        self._rows: dict[np.dtype[Any], Rows] = {}

    def of(self, dtype: np.dtype[Any]) -> Rows:
        """As rows of that dtype; kept for each that is used."""
        rows = self._rows.get(dtype)
        if rows is None:
            rows = self._rows[dtype] = self._row(0, dtype), self._row(1, dtype)
        return rows

    def capacity(self, dtype: np.dtype[Any]) -> int:
        """Elements of a slot."""
        return self.slot_bytes // dtype.itemsize

    def _row(self, parity: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], ...]:
        mapping = self._mapping
        if mapping is None:
            raise UsageError(
                "this communicator is closed, or of the parent of this process; use it before closing it, and in a "
                "forked child make another one with nexar.init()"
            )
        length = self.slot_bytes
        begins = (self._begin + (parity * self.size + rank) * length for rank in range(self.size))
        return tuple(np.frombuffer(mapping, np.uint8, length, at).view(dtype) for at in begins)

    def release(self) -> None:
        """Let go of the memory."""
        self._rows.clear()
        self._mapping = None


SMALL_BYTES: Final = 32 << 10
"""Of what all ranks give in together: up to here one round, above it two."""

_MOST_PLANS: Final = 64

Row = NDArray[Any]
Fold = Callable[[Row, list[Row]], None]


class OneRound:
    """For one count, dtype and reduction."""

    rounds: Final = 1
    __slots__ = ("_fold", "_inputs", "_mine", "_slots")

    def __init__(self, slots: RegionSlots, count: int, dtype: Any, fold: Fold) -> None:
        rows = slots.of(dtype)
        self._slots = slots
        self._fold = fold
        self._mine = tuple(each[slots.rank][:count] for each in rows)
        self._inputs = tuple([row[:count] for row in each] for each in rows)

    def run(self, array: Row, out: Row | None, root: int | None) -> Iterator[None]:
        """See shared_memory.all_reduce."""
        parity = self._slots.parity
        self._mine[parity][...] = array
        yield
        if out is not None:
            self._fold(out, self._inputs[parity])


class TwoRounds:
    """For one count, dtype and reduction. Between `give` and `work`, and between `work` and `collect`, is a round."""

    rounds: Final = 2
    __slots__ = ("_fold", "_inputs", "_mine", "_others", "_own", "_rank", "_slots")

    def __init__(self, slots: RegionSlots, count: int, dtype: Any, fold: Fold) -> None:
        rank, rows = slots.rank, slots.of(dtype)
        shares = [slice(*span) for span in split(count, slots.size)]
        self._slots = slots
        self._rank = rank
        self._fold = fold
        self._mine = mine = shares[rank]
        self._inputs = tuple([row[mine] for row in each] for each in rows)
        self._own = tuple(
            [(share, each[rank][share]) for share in shares if share is not mine and share.stop > share.start]
            for each in rows
        )
        self._others = [other for other in range(slots.size) if other != rank]

    def run(self, array: Row, out: Row | None, root: int | None) -> Iterator[None]:
        """See shared_memory.all_reduce."""
        parity = self._slots.parity
        self.give(parity, array)
        yield
        self.work(parity, array, out, root)
        yield
        if out is not None:
            self.collect(parity, out)

    def give(self, parity: int, array: Row) -> None:
        """All but what only this rank needs."""
        for share, slot in self._own[parity]:
            slot[...] = array[share]

    def work(self, parity: int, array: Row, out: Row | None, root: int | None) -> None:
        """My share of everybody's, for everybody or for the root."""
        given = self._inputs[parity]
        inputs = given.copy()
        inputs[self._rank] = array[self._mine]
        result = given[self._rank] if out is None else out[self._mine]
        self._fold(result, inputs)
        for other in self._others:
            if root is None or root == other:
                given[other][...] = result

    def collect(self, parity: int, out: Row) -> None:
        """The shares of the others. My own is there since I worked it out."""
        for share, slot in self._own[parity]:
            out[share] = slot


Plan = OneRound | TwoRounds


class RegionPlans:
    """Made by any thread, used by who has the turn."""

    def __init__(self, slots: RegionSlots) -> None:
        self.slots = slots
        self._small = min(SMALL_BYTES // slots.size, slots.slot_bytes)
        self._plans: dict[tuple[int, int, int], tuple[Plan, Reduction]] = {}  # the reduction: so that its id stays its

    def of(self, array: Row, reduction: Reduction) -> Plan | None:
        """None: the array does not fit into a slot. The oldest is forgotten where there are too many."""
        key = (len(array), array.dtype.num, id(reduction))
        found = self._plans.get(key)
        if found is not None:
            return found[0]
        if array.nbytes > self.slots.slot_bytes:
            return None
        while len(self._plans) >= _MOST_PLANS:
            self._plans.pop(next(iter(self._plans)), None)
        kind = OneRound if array.nbytes <= self._small else TwoRounds
        plan = kind(self.slots, len(array), array.dtype, folding(self.slots.size, array.dtype, reduction))
        self._plans[key] = plan, reduction
        return plan

    def release(self) -> None:
        """Let go of the memory."""
        self._plans.clear()


def folding(size: int, dtype: Any, reduction: Reduction) -> Fold:
    """What folds the inputs of all ranks. It divides an average too, before a half type is rounded."""
    return _fold_two(dtype, reduction) if size == 2 else folder(reduction, dtype, size)


def _fold_two(dtype: Any, reduction: Reduction) -> Fold:
    """Without a loop."""
    combine = combiner(reduction, dtype, 2)
    return lambda out, inputs: combine(out, inputs[0], inputs[1])
