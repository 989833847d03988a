"""Memory for payloads whose receive is not posted yet, in a few sizes that are used again.

Law: a lease is the only way to its memory. Memory goes back to the pool when its lease is released *and* nobody else
holds a view of it; a view, a slice or an array that outlives its lease keeps that memory alive and out of the pool, so
no two leases ever share memory, whatever a caller kept.

Large buffers are anonymous mappings: the system commits a page when a byte arrives in it, so a declared length costs
nothing. Each tier keeps so many free buffers and no more, and has none until some were used.
"""

from __future__ import annotations

import mmap
import sys
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeAlias

from nexar.errors import UsageError

Memory: TypeAlias = bytearray | mmap.mmap

TIER_BYTES: Final = (64 << 10, 8 << 20, 64 << 20, 256 << 20)
PROFILES: Final[Mapping[str, tuple[int, ...]]] = {"training": (256, 32, 16, 4), "inference": (256, 16, 4, 0)}
_MAPPED_FROM_BYTES: Final = 128 << 10  # below, a mapping of its own costs more than the zeros it saves
# References to memory that only its releaser knows: a local variable, and the argument of getrefcount. Views, slices
# and arrays together hold one more, for as long as the last of them lives.
_UNSHARED: Final = 2


class TierStats(NamedTuple):
    """What one tier of a pool has done so far."""

    size_bytes: int  # of each of its buffers
    hits: int  # leases served with memory used before
    misses: int  # leases for which memory had to be made
    free: int  # buffers that wait to be used again
    kept: int  # the most that may

    @property
    def hit_rate(self) -> float:
        """Of its leases, how many were hits; 1 before the first."""
        return _rate(self.hits, self.misses)


class PoolStats(NamedTuple):
    """What a pool has done so far."""

    hits: int  # leases served with memory used before
    misses: int  # leases for which memory had to be made, in a size that is pooled
    unpooled: int  # leases larger than the last tier
    shared: int  # buffers lost to the pool because somebody still held a view when the lease was released
    leased: int  # leases not released yet
    free_bytes: int  # memory that waits to be used again
    tiers: tuple[TierStats, ...]  # the same by tier, the smallest first

    @property
    def hit_rate(self) -> float:
        """Of the leases that could have been hits, how many were; 1 before the first."""
        return _rate(self.hits, self.misses)

    def facts(self) -> dict[str, Any]:
        """As `stats()` of a communicator gives them: plain, with the tiers that were used by their size."""
        used = [tier for tier in self.tiers if tier.hits or tier.misses]
        classes = {tier.size_bytes: {**tier._asdict(), "hit_rate": tier.hit_rate} for tier in used}
        return {**self._asdict(), "hit_rate": self.hit_rate, "tiers": classes}


def _rate(hits: int, misses: int) -> float:
    return hits / (hits + misses) if hits or misses else 1.0


class Lease:
    """Memory for a while. Release it once it is no longer needed; as often as you like, from any thread."""

    __slots__ = ("_memory", "_pool", "_tier", "_view")

    def __init__(self, pool: BufferPool, tier: int, memory: Memory, size: int) -> None:
        self._pool = pool
        self._tier = tier
        # Both taken away under the pool's lock, by whoever releases first.
        self._memory: Memory | None = memory
        self._view: memoryview | None = memoryview(memory)[:size]

    @property
    def view(self) -> memoryview:
        """Exactly as many bytes as were asked for; their content is whatever was there. UsageError once released."""
        view = self._view
        if view is None:
            raise UsageError("this buffer was released; take another one")
        return view

    def release(self) -> None:
        """Give the memory back. Views of it that were handed out cannot be used any more."""
        pool = self._pool
        with pool._lock:
            memory, view = self._memory, self._view
            if memory is None or view is None:
                return
            self._memory = self._view = None
            try:
                view.release()
                shared = sys.getrefcount(memory) > _UNSHARED
            except BufferError:  # somebody reads or writes through it at this moment
                shared = True
            pool._take_back(self._tier, None if shared else memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class BufferPool:
    """Tiers of buffers: (bytes, how many free ones are kept), the smallest first. Every method is thread-safe."""

    def __init__(self, tiers: Sequence[tuple[int, int]]) -> None:
        self._sizes = tuple(size for size, _ in tiers)
        self._kept = tuple(kept for _, kept in tiers)
        if not tiers or list(self._sizes) != sorted(set(self._sizes)) or self._sizes[0] < 1 or min(self._kept) < 0:
            raise UsageError(f"{tiers!r} are not buffer tiers: (bytes, how many), sizes growing")
        # Guards everything below. Reentrant: the collector may run a finaliser that releases a lease meanwhile.
        self._lock = threading.RLock()
        self._free: tuple[list[Memory], ...] = tuple([] for _ in tiers)
        self._hits, self._misses = [0 for _ in tiers], [0 for _ in tiers]
        self._unpooled = self._shared = self._released = 0

    @classmethod
    def of_profile(cls, profile: str | Sequence[tuple[int, int]]) -> BufferPool:
        """A named profile, or explicit tiers."""
        if not isinstance(profile, str):
            return cls(profile)
        if profile not in PROFILES:
            raise UsageError(f"{profile!r} is not a buffer profile; there are {', '.join(PROFILES)}")
        return cls(list(zip(TIER_BYTES, PROFILES[profile], strict=True)))

    def take(self, size: int) -> Lease:
        """Memory for `size` bytes. MemoryError if there is none."""
        tier = bisect_left(self._sizes, size)
        if tier == len(self._sizes):
            memory = _make(size)
            with self._lock:
                self._unpooled += 1
            return Lease(self, tier, memory, size)
        with self._lock:
            free = self._free[tier]
            used = free.pop() if free else None
            if used is not None:
                self._hits[tier] += 1
                return Lease(self, tier, used, size)
        made = _make(self._sizes[tier])
        with self._lock:
            self._misses[tier] += 1
        return Lease(self, tier, made, size)

    def stats(self) -> PoolStats:
        """Counters, all of one moment."""
        with self._lock:
            free = map(len, self._free)
            tiers = tuple(map(TierStats, self._sizes, self._hits, self._misses, free, self._kept))
            hits, misses = sum(self._hits), sum(self._misses)
            leased = hits + misses + self._unpooled - self._released
            free_bytes = sum(tier.size_bytes * tier.free for tier in tiers)
            return PoolStats(hits, misses, self._unpooled, self._shared, leased, free_bytes, tiers)

    def clear(self) -> None:
        """Give all free memory back to the system."""
        with self._lock:
            for free in self._free:
                free.clear()

    def _take_back(self, tier: int, memory: Memory | None) -> None:
        """Under the lock: a lease is over; its memory, unless somebody holds on to it."""
        self._released += 1
        if memory is None:
            self._shared += 1
        elif tier < len(self._free) and len(self._free[tier]) < self._kept[tier]:
            self._free[tier].append(memory)


def _make(size: int) -> Memory:
    if size < _MAPPED_FROM_BYTES:
        return bytearray(size)
    try:
        return mmap.mmap(-1, size)
    except (OSError, OverflowError, ValueError) as error:  # also a size that no address space holds
        raise MemoryError(f"the system refused {size} bytes: {error}") from error
