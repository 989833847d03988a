from dataclasses import replace

import numpy as np
import pytest

from nexar.cli.bench.measures import MEASURES
from nexar.cli.bench.measuring import Unsupported, dtype_named, measure
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


def test_of_a_pair_rank_0_tells_the_time():
    assert measure(Alone(rank=1), replace(ORDER, measure="p2p-bandwidth")).nanoseconds == ()
    assert len(measure(Alone(rank=0), replace(ORDER, measure="p2p-bandwidth")).nanoseconds) == 3


def test_a_dtype_is_known_by_its_name():
    assert dtype_named("float32") == np.float32
    assert dtype_named("bfloat16").itemsize == 2
    with pytest.raises(Unsupported, match="float33"):
        dtype_named("float33")
