from collections.abc import Iterator

import numpy as np
import pytest

from nexar.communicator.calls import _blocks, _rows
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import UsageError


@pytest.fixture
def alone() -> Iterator[Communicator]:
    """A world of one: every verb ends without anybody else."""
    with local_communicators(1, Config()) as (made,):
        yield made


def test_blocks_are_equal_parts_of_axis_0_and_single_rows_lose_it() -> None:
    cut = [
        [each.tolist() for each in _blocks(np.arange(6).reshape(shape), 3, "verb")] for shape in ((6,), (6, 1), (3, 2))
    ]
    assert cut == [[[0, 1], [2, 3], [4, 5]], [[[0], [1]], [[2], [3]], [[4], [5]]], [[0, 1], [2, 3], [4, 5]]]
    for shape in ((4,), ()):
        with pytest.raises(UsageError, match="verb_v"):
            _blocks(np.zeros(shape), 3, "verb")


def test_rows_are_cut_as_evenly_as_can_be_or_as_counts_say() -> None:
    array = np.zeros((7, 2))
    assert [row.count for row in _rows(array, 3, None)] == [len(each) for each in np.array_split(array, 3)]
    assert [tuple(row) for row in _rows(array, 3, [0, 7, 0])] == [(0, 0), (0, 7), (7, 7)]
    for counts in ([7], [3, 3, 3], [8, -1, 0], [3.5, 3.5, 0]):
        with pytest.raises(UsageError, match="counts"):
            _rows(array, 3, counts)  # type: ignore[arg-type]


def test_what_goes_in_comes_out_in_a_world_of_one(alone: Communicator) -> None:
    array = np.arange(4.0)
    assert alone.all_reduce(array) is alone.broadcast(array) is alone.reduce(array) is array
    assert array.tolist() == [0, 1, 2, 3]
    assert alone.all_gather(array).shape == alone.gather(array).shape == (1, 4)
    for verb in (alone.reduce_scatter, alone.all_to_all, alone.scan):
        got = verb(array)
        assert np.array_equal(got, array)
        assert not np.may_share_memory(got, array)
    assert alone.exclusive_scan(array, "max").tolist() == [-np.inf] * 4
    assert alone.scatter(array.reshape(1, 4)).tolist() == array.tolist()
    assert [each.tolist() for each in alone.all_gather_v(array)] == [array.tolist()]
    assert alone.all_to_all_v([array])[0].tolist() == alone.scatter_v([array]).tolist() == array.tolist()
    assert alone.all_reduce(4) == 4


def test_a_strided_array_gets_its_result_only_at_the_end(alone: Communicator) -> None:
    wide = np.arange(8.0)
    assert alone.all_reduce(wide[::2]).base is wide
    out = np.zeros((4, 2))
    assert alone.all_gather(wide, out=out[:, ::1]).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_out_must_have_room_for_the_result_and_its_dtype(alone: Communicator) -> None:
    for out in (np.zeros(5), np.zeros(4, np.float32)):
        with pytest.raises(UsageError, match="out= is float"):
            alone.scan(np.zeros(4), out=out)
    assert alone._assembly.journal._next == 0
