"""What is rejected, which memory is accepted, and when the GIL is released."""

from __future__ import annotations

import threading
from array import array
from itertools import product

import numpy as np
import pytest
from nexar_native import reduce
from reference import CASES, DTYPES, OPS, dtype_of

SUM, FLOAT = OPS["sum"], DTYPES["float32"]


def test_exactly_the_defined_pairs_are_supported() -> None:
    found = {(op, dtype) for op, dtype in product(range(-3, 300), range(-3, 300)) if reduce.supported(op, dtype)}
    assert found == {(OPS[op], DTYPES[dtype]) for op, dtype in CASES}
    assert not reduce.supported(1 << 40, 1)


def test_the_version_is_a_number() -> None:
    assert reduce.VERSION >= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_length_is_a_multiple_of_the_element_size(dtype: str) -> None:
    size = dtype_of(dtype).itemsize
    for length in range(3 * size + 1):
        data = bytearray(length)
        if length % size:
            with pytest.raises(ValueError, match="not a multiple of the element size"):
                reduce.fold(data, [data], SUM, DTYPES[dtype])
        else:
            reduce.fold(data, [data], SUM, DTYPES[dtype])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SUM, 0), "not defined"),
        ((0, FLOAT), "not defined"),
        ((12, FLOAT), "not defined"),
        ((SUM, 18), "not defined"),
        ((-1, FLOAT), "not defined"),
        ((1 << 33, FLOAT), "not defined"),
        ((OPS["avg"], DTYPES["int32"]), "not defined"),
        ((OPS["max"], DTYPES["complex64"]), "not defined"),
        ((OPS["band"], FLOAT), "not defined"),
        ((SUM, FLOAT, 2), "divisor"),
        ((OPS["avg"], FLOAT, 0), "divisor"),
    ],
)
def test_an_invalid_reduction_changes_nothing(arguments: tuple[int, ...], message: str) -> None:
    out = np.full(4, 7, np.float32)
    with pytest.raises(ValueError, match=message):
        reduce.fold(out, [np.ones(4, np.float32)] * 2, *arguments)
    assert (out == 7).all()


def test_lengths_must_agree() -> None:
    for inputs in ([bytes(8), bytes(4)], [bytes(4)], [bytes(12), bytes(12)]):
        with pytest.raises(ValueError, match="same length"):
            reduce.fold(bytearray(8), inputs, SUM, FLOAT)


def test_a_fold_needs_an_input() -> None:
    with pytest.raises(ValueError, match="at least one input"):
        reduce.fold(bytearray(8), [], SUM, FLOAT)


def test_the_result_must_be_writable() -> None:
    with pytest.raises(BufferError):
        reduce.fold(bytes(8), [bytes(8)], SUM, FLOAT)
    fixed = np.zeros(4, np.float32)
    fixed.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        reduce.fold(fixed, [fixed], SUM, FLOAT)


def test_memory_must_be_contiguous() -> None:
    strided = np.zeros(8, np.float32)[::2]
    with pytest.raises((BufferError, ValueError)):
        reduce.fold(np.zeros(4, np.float32), [strided], SUM, FLOAT)
    with pytest.raises((BufferError, ValueError)):
        reduce.fold(strided, [np.zeros(4, np.float32)], SUM, FLOAT)


def test_something_else_is_a_type_error() -> None:
    for out, inputs in ((None, [b""]), (bytearray(4), [3]), (bytearray(4), 3)):
        with pytest.raises(TypeError):
            reduce.fold(out, inputs, SUM, FLOAT)  # type: ignore[arg-type]


def test_any_buffer_and_any_sequence() -> None:
    out = array("f", [0, 0])
    given = np.array([1, 2], np.float32)
    for inputs in ([given, memoryview(given)], (given.tobytes(), bytearray(given.tobytes()))):
        reduce.fold(out, inputs, SUM, FLOAT)
        assert out.tolist() == [2, 4]


def test_all_exports_end_with_the_call() -> None:
    data = bytearray(8)
    reduce.fold(data, [data, data], SUM, FLOAT)
    with pytest.raises(ValueError, match="same length"):
        reduce.fold(data, [data, bytes(4)], SUM, FLOAT)
    with pytest.raises(TypeError):
        reduce.fold(data, [data, None], SUM, FLOAT)  # type: ignore[list-item]
    data.extend(b"more")  # BufferError while exported


def test_threads_fold_side_by_side() -> None:
    """Each with arrays of its own, large enough that none of them has the GIL."""
    wrong: list[int] = []

    def work(number: int) -> None:
        inputs = [np.full(100_003, number + rank, np.float16) for rank in range(3)]
        out = np.empty_like(inputs[0])
        for _ in range(20):
            out[:] = 0
            reduce.fold(out, inputs, SUM, DTYPES["float16"])
            if not (out == 3 * number + 3).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_large_fold_lets_other_threads_run() -> None:
    """The other thread can only answer while the fold, of about a second of one core, has no GIL."""
    inputs = [np.ones(4 << 20, np.float16)] * 400
    out = np.empty_like(inputs[0])
    counted: list[int] = []
    folding, ended = threading.Event(), threading.Event()

    def count() -> None:
        folding.wait()
        while not ended.is_set():
            counted.append(0)
            ended.wait(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    folding.set()
    reduce.fold(out, inputs, SUM, DTYPES["float16"])
    ended.set()
    thread.join()
    assert len(counted) > 20
    assert (out == 400).all()
