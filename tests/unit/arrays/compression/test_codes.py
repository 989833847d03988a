from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.arrays.compression.base import Compressor, Piece, Terms
from nexar.arrays.compression.codes import code_of_compressor, describe_code
from nexar.arrays.compression.quantized import FP8, Int8, NoCompression
from nexar.arrays.compression.sparse import RandomK, TopK


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
def test_ours_are_described_as_text(compressor: Compressor) -> None:
    assert describe_code(code_of_compressor(compressor, feedback=True)) == f"{compressor.name} with a residual"
    assert describe_code(code_of_compressor(compressor, feedback=False)) == f"{compressor.name} without a residual"


def test_all_marks_differ_and_fit_their_field() -> None:
    compressors = [*OURS, TopK(1 / 3), TopK(1 / 3 + 1e-12), RandomK(1 / 3), Mine(), Yours()]
    marks = [code_of_compressor(each, feedback=feedback) for each in compressors for feedback in (False, True)]
    assert len(set(marks)) == len(marks)
    assert all(0 < mark < 1 << 31 for mark in marks)


def test_what_does_not_fit_is_reported_by_its_digest() -> None:
    assert describe_code(code_of_compressor(TopK(1 / 3), feedback=True)).startswith("TopK of the digest ")
    assert describe_code(code_of_compressor(Mine(), feedback=False)).startswith("a compressor of the digest ")


class Linear(Mine):
    linear = True
    name = "Mine"  # type: ignore[assignment]


def test_namesakes_differ_that_say_other_sizes_or_are_sent_otherwise() -> None:
    marks = {
        code_of_compressor(each, feedback=False, piece_bytes=size) for each in (Mine(), Linear()) for size in (8, 12)
    }
    assert len(marks) == 4


def test_any_name_has_a_mark() -> None:
    class Odd(Mine):
        name = "\udc80"  # type: ignore[assignment]

    assert code_of_compressor(Odd(), feedback=False) != code_of_compressor(Mine(), feedback=False)


@given(st.integers(0, 2**32 - 1))
def test_any_number_can_be_given(mark: int) -> None:
    assert describe_code(mark)


@given(st.integers(1, 10**6).map(lambda number: number / 10**6))
def test_ratios_as_people_write_them_are_exact(ratio: float) -> None:
    assert describe_code(code_of_compressor(RandomK(ratio), feedback=True)) == f"RandomK({ratio!r}) with a residual"
