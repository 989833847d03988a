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
"""

from __future__ import annotations

import struct
from time import monotonic_ns
from typing import Final

from nexar.collectives.fingerprint import Fingerprint

_WORD: Final = 8
_LINES: Final = 16  # words of a pair of cache lines: CPUs fetch them in pairs
_FROM: Final = 1
GIVEN_UP_TO: Final = 2
"""Where in a record the last slip is that its rank gave up."""
_TAKEN_AT: Final = 4
_RING: Final = 8
_ENTRY_WORDS: Final = 8
_ENTRY: Final = struct.Struct("@qqqBBBBiq")  # number, arrival, count, operation, dtype, reduce op, way, root, number
_TAKEN: Final = struct.Struct("@BBBBiq")  # operation, dtype, reduce op, way, root, count

_RECORD_WORDS: Final = _LINES + _RING * _ENTRY_WORDS
RECORD_BYTES: Final = _RECORD_WORDS * _WORD


Announcement = tuple[int, Fingerprint]
"""A collective: its sequence number, and what it is."""
GIVEN_UP: Final[Announcement] = (-1, Fingerprint(0))
"""In place of an announcement: this rank takes no part in the operation. Nothing of it is run here, since what it would
give in need not be what it should be; others find that it was given up.
"""


class Records:
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

    def give_up(self, slip: int) -> None:
        """This rank will not take part. Before it moves on to the end of the operation."""
        words, mine = self.words, self.mine
        if words[mine + GIVEN_UP_TO] != slip - 1:
            words[mine + _FROM] = slip  # first: until the other word follows, the row is empty
        words[mine + GIVEN_UP_TO] = slip

    def has_given_up(self, word: int, slip: int) -> bool:
        """Whether the rank of that record gave the operation up."""
        words = self.words
        return words[word + GIVEN_UP_TO] >= slip >= words[word + _FROM]

    # -- what a turn is taken to be --------------------------------------------------------------------

    def take(self, slip: int, fingerprint: Fingerprint) -> None:
        """What this rank takes the operation of that slip to be. Before it publishes the first round. Mostly it is
        the same as two slips before, and there is nothing to store.
        """
        parity = slip & 1
        if fingerprint == self._taken[parity]:
            return
        self._taken[parity] = fingerprint
        operation, dtype, count, root, reduce_op, way = fingerprint
        at = self.mine + _TAKEN_AT + 2 * parity
        _TAKEN.pack_into(self.bytes, at * _WORD, operation, dtype, reduce_op, way, root, count)
        self._taken_words[parity] = self.words[at], self.words[at + 1]

    def differs(self, word: int, slip: int) -> bool:
        """Whether that rank, which has published the first round, takes it to be something else."""
        words, parity = self.words, slip & 1
        at = word + _TAKEN_AT + 2 * parity
        return (words[at], words[at + 1]) != self._taken_words[parity]

    def taken(self, word: int, slip: int) -> Fingerprint:
        """As what that rank takes it."""
        at = (word + _TAKEN_AT + 2 * (slip & 1)) * _WORD
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
