"""Every operation of every element type has the bits that NumPy computes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import reference
from nexar_native import reduce
from reference import CASES, DTYPES, LOGIC, NARROW, OPS, Array, dtype_of, every_bits, expected, ordinary, same

# Around the widths of vectors (64 bytes at most, unrolled 4 times), of a block (8 KiB, of f32 for narrow floats).
COUNTS = [0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 257, 511, 513, 1023, 1025, 2047, 2049]
BLOCKS = [4097, 8191, 8192, 8193, 20_011]


def folded(op: str, inputs: list[Array], divisor: int = 1) -> Array:
    out = np.empty_like(inputs[0])
    reduce.fold(out, inputs, OPS[op], DTYPES[inputs[0].dtype.name], divisor)
    return out


def unaligned(array: Array, shift: int) -> Array:
    """A copy at an address that is `shift` bytes beside that of an aligned array."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64 + shift
    view = memory[start : start + array.nbytes].view(array.dtype)
    view[...] = array
    return view


@pytest.mark.parametrize("draw", [ordinary, every_bits])
@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_any_number_of_elements(op: str, dtype: str, draw: reference.Draw) -> None:
    for count in COUNTS + BLOCKS:
        inputs = [draw(dtype, count, seed) for seed in range(2)]
        assert same(folded(op, inputs), expected(op, inputs)), count


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_any_number_of_inputs(op: str, dtype: str) -> None:
    for draw, size, count in product((ordinary, every_bits), range(1, 10), (3, 1000, 9001)):
        inputs = [draw(dtype, count, seed) for seed in range(size)]
        assert same(folded(op, inputs), expected(op, inputs)), (draw, size, count)


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_the_limits_of_the_type(op: str, dtype: str) -> None:
    left, right = reference.pairs(dtype)
    for inputs in ([left, right], [right, left], [left, right, left]):
        assert same(folded(op, inputs), expected(op, inputs))


@pytest.mark.parametrize("dtype", [name for name in DTYPES if reference.defined("avg", name)])
def test_an_average_is_divided_after_the_fold(dtype: str) -> None:
    left, right = reference.pairs(dtype)
    for divisor, size in product([1, 2, 3, 7, 4096, 8192, 10_007, (1 << 31) + 1], [1, 2, 3, 5]):
        inputs = [left, right, left, right, left][:size]
        assert same(folded("avg", inputs, divisor), expected("avg", inputs, divisor)), (divisor, size)
        inputs = [ordinary(dtype, 9001, seed) for seed in range(size)]
        assert same(folded("avg", inputs, divisor), expected("avg", inputs, divisor)), (divisor, size)


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", *LOGIC])
@pytest.mark.parametrize("dtype", [name for name in NARROW if dtype_of(name).itemsize == 1])
def test_all_pairs_of_bytes(op: str, dtype: str) -> None:
    every = np.arange(256, dtype=np.uint8).view(dtype_of(dtype))
    inputs = [np.repeat(every, 256), np.tile(every, 256)]
    assert same(folded(op, inputs), expected(op, inputs))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_numbers_of_two_bytes(dtype: str) -> None:
    every = np.arange(1 << 16).astype(np.uint16).view(dtype_of(dtype))
    for seed in range(20):
        inputs = [every, np.random.default_rng(seed).permutation(every)]
        for op in ("sum", "prod", "min", "max"):
            assert same(folded(op, inputs), expected(op, inputs)), op


@pytest.mark.parametrize("dtype", NARROW)
def test_every_number_survives_a_division_by_powers_of_two(dtype: str) -> None:
    kind = dtype_of(dtype)
    every = np.arange(1 << (8 * kind.itemsize)).astype(f"u{kind.itemsize}").view(kind)
    for divisor in (2, 4, 64, 1 << 20):
        assert same(folded("avg", [every], divisor), expected("avg", [every], divisor))


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_no_memory_needs_alignment(op: str, dtype: str) -> None:
    inputs = [every_bits(dtype, 1003, seed) for seed in range(3)]
    for size, shifts in product((2, 3), [(1, 2, 3), (3, 0, 1), (0, 7, 5), (9, 9, 9)]):
        shifted = [unaligned(one, shift) for one, shift in zip(inputs, shifts, strict=True)][:size]
        out = unaligned(np.zeros_like(inputs[0]), 5)
        reduce.fold(out, shifted, OPS[op], DTYPES[dtype])
        assert same(np.ascontiguousarray(out), expected(op, inputs[:size])), (size, shifts)


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_the_result_may_replace_any_input(op: str, dtype: str) -> None:
    for count, size in product((1, 40, 9001), (1, 2, 3, 4)):
        for which in range(size):
            inputs = [every_bits(dtype, count, seed) for seed in range(size)]
            wanted = expected(op, inputs)
            reduce.fold(inputs[which], inputs, OPS[op], DTYPES[dtype])
            assert same(inputs[which], wanted), (count, size, which)


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_an_array_may_be_several_inputs_and_the_result(op: str, dtype: str) -> None:
    for count, size in product((1, 40, 9001), (2, 3, 5)):
        array = every_bits(dtype, count, 1)
        wanted = expected(op, [array] * size)
        reduce.fold(array, [array] * size, OPS[op], DTYPES[dtype])
        assert same(array, wanted), (count, size)


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_the_result_may_overlap_inputs(op: str, dtype: str) -> None:
    count = 9001
    for shift, size in product((1, 3, 5000), (1, 2, 3)):
        for ahead, behind in ((shift, 0), (0, shift), (shift, 2 * shift)):
            memory = every_bits(dtype, count + 2 * shift, shift)
            out = memory[shift : shift + count] if ahead != shift else memory[:count]
            inputs = [memory[start : start + count] for start in (ahead, behind, 2 * shift)][:size]
            wanted = expected(op, [one.copy() for one in inputs])
            reduce.fold(out, inputs, OPS[op], DTYPES[dtype])
            assert same(out, wanted), (shift, size, ahead, behind)


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64", "int64"])
def test_the_memory_around_the_result_is_untouched(dtype: str) -> None:
    for count in (1, 17, 3000):
        memory = np.full((count + 32) * dtype_of(dtype).itemsize, 0xA5, np.uint8)
        out = memory.view(dtype_of(dtype))[16 : 16 + count]
        inputs = [ordinary(dtype, count, seed) for seed in range(3)]
        reduce.fold(out, inputs, OPS["sum"], DTYPES[dtype])
        edge = 16 * out.itemsize
        assert (memory[:edge] == 0xA5).all()
        assert (memory[-edge:] == 0xA5).all()
        assert same(out, expected("sum", inputs))


def test_any_byte_but_zero_is_a_true_boolean() -> None:
    left, right = np.array([0, 0, 2, 255, 1], np.uint8), np.array([0, 128, 0, 2, 1], np.uint8)
    out = bytearray(5)
    for op, wanted in (("sum", [0, 1, 1, 1, 1]), ("prod", [0, 0, 0, 1, 1]), ("bxor", [0, 1, 1, 0, 0])):
        reduce.fold(out, [left, right], OPS[op], DTYPES["bool"])
        assert list(out) == wanted


def test_the_callers_error_state_does_not_matter() -> None:
    largest = np.full(100, np.finfo(np.float32).max)
    with np.errstate(all="raise"):
        assert np.isposinf(folded("sum", [largest, largest])).all()
        np.add(np.ones(3), np.ones(3))  # no floating-point flag of ours is taken for NumPy's
