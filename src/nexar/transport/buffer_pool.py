"""A pool of buffers for payloads whose receive is not posted yet.

Invariant: no two leases share memory. Memory returns to the pool only when its lease is released and no view of it
exists.

Large buffers are anonymous mappings: the system commits a page when a byte arrives in it, so an announced length costs
nothing.
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
_MAPPED_FROM_BYTES: Final = 128 << 10  # below this, a mapping costs more than the zeroing it saves
# References to memory that only its releaser holds: a local variable and the argument of getrefcount. All views, slices
# and arrays together add one while any of them lives.
_UNSHARED: Final = 2


class TierStats(NamedTuple):
    """Counters of one tier."""

    size_bytes: int  # size of each buffer
    hits: int  # leases served from free buffers
    misses: int  # leases that allocated
    free: int  # free buffers
    kept: int  # limit of free buffers

    @property
    def hit_rate(self) -> float:
        return _rate(self.hits, self.misses)


class PoolStats(NamedTuple):
    """Counters of a pool."""

    hits: int  # leases served from free buffers
    misses: int  # leases of a pooled size that allocated
    unpooled: int  # leases larger than the last tier
    shared: int  # buffers not returned because a view outlived the lease
    leased: int  # leases not released yet
    free_bytes: int  # total size of free buffers
    tiers: tuple[TierStats, ...]  # per tier, smallest first

    @property
    def hit_rate(self) -> float:
        return _rate(self.hits, self.misses)

    def facts(self) -> dict[str, Any]:
        used = [tier for tier in self.tiers if tier.hits or tier.misses]
        classes = {tier.size_bytes: {**tier._asdict(), "hit_rate": tier.hit_rate} for tier in used}
        return {**self._asdict(), "hit_rate": self.hit_rate, "tiers": classes}


def _rate(hits: int, misses: int) -> float:
    return hits / (hits + misses) if hits or misses else 1.0


class Lease:
    """The right to use one buffer until `release`, which is idempotent. Any thread."""

    __slots__ = ("_memory", "_pool", "_tier", "_view")

    def __init__(self, pool: BufferPool, tier: int, memory: Memory, size: int) -> None:
        self._pool = pool
        self._tier = tier
        # Cleared under the pool's lock by the first release.
        self._memory: Memory | None = memory
        self._view: memoryview | None = memoryview(memory)[:size]

    @property
    def view(self) -> memoryview:
        """Exactly the requested bytes, uninitialised. Raises UsageError after release."""
        view = self._view
        if view is None:
            raise UsageError("this buffer was released; take another one")
        return view

    def release(self) -> None:
        pool = self._pool
        with pool._lock:
            memory, view = self._memory, self._view
            if memory is None or view is None:
                return
            self._memory = self._view = None
            try:
                view.release()
                shared = sys.getrefcount(memory) > _UNSHARED
            except BufferError:  # a thread is reading or writing through it now
                shared = True
            pool._take_back(self._tier, None if shared else memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class BufferPool:
    """Buffers in tiers (bytes, maximum of free ones), smallest first. Thread-safe."""

    def __init__(self, tiers: Sequence[tuple[int, int]]) -> None:
        self._sizes = tuple(size for size, _ in tiers)
        self._kept = tuple(kept for _, kept in tiers)
        if not tiers or list(self._sizes) != sorted(set(self._sizes)) or self._sizes[0] < 1 or min(self._kept) < 0:
            raise UsageError(f"{tiers!r} are not buffer tiers; write (bytes, count) pairs with increasing sizes")
        # Guards everything below. Reentrant: the garbage collector may run a finaliser that releases a lease.
        self._lock = threading.RLock()
        self._free: tuple[list[Memory], ...] = tuple([] for _ in tiers)
        self._hits, self._misses = [0 for _ in tiers], [0 for _ in tiers]
        self._unpooled = self._shared = self._released = 0

    @classmethod
    def of_profile(cls, profile: str | Sequence[tuple[int, int]]) -> BufferPool:
        if not isinstance(profile, str):
            return cls(profile)
        if profile not in PROFILES:
            raise UsageError(f"{profile!r} is not a buffer profile; there are {', '.join(PROFILES)}")
        return cls(list(zip(TIER_BYTES, PROFILES[profile], strict=True)))

    def take(self, size: int) -> Lease:
        """Raises MemoryError."""
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
        with self._lock:
            free = map(len, self._free)
            tiers = tuple(map(TierStats, self._sizes, self._hits, self._misses, free, self._kept))
            hits, misses = sum(self._hits), sum(self._misses)
            leased = hits + misses + self._unpooled - self._released
            free_bytes = sum(tier.size_bytes * tier.free for tier in tiers)
            return PoolStats(hits, misses, self._unpooled, self._shared, leased, free_bytes, tiers)

    def clear(self) -> None:
        with self._lock:
            for free in self._free:
                free.clear()

    def _take_back(self, tier: int, memory: Memory | None) -> None:
        """Memory that is still in use is passed as None. The caller holds the lock."""
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
    except (OSError, OverflowError, ValueError) as error:  # includes a size beyond the address space
        raise MemoryError(f"the system refused {size} bytes: {error}") from error
