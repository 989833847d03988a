from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.communicator.bucketed import _IN_FLIGHT, buckets, memory_for

DTYPES = st.sampled_from([np.float32, np.float64, np.uint8])
ARRAYS = st.lists(st.tuples(st.integers(0, 40), DTYPES).map(lambda facts: np.empty(*facts)), max_size=12)


@given(ARRAYS, st.integers(1, 400))
def test_every_array_is_in_one_bucket_with_others_of_its_dtype_within_the_limit(arrays: list[Any], limit: int) -> None:
    made = buckets(arrays, limit)
    assert sorted(index for bucket in made for index in bucket.members) == list(range(len(arrays)))
    for bucket in made:
        members = [arrays[index] for index in bucket.members]
        assert {member.dtype for member in members} == {bucket.dtype}
        assert sum(member.size for member in members) == bucket.count
        assert len(members) == 1 or sum(member.nbytes for member in members) <= limit


def test_arrays_of_several_dtypes_fill_buckets_side_by_side() -> None:
    arrays: list[Any] = [np.empty(2, np.float32), np.empty(1, np.int64), np.empty(2, np.float32), np.empty(1, np.int64)]
    assert [bucket.members for bucket in buckets(arrays, 16)] == [(0, 2), (1, 3)]


@given(ARRAYS, st.integers(1, 400))
def test_buckets_in_flight_together_have_memory_of_their_own(arrays: list[Any], limit: int) -> None:
    made = buckets(arrays, limit)
    memory = memory_for(made)
    assert [(len(row), row.dtype) for row in memory] == [(bucket.count, bucket.dtype) for bucket in made]
    for row, following in pairwise(memory):
        assert not np.may_share_memory(row, following)


@pytest.mark.parametrize("count", [1, 2, 100])
def test_all_buckets_together_take_the_memory_of_a_few(count: int) -> None:
    memory = memory_for(buckets([np.empty(10)] * count, 80))
    assert len({row.ctypes.data for row in memory}) == min(count, _IN_FLIGHT)
