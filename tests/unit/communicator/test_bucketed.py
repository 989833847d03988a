from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.arrays.devices import DeviceRegistry
from nexar.collectives.context import PLAIN
from nexar.communicator.bucketed import _IN_FLIGHT, all_reduce_bucketed, buckets, memory_for
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import UsageError
from tests.packages.slate.nexar_slate import Engine, Slate, SlateAdapter
from tests.ranks import on_every

DTYPES = [np.dtype(each) for each in ("f4", "f8", "i1")]
arrays = st.lists(st.builds(np.zeros, st.integers(0, 20), st.sampled_from(DTYPES)), max_size=20)


@given(arrays, st.integers(1, 200))
def test_each_array_is_in_one_bucket_of_its_dtype_and_none_is_too_full(given: list[np.ndarray], limit: int) -> None:
    made = buckets(given, limit)
    assert sorted(member for bucket in made for member in bucket.members) == list(range(len(given)))
    for bucket in made:
        members = [given[member] for member in bucket.members]
        assert list(bucket.members) == sorted(bucket.members)
        assert {each.dtype for each in members} == {bucket.dtype}
        assert bucket.count == sum(each.size for each in members)
        assert len(members) == 1 or sum(each.nbytes for each in members) <= limit


@given(arrays, st.integers(1, 200))
def test_buckets_in_flight_together_have_memory_of_their_own(given: list[np.ndarray], limit: int) -> None:
    made = buckets(given, limit)
    memory = memory_for(made)
    assert [(len(row), row.dtype) for row in memory] == [(bucket.count, bucket.dtype) for bucket in made]
    assert not any(np.may_share_memory(row, following) for row, following in pairwise(memory))


@pytest.mark.parametrize("count", [1, 2, 100])
def test_all_buckets_together_take_the_memory_of_a_few(count: int) -> None:
    memory = memory_for(buckets([np.zeros(10)] * count, 80))
    assert len({row.ctypes.data for row in memory}) == min(count, _IN_FLIGHT)


def test_all_numbers_are_taken_at_the_call_and_a_call_that_is_refused_takes_none() -> None:
    with local_communicators(2, Config()) as world:
        call_logs = [comm._context.call_log for comm in world]
        for nonsense in ({"bucket_bytes": 0}, {"bucket_bytes": 1.5}):
            with pytest.raises(UsageError, match="bucket_bytes"):
                world[0].all_reduce_bucketed([np.ones(3)], **nonsense)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="not defined"):
            world[0].all_reduce_bucketed([np.ones(3), np.ones(3, int)], "avg")
        assert call_logs[0]._next == 0
        works = [
            all_reduce_bucketed(comm._context, [np.ones(4)] * 5, "sum", 64, PLAIN, commutative=True) for comm in world
        ]
        assert [call_log._next for call_log in call_logs] == [3, 3]
        on_every([0, 1], lambda rank: world[rank]._context.runner.run_blocking(works[rank], 20.0))
        assert [call_log.stats()["in_flight"] for call_log in call_logs] == [0, 0]


def test_copies_from_a_device_are_begun_with_the_call_and_those_back_one_bucket_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapters = DeviceRegistry()
    adapters.add(SlateAdapter())
    monkeypatch.setattr("nexar.arrays.operand.ADAPTERS", adapters)
    with local_communicators(2, Config()) as world:
        engines = [Engine(), Engine()]
        slates = [[Slate(np.full(4, 1.0 + each), engine) for each in range(6)] for engine in engines]
        works = [
            all_reduce_bucketed(comm._context, mine, "sum", 64, PLAIN, commutative=True)
            for comm, mine in zip(world, slates, strict=True)
        ]
        assert engines[0].begun == ["stage_out"] * 3, "two slates in each bucket, gathered by one copy"
        on_every([0, 1], lambda rank: world[rank]._context.runner.run_blocking(works[rank], 20.0))
        assert engines[0].begun == ["stage_out"] * 3 + ["stage_in"] * 3
        for mine in slates:
            assert [slate.values().tolist() for slate in mine] == [[2.0 + 2 * each] * 4 for each in range(6)]


def test_each_device_is_waited_for_by_who_makes_the_call_and_not_by_who_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = DeviceRegistry()
    adapters.add(SlateAdapter())
    monkeypatch.setattr("nexar.arrays.operand.ADAPTERS", adapters)
    with local_communicators(2, Config()) as world:
        engines = [(Engine(), Engine()) for _ in world]
        slates = [[Slate(np.full(4, 1.0), of[each // 6]) for each in range(8)] for of in engines]
        first = world[0].start.all_reduce_bucketed(slates[0], bucket_bytes=64)
        assert engines[0][1].done == 1, "its bucket is the fourth, two are in flight, and the other rank has not come"
        second = world[1].start.all_reduce_bucketed(slates[1], bucket_bytes=64)
        first.wait(20.0)
        second.wait(20.0)
        assert all(slate.values().tolist() == [2.0] * 4 for mine in slates for slate in mine)
