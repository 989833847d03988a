"""Pooled memory: used again, never shared, never larger than what was kept."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.errors import UsageError
from nexar.transport.buffer_pool import PROFILES, TIER_BYTES, BufferPool
from tests.conformance.harness import anonymous_bytes

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool([(1000, 2), (10_000, 1), (300_000, 1)])


@given(st.integers(0, 400_000))
def test_a_lease_has_exactly_the_bytes_asked_for(size: int) -> None:
    pool = BufferPool([(1000, 2), (10_000, 1), (300_000, 1)])
    with pool.take(size) as lease:
        assert len(lease.view) == size
        assert not lease.view.readonly
        assert lease.view.format == "B"


def test_released_memory_is_used_again(pool: BufferPool) -> None:
    first = pool.take(10)
    first.view[:4] = b"mark"
    first.release()
    second = pool.take(500)
    assert bytes(second.view[:4]) == b"mark"
    assert (pool.stats().hits, pool.stats().misses) == (1, 1)
    assert pool.stats().hit_rate == 0.5


def test_two_leases_never_share_memory(pool: BufferPool) -> None:
    leases = [pool.take(1000) for _ in range(10)]
    for number, lease in enumerate(leases):
        lease.view[:] = bytes([number]) * 1000
    for number, lease in enumerate(leases):
        assert bytes(lease.view) == bytes([number]) * 1000
        lease.release()


def test_releasing_twice_is_releasing_once(pool: BufferPool) -> None:
    lease = pool.take(10)
    lease.release()
    lease.release()
    one, other = pool.take(10), pool.take(10)
    one.view[:] = b"0123456789"
    other.view[:] = b"abcdefghij"
    assert bytes(one.view) == b"0123456789"
    assert pool.stats().leased == 2


def test_a_released_lease_leads_to_no_memory(pool: BufferPool) -> None:
    lease = pool.take(10)
    view = lease.view
    lease.release()
    with pytest.raises(UsageError):
        _ = lease.view
    with pytest.raises(ValueError, match="released"):
        _ = view[0]


@pytest.mark.parametrize(
    "keep", [lambda view: view[2:5], lambda view: np.frombuffer(view, np.uint8), lambda view: view.cast("B")]
)
@pytest.mark.parametrize("size", [10, 200_000])
def test_memory_that_somebody_still_sees_is_not_used_again(pool: BufferPool, keep: object, size: int) -> None:
    lease = pool.take(size)
    lease.view[:] = b"\x01" * size
    kept = keep(lease.view)  # type: ignore[operator]
    lease.release()
    other = pool.take(size)
    other.view[:] = b"\x02" * size
    assert set(bytes(kept)) == {1}
    assert pool.stats().shared == 1
    assert pool.stats().hits == 0


def test_each_tier_keeps_so_many_and_no_more(pool: BufferPool) -> None:
    leases = [pool.take(900) for _ in range(5)] + [pool.take(9000) for _ in range(5)]
    assert pool.stats().free_bytes == 0
    for lease in leases:
        lease.release()
    assert pool.stats().free_bytes == 2 * 1000 + 10_000
    pool.clear()
    assert pool.stats().free_bytes == 0


def test_what_is_larger_than_the_last_tier_is_not_pooled(pool: BufferPool) -> None:
    pool.take(300_001).release()
    assert pool.stats().unpooled == 1
    assert pool.stats().free_bytes == 0


def test_what_each_tier_did_is_distinguished(pool: BufferPool) -> None:
    for size in (900, 9000, 900, 10, 9000, 300_001):
        pool.take(size).release()
    stats = pool.stats()
    assert [(tier.size_bytes, tier.hits, tier.misses, tier.free, tier.kept) for tier in stats.tiers] == [
        (1000, 2, 1, 1, 2), (10_000, 1, 1, 1, 1), (300_000, 0, 0, 0, 1),
    ]  # fmt: skip
    assert [tier.hit_rate for tier in stats.tiers] == [2 / 3, 0.5, 1.0]
    assert (stats.hits, stats.misses, stats.unpooled) == (3, 2, 1)
    facts = stats.facts()
    assert facts["hit_rate"] == 0.6
    assert facts["tiers"] == {
        1000: {"size_bytes": 1000, "hits": 2, "misses": 1, "free": 1, "kept": 2, "hit_rate": 2 / 3},
        10_000: {"size_bytes": 10_000, "hits": 1, "misses": 1, "free": 1, "kept": 1, "hit_rate": 0.5},
    }


def test_the_profiles_are_the_documented_ones() -> None:
    assert TIER_BYTES == (64 * KIB, 8 * MIB, 64 * MIB, 256 * MIB)
    assert PROFILES == {"training": (256, 32, 16, 4), "inference": (256, 16, 4, 0)}
    assert BufferPool.of_profile("training").stats().free_bytes == 0
    BufferPool.of_profile(((4096, 1),)).take(10).release()


@pytest.mark.parametrize("tiers", [[], [(0, 1)], [(10, 1), (10, 1)], [(10, 1), (5, 1)], [(10, -1)], "gaming"])
def test_tiers_that_make_no_sense_are_refused(tiers: object) -> None:
    with pytest.raises(UsageError):
        BufferPool.of_profile(tiers)  # type: ignore[arg-type]


def test_large_memory_is_committed_by_bytes_that_arrive() -> None:
    pool = BufferPool.of_profile("training")
    before = anonymous_bytes()
    leases = [pool.take(256 * MIB) for _ in range(8)] + [pool.take(1 << 32)]
    assert anonymous_bytes() - before < 8 * MIB
    leases[0].view[:MIB] = bytes(MIB)
    assert anonymous_bytes() - before < 12 * MIB
    for lease in leases:
        lease.release()


def test_many_threads_take_and_release_at_once(pool: BufferPool) -> None:
    faults: list[str] = []

    def work(number: int) -> None:
        mark = bytes([number]) * 100
        for _ in range(2000):
            with pool.take(100) as lease:
                lease.view[:] = mark
                if bytes(lease.view) != mark:
                    faults.append("two threads shared a buffer")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert pool.stats().leased == 0
    assert pool.stats().hits + pool.stats().misses == 16_000


def test_one_lease_released_by_many_threads_goes_back_once(pool: BufferPool) -> None:
    for _ in range(200):
        lease = pool.take(10)
        start = threading.Barrier(4)
        threads = [threading.Thread(target=lambda: (start.wait(), lease.release())) for _ in range(4)]  # noqa: B023
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert pool.stats().leased == 0
    assert pool.stats().free_bytes == 1000


@pytest.mark.parametrize("size", [1 << 46, 1 << 62, 1 << 70])
def test_memory_that_the_system_refuses_is_a_memory_error_and_leaves_no_lease(size: int) -> None:
    pool = BufferPool([(1 << 46, 1)])
    with pytest.raises(MemoryError):
        pool.take(size)
    assert pool.stats().leased == 0
