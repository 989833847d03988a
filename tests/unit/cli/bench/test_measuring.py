from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from nexar.cli.bench.measuring import OPERATIONS, Unsupported, count_wrong, dtype_named, fill, measure, steady_value
from nexar.cli.bench.protocol import MEASURES
from tests.unit.cli.bench.orders import ORDER


class Alone:
    """A world of one rank, in which every operation is a copy; and what happened in it."""

    version = "1"
    size = 1

    def __init__(self, rank=0, spoil=0):
        self.rank = rank
        self.spoil = spoil
        self.happened = []

    def barrier(self):
        self.happened.append("barrier")

    def bind(self, order, source, target):
        if order.dtype == "int16":
            raise Unsupported("no int16")

        def call():
            self.happened.append("call")
            if source.size:
                target[:] = source
            target[: self.spoil] = 99

        return call


def test_a_call_is_checked_then_warmed_up_then_timed_from_a_common_start():
    system = Alone()
    reply = measure(system, ORDER)
    assert system.happened == ["call", "call", "call", "barrier", "call", "call", "call"]
    assert len(reply.nanoseconds) == 3
    assert all(time > 0 for time in reply.nanoseconds)


@pytest.mark.parametrize("name", [name for name in MEASURES if name != "p2p-bandwidth"])
def test_right_results_are_found_right(name):
    assert measure(Alone(), replace(ORDER, measure=name)).wrong == 0


@pytest.mark.parametrize("name", [name for name in MEASURES if name not in ("barrier", "p2p-bandwidth")])
def test_wrong_elements_are_found(name):
    assert measure(Alone(spoil=2), replace(ORDER, measure=name)).wrong == 2


def test_a_target_that_nobody_wrote_to_is_wrong_everywhere():
    system = Alone()
    system.bind = lambda *_: lambda: None
    assert measure(system, replace(ORDER, measure="all_gather")).wrong == 20


def test_nothing_is_checked_where_that_was_not_asked_for():
    assert measure(Alone(spoil=2), replace(ORDER, check=False)).wrong == 0


def test_what_a_system_does_not_have_is_said():
    assert measure(Alone(), replace(ORDER, dtype="int16")).problem == "no int16"


def test_a_third_rank_takes_no_part_in_a_pair():
    system = Alone(rank=2)
    assert measure(system, replace(ORDER, measure="p2p-latency")).nanoseconds == ()
    assert system.happened == []


def test_of_a_pair_rank_0_measures_the_time():
    assert measure(Alone(rank=1), replace(ORDER, measure="p2p-bandwidth")).nanoseconds == ()
    assert len(measure(Alone(rank=0), replace(ORDER, measure="p2p-bandwidth")).nanoseconds) == 3


def test_a_dtype_is_known_by_its_name():
    assert dtype_named("float32") == np.float32
    assert dtype_named("bfloat16").itemsize == 2
    with pytest.raises(Unsupported, match="float33"):
        dtype_named("float33")


RANKS = 5
INTEGERS = ("band", "bor", "bxor")
FOLDS = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
}


def inputs(count, op, dtype):
    """What each rank has."""
    made = np.empty((RANKS, count), dtype)
    for rank in range(RANKS):
        fill(made[rank], rank, op)
    return made


def reduced(values, op):
    if op == "avg":
        return values.mean(axis=0, dtype=np.float64).astype(values.dtype)
    return FOLDS[op].reduce(values, axis=0).astype(values.dtype)


@pytest.mark.parametrize("count", [1, 5, 6, 7, 1000])
@pytest.mark.parametrize("op", OPERATIONS)
def test_what_numpy_computes_is_right(op, count):
    result = reduced(inputs(count, op, np.int32 if op in INTEGERS else np.float32), op)
    assert count_wrong(result, replace(ORDER, op=op, count=count), 2, RANKS) == 0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int8, np.uint64, np.complex64])
def test_sums_are_exact_in_every_dtype(dtype):
    result = reduced(inputs(100, "sum", np.dtype(dtype)), "sum")
    assert count_wrong(result, replace(ORDER, count=100), 0, RANKS) == 0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_an_average_may_be_rounded(dtype):
    exact = inputs(100, "avg", np.float64).mean(axis=0)
    assert count_wrong(exact.astype(dtype), replace(ORDER, op="avg", count=100), 0, RANKS) == 0
    assert count_wrong((exact + 0.4).astype(dtype), replace(ORDER, op="avg", count=100), 0, RANKS) == 100


@pytest.mark.parametrize("op", ["sum", "max", "avg"])
def test_every_wrong_element_is_counted(op):
    result = reduced(inputs(20, op, np.float32), op)
    result[[0, 7, 19]] += 1
    assert count_wrong(result, replace(ORDER, op=op), 0, RANKS) == 3


def test_a_result_that_is_another_rank_s_input_is_wrong():
    mine = inputs(60, "sum", np.float32)[0]
    assert count_wrong(mine, replace(ORDER, count=60), 0, RANKS) == 60


@pytest.mark.parametrize("measure", ["all_gather", "gather"])
def test_gathered_blocks_are_known(measure):
    blocks = inputs(20, "sum", np.float32)
    assert count_wrong(blocks.ravel(), replace(ORDER, measure=measure), 1, RANKS) == 0
    assert count_wrong(blocks[::-1].ravel(), replace(ORDER, measure=measure), 1, RANKS) > 0


def test_exchanged_blocks_are_known():
    sources = inputs(20 * RANKS, "sum", np.float32).reshape(RANKS, RANKS, 20)
    order = replace(ORDER, measure="all_to_all")
    assert count_wrong(sources[:, 3].ravel(), order, 3, RANKS) == 0
    assert count_wrong(sources[3].ravel(), order, 3, RANKS) > 0


def test_a_share_is_known_by_its_rank():
    sources = inputs(20 * RANKS, "sum", np.float32)
    assert count_wrong(sources[2, 60:80], replace(ORDER, measure="scatter", root=2), 3, RANKS) == 0
    assert count_wrong(reduced(sources, "sum")[60:80], replace(ORDER, measure="reduce_scatter"), 3, RANKS) == 0
    assert count_wrong(sources[2, 40:60], replace(ORDER, measure="scatter", root=2), 3, RANKS) > 0


@pytest.mark.parametrize("measure", ["broadcast", "p2p-latency", "p2p-bandwidth"])
def test_what_came_from_rank_0_is_known(measure):
    first, second = inputs(20, "sum", np.float32)[:2]
    assert count_wrong(first, replace(ORDER, measure=measure), 1, RANKS) == 0
    assert count_wrong(second, replace(ORDER, measure=measure), 1, RANKS) > 0


@pytest.mark.parametrize("op", FOLDS)
def test_calls_in_a_row_never_overflow(op):
    value = np.full(3, steady_value(op), np.int8)
    assert np.array_equal(FOLDS[op](value, value).astype(np.int8), value)
