"""The memory of an arena: one segment for the ranks of one host in one generation of one communicator.

One of them makes it (`create_memory`) and tells the others its *offer*, a line of text; each opens it with that.
It has no name in any directory: it is a descriptor of its maker, which the others reach through /proc as processes of
the same user, and which the maker closes when all have come (`close_door`). So nothing is left behind, whoever dies
when. Who does not see the maker's processes (another container) or has no right to look is refused, and goes by links
instead. It is sealed, so that nobody can truncate it under the others, and allocated when it is made, so that a lack of
memory is an error then rather than a SIGBUS later. A nonce tells it from what another maker of the same number has.

    records   for each rank, lines of its own: see arena_records
    slots     for each parity of rounds, one for each rank: see arena_slots
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import sys
from typing import Final, NamedTuple

from nexar.collectives.arena_records import RECORD_BYTES
from nexar.transport.shm.support import missing_support

TOTAL_BYTES: Final = 16 << 20
"""At most, whatever the number of ranks."""
SLOT_BYTES: Final = 1 << 20
"""At most, of what one rank gives in at a time."""

_PAGE: Final = 4096
_NONCE_BYTES: Final = 16
_SEALS: Final = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4) | getattr(fcntl, "F_SEAL_SEAL", 1)
_ADD_SEALS: Final = getattr(fcntl, "F_ADD_SEALS", 1033)
_GET_SEALS: Final = getattr(fcntl, "F_GET_SEALS", 1034)


class Geometry(NamedTuple):
    """How the segment of so many ranks is divided: the same for each of them, without a word."""

    size: int
    slot_bytes: int
    """What a rank can give in at a time."""

    @classmethod
    def of(cls, size: int, slot_bytes: int = SLOT_BYTES) -> Geometry:
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


class ArenaMemory:
    """A mapping of the segment. Close it: that unmaps it here, and touches nobody else."""

    def __init__(self, mapping: mmap.mmap, geometry: Geometry, offer: str, descriptor: int | None) -> None:
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


def create_memory(size: int, slot_bytes: int = SLOT_BYTES) -> ArenaMemory:
    """For `size` ranks. OSError, with the reason, where there can be none."""
    reason = missing_support()
    if reason is not None:
        raise OSError(reason)
    geometry = Geometry.of(size, slot_bytes)
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
    return ArenaMemory(mapping, geometry, offer, descriptor)


def open_memory(offer: str, size: int) -> ArenaMemory:
    """What a process of this host made for `size` ranks. OSError, with the reason, if it cannot be had from here."""
    reason = missing_support()
    if reason is not None:
        raise OSError(reason)
    process, number, slot_bytes, nonce = offer.split()
    geometry = Geometry.of(size, int(slot_bytes))
    descriptor = os.open(f"/proc/{int(process)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC)
    try:
        _check(descriptor, geometry)
        mapping = _map(descriptor, geometry.total_bytes)
    finally:
        os.close(descriptor)
    if mapping[:_NONCE_BYTES] != bytes.fromhex(nonce):
        mapping.close()
        raise OSError(f"descriptor {number} of process {process} is another segment than the one that was meant")
    return ArenaMemory(mapping, geometry, offer, None)


def _check(descriptor: int, geometry: Geometry) -> None:
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
