"""The memory layout of a shared region: records and slots of the ranks of one host.

A rank writes only its own record. Words are atomic and become visible in store order on the supported CPUs.

    word 0      round counter: the last published round
    words 1, 2  first and last order number of the latest consecutive aborted operations
    words 4..7  fingerprints of the operations with the last even and odd order number
    then        ring of announcements. Each entry has sequence number + 1 at both ends; the writer stores the front
                first, the reader loads the back first, so a torn entry is detected

The memfd has no name: processes of the same user open it through /proc, and the creator closes it once all have it. It
is sealed against truncation, and allocated at creation to avoid SIGBUS. A nonce detects a reused pid or descriptor.

A small all_reduce takes one round: each rank folds all arrays. A larger one takes two: each rank folds its share and
writes the result over the slots it read, which measured two to five times as fast as one-way cache lines.
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
_LINES: Final = 16  # words in a pair of cache lines, because CPUs fetch pairs
_FROM: Final = 1
ABORTED_UP_TO: Final = 2
"""Index of the last aborted order number in a record."""
_TAKEN_AT: Final = 4
_RING: Final = 8
_ENTRY_WORDS: Final = 8
_ENTRY: Final = struct.Struct("@qqqBBBBiq")  # number, arrival, count, operation, dtype, reduce op, way, root, number
_TAKEN: Final = struct.Struct("@BBBBiq")  # operation, dtype, reduce op, way, root, count

_RECORD_WORDS: Final = _LINES + _RING * _ENTRY_WORDS
RECORD_BYTES: Final = _RECORD_WORDS * _WORD


PublishedCall = tuple[int, Fingerprint]
"""A collective: its sequence number and fingerprint."""
ABORTED: Final[PublishedCall] = (-1, Fingerprint(0))
"""In place of an announcement: this rank aborts the operation and runs nothing of it."""


class RegionRecords:
    """All records, used by one rank. Only the holder of the region lock publishes; any thread announces and reads."""

    def __init__(self, memory: memoryview, rank: int, size: int) -> None:
        self.bytes = memory
        self.words = memory.cast("q")
        self.mine = rank * _RECORD_WORDS
        self.all = tuple(index * _RECORD_WORDS for index in range(size))
        self.others = tuple(word for word in self.all if word != self.mine)
        self._taken: list[Fingerprint | None] = [None, None]  # for the last even and odd order number
        self._taken_words = [(0, 0), (0, 0)]  # the same as stored in memory

    def index(self, word: int) -> int:
        return word // _RECORD_WORDS

    # -- aborts -----------------------------------------------------------------------------------------

    def mark_aborted(self, order_number: int) -> None:
        """Call this before the round counter moves to the operation's end."""
        words, mine = self.words, self.mine
        if words[mine + ABORTED_UP_TO] != order_number - 1:
            words[mine + _FROM] = order_number  # first: until the other word follows, the range is empty
        words[mine + ABORTED_UP_TO] = order_number

    def has_aborted(self, word: int, order_number: int) -> bool:
        words = self.words
        return words[word + ABORTED_UP_TO] >= order_number >= words[word + _FROM]

    # -- fingerprints of operations ----------------------------------------------------------------------

    def take(self, order_number: int, fingerprint: Fingerprint) -> None:
        """Store the fingerprint before the first round is published."""
        parity = order_number & 1
        if fingerprint == self._taken[parity]:
            return
        self._taken[parity] = fingerprint
        operation, dtype, count, root, reduce_op, way = fingerprint
        at = self.mine + _TAKEN_AT + 2 * parity
        _TAKEN.pack_into(self.bytes, at * _WORD, operation, dtype, reduce_op, way, root, count)
        self._taken_words[parity] = self.words[at], self.words[at + 1]

    def differs(self, word: int, order_number: int) -> bool:
        words, parity = self.words, order_number & 1
        at = word + _TAKEN_AT + 2 * parity
        return (words[at], words[at + 1]) != self._taken_words[parity]

    def taken(self, word: int, order_number: int) -> Fingerprint:
        at = (word + _TAKEN_AT + 2 * (order_number & 1)) * _WORD
        operation, dtype, reduce_op, way, root, count = _TAKEN.unpack_from(self.bytes, at)
        return Fingerprint(operation, dtype, count, root, reduce_op, way)

    # -- announcements ---------------------------------------------------------------------------------

    def announce(self, sequence: int, fingerprint: Fingerprint) -> None:
        operation, dtype, count, root, reduce_op, way = fingerprint
        at = (self.mine + _LINES + sequence % _RING * _ENTRY_WORDS) * _WORD
        now, number = monotonic_ns(), sequence + 1
        _ENTRY.pack_into(self.bytes, at, number, now, count, operation, dtype, reduce_op, way, root, number)

    def disagreement(self, sequence: int) -> tuple[int, Fingerprint] | None:
        mine = self.announced(self.mine, sequence)
        for word in self.others:
            theirs = self.announced(word, sequence)
            if mine is not None and theirs is not None and mine[0] != theirs[0]:
                return self.index(word), theirs[0]
        return None

    def arrivals(self, sequence: int) -> list[int | None]:
        """Announcement times (monotonic_ns)."""
        announced = [self.announced(word, sequence) for word in self.all]
        return [None if each is None else each[1] for each in announced]

    def announced(self, word: int, sequence: int) -> tuple[Fingerprint, int] | None:
        """Announcement and time (monotonic_ns); None: missing or overwritten."""
        at = word + _LINES + sequence % _RING * _ENTRY_WORDS
        if self.words[at + _ENTRY.size // _WORD - 1] != sequence + 1:
            return None
        _, arrival, count, operation, dtype, reduce_op, way, root, _ = _ENTRY.unpack_from(self.bytes, at * _WORD)
        if self.words[at] != sequence + 1:
            return None
        return Fingerprint(operation, dtype, count, root, reduce_op, way), arrival

    def release(self) -> None:
        self.words.release()
        self.bytes.release()


TOTAL_BYTES: Final = 16 << 20
"""Upper limit for any number of ranks."""
SLOT_BYTES: Final = 1 << 20
"""Upper limit of one rank's slot."""

_PAGE: Final = 4096
_NONCE_BYTES: Final = 16
_SEALS: Final = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4) | getattr(fcntl, "F_SEAL_SEAL", 1)
_ADD_SEALS: Final = getattr(fcntl, "F_ADD_SEALS", 1033)
_GET_SEALS: Final = getattr(fcntl, "F_GET_SEALS", 1034)


class RegionGeometry(NamedTuple):
    """Layout of the segment."""

    size: int
    slot_bytes: int

    @classmethod
    def of(cls, size: int, slot_bytes: int = SLOT_BYTES) -> RegionGeometry:
        room = TOTAL_BYTES // (2 * size)
        return cls(size, max(min(slot_bytes, room) // _PAGE, 1) * _PAGE)

    @property
    def slots_at(self) -> int:
        return _PAGE + -(-self.size * RECORD_BYTES // _PAGE) * _PAGE

    @property
    def total_bytes(self) -> int:
        return self.slots_at + 2 * self.size * self.slot_bytes


class RegionMemory:
    """A mapping of the segment."""

    def __init__(self, mapping: mmap.mmap, geometry: RegionGeometry, offer: str, descriptor: int | None) -> None:
        self.geometry = geometry
        self.offer = offer
        """Text for the other ranks. Not a secret: its users could also read the creator's memory."""
        self.mapping: mmap.mmap | None = mapping
        self._descriptor = descriptor

    def records(self) -> memoryview:
        assert self.mapping is not None
        return memoryview(self.mapping)[_PAGE : self.geometry.slots_at]

    def close_descriptor(self) -> None:
        """No further process can open the memory afterwards. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Arrays in the mapping keep it alive. Idempotent."""
        self.close_descriptor()
        mapping, self.mapping = self.mapping, None
        if mapping is None:
            return
        try:
            mapping.close()
        except BufferError:
            return  # unmapped with the last array


def create_memory(size: int, slot_bytes: int = SLOT_BYTES) -> RegionMemory:
    """Raises OSError with the reason."""
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
    """Raises OSError with the reason."""
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
    """A wrong segment could crash this process."""
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
"""By parity and rank: a row of elements."""


class RegionSlots:
    """The slots as arrays. The region lock guards them."""

    def __init__(self, memory: RegionMemory, rank: int) -> None:
        self.rank = rank
        self.size = memory.geometry.size
        self.parity = 0
        """Parity of the next operation's first round."""
        self.slot_bytes = memory.geometry.slot_bytes
        self._mapping = memory.mapping
        self._begin = memory.geometry.slots_at
        self._rows: dict[np.dtype[Any], Rows] = {}

    def of(self, dtype: np.dtype[Any]) -> Rows:
        rows = self._rows.get(dtype)
        if rows is None:
            rows = self._rows[dtype] = self._row(0, dtype), self._row(1, dtype)
        return rows

    def capacity(self, dtype: np.dtype[Any]) -> int:
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
        self._rows.clear()
        self._mapping = None


SMALL_BYTES: Final = 32 << 10
"""Total bytes up to which one round is used."""

_MOST_PLANS: Final = 64

Row = NDArray[Any]
Fold = Callable[[Row, list[Row]], None]


class OneRound:
    """A one-round all_reduce of one count, dtype and reduction."""

    rounds: Final = 1
    __slots__ = ("_fold", "_inputs", "_mine", "_slots")

    def __init__(self, slots: RegionSlots, count: int, dtype: Any, fold: Fold) -> None:
        rows = slots.of(dtype)
        self._slots = slots
        self._fold = fold
        self._mine = tuple(each[slots.rank][:count] for each in rows)
        self._inputs = tuple([row[:count] for row in each] for each in rows)

    def run(self, array: Row, out: Row | None, root: int | None) -> Iterator[None]:
        parity = self._slots.parity
        self._mine[parity][...] = array
        yield
        if out is not None:
            self._fold(out, self._inputs[parity])


class TwoRounds:
    """A two-round all_reduce of one count, dtype and reduction."""

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
        parity = self._slots.parity
        self.give(parity, array)
        yield
        self.work(parity, array, out, root)
        yield
        if out is not None:
            self.collect(parity, out)

    def give(self, parity: int, array: Row) -> None:
        for share, slot in self._own[parity]:
            slot[...] = array[share]

    def work(self, parity: int, array: Row, out: Row | None, root: int | None) -> None:
        given = self._inputs[parity]
        inputs = given.copy()
        inputs[self._rank] = array[self._mine]
        result = given[self._rank] if out is None else out[self._mine]
        self._fold(result, inputs)
        for other in self._others:
            if root is None or root == other:
                given[other][...] = result

    def collect(self, parity: int, out: Row) -> None:
        for share, slot in self._own[parity]:
            out[share] = slot


Plan = OneRound | TwoRounds


class RegionPlans:
    """Cached plans. Any thread creates them, the holder of the region lock uses them."""

    def __init__(self, slots: RegionSlots) -> None:
        self.slots = slots
        self._small = min(SMALL_BYTES // slots.size, slots.slot_bytes)
        # keeping the reduction keeps its id unique
        self._plans: dict[tuple[int, int, int], tuple[Plan, Reduction]] = {}

    def of(self, array: Row, reduction: Reduction) -> Plan | None:
        """None if the array exceeds a slot."""
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
        self._plans.clear()


def folding(size: int, dtype: Any, reduction: Reduction) -> Fold:
    """Fold of all ranks' inputs, including the division of an average."""
    return _fold_two(dtype, reduction) if size == 2 else folder(reduction, dtype, size)


def _fold_two(dtype: Any, reduction: Reduction) -> Fold:
    combine = combiner(reduction, dtype, 2)
    return lambda out, inputs: combine(out, inputs[0], inputs[1])
