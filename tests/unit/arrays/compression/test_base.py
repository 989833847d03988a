import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nexar.arrays.compression.base import Compressor, Piece, Terms, add_residual, new_residual, work_dtype
from nexar.arrays.compression.quantized import FP8, Int8, NoCompression
from nexar.arrays.compression.sparse import RandomK, TopK

OURS = [TopK(0.3), RandomK(0.3), NoCompression(), FP8(block=5), Int8(5)]


class Signs(Compressor):
    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        return count

    def compress(self, array: Any, terms: Terms) -> Piece:
        return np.sign(array).astype(np.int8).view(np.uint8)

    def decompress(self, piece: Piece, terms: Terms) -> Any:
        return piece.view(np.int8).astype(terms.work)


def test_a_compressor_is_called_by_its_class_and_adds_what_it_decompresses() -> None:
    total = np.ones(3, np.float32)
    about = Terms(3, total.dtype, 0, feedback=False)
    Signs().add(Signs().compress(np.array([-5.0, 0, 7]), about), total, about)
    assert total.tolist() == [0, 1, 2]
    assert Signs().name == "Signs"
    assert not Signs.linear


def test_what_says_too_little_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Compressor()  # type: ignore[abstract]


@pytest.mark.parametrize("compressor", OURS, ids=lambda each: each.name)
def test_ours_leave_what_they_are_given_as_it_is(compressor: Compressor) -> None:
    array = np.random.default_rng(0).normal(size=11).astype(np.float32)
    before, about = array.copy(), Terms(11, array.dtype, 3, feedback=True)
    array.flags.writeable = False
    piece = compressor.compress(array, about)
    assert not np.may_share_memory(piece, array)
    piece.flags.writeable = False
    compressor.decompress(piece, about)
    compressor.add(piece, np.zeros(11, np.float32), about)
    assert (array == before).all()


@pytest.mark.parametrize("compressor", OURS, ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_ours_take_the_memory_that_they_say(compressor: Compressor, dtype: type) -> None:
    count = 1 << 18
    about = Terms(count, np.dtype(dtype), 3, feedback=True)
    array = np.random.default_rng(0).normal(size=count).astype(about.work)
    allowed = compressor.working_bytes(count, about.dtype) + compressor.size_bytes(count, about.dtype)
    piece = compressor.compress(array, about)
    total = np.zeros(count, about.work)
    for task in (
        lambda: compressor.compress(array, Terms(count, about.dtype, 3, feedback=True)),
        lambda: compressor.decompress(piece, about),
        lambda: compressor.add(piece, total, about),
    ):
        tracemalloc.start()
        task()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= allowed * 1.02 + 4096


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32, np.float64])
def test_what_is_left_is_added_in_the_work_dtype(dtype: type) -> None:
    about = Terms(2, np.dtype(dtype), 0, feedback=True)
    array = np.array([1, 2], dtype)
    for kind in (dtype, about.work):
        found = add_residual(array, np.array([0.5, -1], kind), about)
        assert found.dtype == about.work
        assert found.tolist() == [1.5, 1]
    assert add_residual(array, None, about).tolist() == [1, 2]
    assert array.tolist() == [1, 2]


def test_without_a_residual_and_in_the_work_dtype_nothing_is_copied() -> None:
    array = np.ones(3, np.float32)
    assert add_residual(array, None, Terms(3, array.dtype, 0, feedback=False)) is array


def test_what_was_not_sent_is_left() -> None:
    assert new_residual(np.array([3.0, 4, 5]), np.array([3.0, 0, 4])).tolist() == [0, 4, 1]


def test_where_what_is_no_number_was_sent_nothing_is_left() -> None:
    wanted = np.array([np.nan, np.inf, 1, np.nan])
    assert new_residual(wanted, np.array([np.nan, np.inf, np.nan, 0])).tolist()[:3] == [0, 0, 0]
    assert np.isnan(wanted[3]), "it was not sent: somebody has to see it yet"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32])
def test_narrow_types_are_worked_on_in_float32(dtype: type) -> None:
    assert work_dtype(np.dtype(dtype)) == np.float32
    assert Terms(1, np.dtype(dtype), 0, feedback=False).work == np.float32


def test_float64_stays_what_it_is() -> None:
    assert work_dtype(np.dtype(float)) == np.float64


def test_what_is_kept_is_kept_for_one_call() -> None:
    first, second = (Terms(1, np.dtype(float), 0, feedback=False) for _ in range(2))
    first.kept["x"] = 1
    assert not second.kept
