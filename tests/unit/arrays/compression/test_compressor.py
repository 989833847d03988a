import tracemalloc
from typing import Any

import numpy as np
import pytest

from nexar.arrays.compression.compressor import Compressor, Piece
from nexar.arrays.compression.fp8 import FP8
from nexar.arrays.compression.int8 import Int8
from nexar.arrays.compression.no_compression import NoCompression
from nexar.arrays.compression.random_k import RandomK
from nexar.arrays.compression.terms import Terms
from nexar.arrays.compression.top_k import TopK

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
