from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.arrays.compression.compressor import Compressor, Piece
from nexar.arrays.compression.fp8 import FP8
from nexar.arrays.compression.int8 import Int8
from nexar.arrays.compression.mark import mark_of, words_of
from nexar.arrays.compression.no_compression import NoCompression
from nexar.arrays.compression.random_k import RandomK
from nexar.arrays.compression.terms import Terms
from nexar.arrays.compression.top_k import TopK


class Mine(Compressor):
    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        return 0

    def compress(self, array: Any, terms: Terms) -> Piece:
        return np.empty(0, np.uint8)

    def decompress(self, piece: Piece, terms: Terms) -> Any:
        return np.zeros(terms.count, terms.work)


class Yours(Mine):
    pass


OURS = [
    NoCompression(), TopK(0.01), TopK(0.02), TopK(1), TopK(1e-05), RandomK(0.01), RandomK(0.123456), FP8(), FP8("e5m2"),
    FP8(block=64), Int8(), Int8(1), Int8(1 << 20),
]  # fmt: skip


@pytest.mark.parametrize("compressor", OURS, ids=lambda each: each.name)
def test_ours_are_told_in_words(compressor: Compressor) -> None:
    assert words_of(mark_of(compressor, feedback=True)) == f"{compressor.name} with a residual"
    assert words_of(mark_of(compressor, feedback=False)) == f"{compressor.name} without a residual"


def test_all_marks_differ_and_fit_their_field() -> None:
    compressors = [*OURS, TopK(1 / 3), TopK(1 / 3 + 1e-12), RandomK(1 / 3), Mine(), Yours()]
    marks = [mark_of(each, feedback=feedback) for each in compressors for feedback in (False, True)]
    assert len(set(marks)) == len(marks)
    assert all(0 < mark < 1 << 31 for mark in marks)


def test_what_does_not_fit_is_told_by_its_digest() -> None:
    assert words_of(mark_of(TopK(1 / 3), feedback=True)).startswith("TopK of the digest ")
    assert words_of(mark_of(Mine(), feedback=False)).startswith("a compressor of the digest ")


class Linear(Mine):
    linear = True
    name = "Mine"  # type: ignore[assignment]


def test_namesakes_differ_that_say_other_sizes_or_are_sent_otherwise() -> None:
    marks = {mark_of(each, feedback=False, piece_bytes=size) for each in (Mine(), Linear()) for size in (8, 12)}
    assert len(marks) == 4


def test_any_name_has_a_mark() -> None:
    class Odd(Mine):
        name = "\udc80"  # type: ignore[assignment]

    assert mark_of(Odd(), feedback=False) != mark_of(Mine(), feedback=False)


@given(st.integers(0, 2**32 - 1))
def test_any_number_can_be_told(mark: int) -> None:
    assert words_of(mark)


@given(st.integers(1, 10**6).map(lambda number: number / 10**6))
def test_ratios_as_people_write_them_are_told_exactly(ratio: float) -> None:
    assert words_of(mark_of(RandomK(ratio), feedback=True)) == f"RandomK({ratio!r}) with a residual"
