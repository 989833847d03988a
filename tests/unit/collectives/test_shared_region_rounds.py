"""In step with the others: what one rank does when the words of another say this or that.

Every operation through real shared memory, against NumPy.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nexar.arrays.operators import reduction_of
from nexar.arrays.views import Span, split
from nexar.collectives import shared_region_rounds
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.shared_region_layout import SMALL_BYTES, RegionMemory, RegionRecords, RegionSlots, create_memory
from nexar.collectives.shared_region_rounds import FingerprintDiffers, RankAborted, RegionOperation, RoundSync
from nexar.errors import InternalError
from nexar.links.operation import Operation
from nexar.types import AwaitedPeer
from tests.unit.collectives.region_ranks import Rank, all_well, ranks, together

ONE = Fingerprint(2, 11, 2, 0, 1)


class Stage:
    """Rank 0 with its round synchronisation, and the words of rank 1."""

    def __init__(self, memory: RegionMemory) -> None:
        self.lock = threading.Lock()
        self.woken = 0
        self.records, self.theirs = RegionRecords(memory.records(), 0, 2), RegionRecords(memory.records(), 1, 2)
        self.slots = RegionSlots(memory, 0)
        self.round_sync = RoundSync(self.records, self.slots, [self.wake_peer, self.wake_peer])

    def wake_peer(self) -> None:
        self.woken += 1

    def publish(self, number: int) -> None:
        """By rank 1."""
        self.theirs.words[self.theirs.mine] = number

    def begin(self, rounds: int, order_number: int = 1) -> RegionOperation:
        operation = RegionOperation(self, "test", order_number, (1, ONE), (rounds, iter([None] * rounds)))
        self.round_sync.begin(operation)
        return operation

    def cancel(self, operation: RegionOperation) -> None: ...

    def awaited(self, operation: RegionOperation) -> AwaitedPeer:
        return AwaitedPeer()


@pytest.fixture
def stage() -> Iterator[Stage]:
    memory = create_memory(2, 4096)
    made = Stage(memory)
    yield made
    made.slots.release()
    made.records.release()
    made.theirs.release()
    memory.close()


def test_an_operation_goes_from_round_to_round(stage: Stage) -> None:
    operation, round_sync = stage.begin(2), stage.round_sync
    stage.theirs.take(1, ONE)
    assert round_sync.reached(operation.wants)
    assert not round_sync.step(operation)
    assert not round_sync.reached(operation.wants)
    assert round_sync.missing(operation.wants) == 1
    stage.publish(1)
    assert not round_sync.step(operation)
    stage.publish(2)
    assert round_sync.missing(operation.wants) is None
    assert round_sync.step(operation)
    assert round_sync.round == stage.records.words[stage.records.mine] == 2


def test_only_who_may_wait_for_a_round_is_woken(stage: Stage) -> None:
    stage.round_sync.publish(1)
    assert stage.woken == 0
    stage.publish(2)
    stage.round_sync.publish(2)
    assert stage.woken == 1


def test_who_gave_up_or_means_something_else_is_found(stage: Stage) -> None:
    operation, round_sync = stage.begin(1), stage.round_sync
    round_sync.step(operation)
    stage.theirs.take(1, ONE._replace(dtype=4))
    stage.publish(1)
    with pytest.raises(FingerprintDiffers) as different:
        round_sync.step(operation)
    assert different.value.index == 1
    assert round_sync.aborted_rank(1) is None
    stage.theirs.mark_aborted(1)
    with pytest.raises(RankAborted) as gone:
        round_sync.step(operation)
    assert gone.value.index == 1
    assert round_sync.aborted_rank(1) == 1
    assert not round_sync.waits(operation)


def test_after_giving_up_the_next_waits_for_all_to_have_left(stage: Stage) -> None:
    operation, round_sync = stage.begin(5), stage.round_sync
    round_sync.step(operation)
    round_sync.abort(operation)
    assert stage.woken == 1
    assert not round_sync.settled
    assert stage.theirs.has_aborted(stage.records.mine, 1)
    following = stage.begin(1, order_number=2)
    assert not round_sync.reached(following.wants)
    assert round_sync.waits(following)
    stage.publish(5)
    assert not round_sync.step(following)
    assert round_sync.settled
    assert round_sync.round == 6


def test_a_wrong_number_of_rounds_is_our_bug(stage: Stage) -> None:
    operation = stage.begin(1)
    operation.rounds = 2
    stage.theirs.take(1, ONE)
    stage.round_sync.step(operation)
    stage.publish(1)
    with pytest.raises(InternalError, match="1 rounds, not 2"):
        stage.round_sync.step(operation)


def test_spinning_ends_in_time_or_when_there_is_nothing_to_wait_for(stage: Stage) -> None:
    begin = time.monotonic()
    assert not stage.round_sync.spin(1, 0.001, lambda: False)
    assert not stage.round_sync.spin(1, 30.0, lambda: True)
    assert time.monotonic() - begin < 10
    stage.publish(1)
    assert stage.round_sync.spin(1, 0.0, lambda: True)


def test_it_yields_sooner_where_that_helps_and_later_where_it_is_not_needed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 0

    def yielded() -> None:
        stage.publish(number)

    monkeypatch.setattr(shared_region_rounds, "_LONG_YIELD", 30.0)
    monkeypatch.setattr(os, "sched_yield", yielded)
    before = stage.round_sync._checks_before_yield
    for number in range(1, 20):
        assert stage.round_sync.spin(number, 30.0, lambda: False)
    least = stage.round_sync._checks_before_yield
    assert least < before
    for _ in range(5):
        assert stage.round_sync.spin(number, 30.0, lambda: False)
    assert stage.round_sync._checks_before_yield > least


SLOT = 4096
COUNTS = (0, 1, 2, 5, 1000, SLOT // 8, SLOT // 8 + 1, 20_011)
SUM = reduction_of("sum")


def inputs(size: int, count: int, dtype: Any = np.int64) -> list[NDArray[Any]]:
    generator = np.random.default_rng(count + size)
    return [generator.integers(-50, 50, count).astype(dtype) for _ in range(size)]


def run(members: list[Rank], start: Callable[[Rank], Operation]) -> None:
    def one(rank: Rank) -> None:
        operation = start(rank)
        rank.wait(operation)

    all_well(together(members, one))


@pytest.mark.parametrize("spin", [False, True], ids=["posted", "at once"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_reduce_gives_everybody_the_reduction(size: int, spin: bool) -> None:
    with ranks(size, slot_bytes=SLOT) as members:
        for count in (*COUNTS, SMALL_BYTES // 8 // size, SMALL_BYTES // 8 // size + 1):
            arrays = inputs(size, count)
            expected = reduce(np.add, arrays)
            run(
                members,
                lambda rank: rank.region.all_reduce(rank.region.reserve(), arrays[rank.number], SUM, spin=spin),  # noqa: B023
            )
            assert all((array == expected).all() for array in arrays)


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_elsewhere_leaves_the_input_alone(size: int) -> None:
    with ranks(size, slot_bytes=SLOT) as members:
        for count in COUNTS:
            arrays = inputs(size, count)
            before, outs = [array.copy() for array in arrays], [np.empty_like(array) for array in arrays]
            run(
                members,
                lambda rank: rank.region.all_reduce(rank.region.reserve(), arrays[rank.number], SUM, outs[rank.number]),  # noqa: B023
            )
            assert all((array == old).all() for array, old in zip(arrays, before, strict=True))
            assert all((out == reduce(np.add, before)).all() for out in outs)


@pytest.mark.parametrize("count", [3, 6_001])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16, np.uint8, np.complex64], ids=str)
def test_results_are_the_same_bits_on_all_ranks(dtype: Any, count: int) -> None:
    with ranks(3, slot_bytes=SLOT) as members:
        arrays = [(np.random.default_rng(number).random(count) * 100).astype(dtype) for number in range(3)]
        run(members, lambda rank: rank.region.all_reduce(rank.region.reserve(), arrays[rank.number], SUM))
        assert all(array.tobytes() == arrays[0].tobytes() for array in arrays)


def test_a_reduction_has_the_same_bits_in_one_round_and_in_many() -> None:
    arrays = [(np.random.default_rng(number).random(9_001) * 100).astype(np.float32) for number in range(3)]
    expected = (arrays[0] + arrays[1]) + arrays[2]
    for slot_bytes in (SLOT, 1 << 20):
        with ranks(3, slot_bytes=slot_bytes) as members:
            outs = [array.copy() for array in arrays]
            run(members, lambda rank: rank.region.all_reduce(rank.region.reserve(), outs[rank.number], SUM))  # noqa: B023
            assert all(out.tobytes() == expected.tobytes() for out in outs)


@pytest.mark.parametrize("count", [3, 20_011])
def test_an_average_is_divided_once(count: int) -> None:
    with ranks(3, slot_bytes=SLOT) as members:
        arrays = [np.full(count, number + 1.0, np.float32) for number in range(3)]
        average = reduction_of("avg")
        run(
            members, lambda rank: rank.region.all_reduce(rank.region.reserve(), arrays[rank.number], average, spin=True)
        )
        assert all((array == 2.0).all() for array in arrays)


@pytest.mark.parametrize("count", [3, 5_000])
def test_a_function_of_the_user_is_applied_in_the_order_of_ranks(count: int) -> None:
    last = reduction_of(lambda _, right: right, commutative=False)
    with ranks(3, slot_bytes=SLOT) as members:
        arrays = [np.full(count, number) for number in range(3)]
        run(members, lambda rank: rank.region.all_reduce(rank.region.reserve(), arrays[rank.number], last, spin=True))
        assert all((array == 2).all() for array in arrays)


@pytest.mark.parametrize("root", [0, 2])
def test_reduce_gives_it_to_the_root_and_leaves_the_others_alone(root: int) -> None:
    with ranks(3, slot_bytes=SLOT) as members:
        for count in COUNTS:
            arrays = inputs(3, count)
            before = [array.copy() for array in arrays]
            run(
                members,
                lambda rank: rank.region.reduce(
                    rank.region.reserve(),
                    arrays[rank.number],  # noqa: B023
                    arrays[rank.number] if rank.number == root else None,  # noqa: B023
                    SUM,
                    root,
                ),
            )
            before[root] = reduce(np.add, before)
            assert all((array == old).all() for array, old in zip(arrays, before, strict=True))


@pytest.mark.parametrize("inside", [False, True], ids=["elsewhere", "in place"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_reduce_scatter_gives_each_its_span(size: int, inside: bool) -> None:
    with ranks(size, slot_bytes=SLOT) as members:
        for count in COUNTS:
            arrays, spans = inputs(size, count), split(count, size)
            expected = reduce(np.add, arrays)
            outs = [
                array[start:stop] if inside else np.empty(stop - start, np.int64)
                for array, (start, stop) in zip(arrays, spans, strict=True)
            ]
            run(
                members,
                lambda rank: rank.region.reduce_scatter(
                    rank.region.reserve(),
                    arrays[rank.number],  # noqa: B023
                    outs[rank.number],  # noqa: B023
                    spans,  # noqa: B023
                    SUM,
                ),
            )
            assert all((out == expected[start:stop]).all() for out, (start, stop) in zip(outs, spans, strict=True))


@pytest.mark.parametrize("inside", [False, True], ids=["elsewhere", "in place"])
def test_all_gather_puts_unequal_arrays_together(inside: bool) -> None:
    spans = (Span(0, 7), Span(7, 7), Span(7, 5_000))
    with ranks(3, slot_bytes=SLOT) as members:
        whole = np.arange(5_000)
        outs = [np.full(5_000, -1) for _ in range(3)]
        arrays = [whole[start:stop].copy() for start, stop in spans]
        if inside:
            for number, (start, stop) in enumerate(spans):
                outs[number][start:stop] = arrays[number]
                arrays[number] = outs[number][start:stop]
        run(
            members,
            lambda rank: rank.region.all_gather(
                rank.region.reserve(), arrays[rank.number], outs[rank.number], spans, spin=True
            ),
        )
        assert all((out == whole).all() for out in outs)


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_gives_everybody_what_the_root_has(root: int) -> None:
    with ranks(3, slot_bytes=SLOT) as members:
        for count in COUNTS:
            arrays = [np.full(count, number) + np.arange(count) for number in range(3)]
            expected = arrays[root].copy()
            run(members, lambda rank: rank.region.broadcast(rank.region.reserve(), arrays[rank.number], root))  # noqa: B023
            assert all((array == expected).all() for array in arrays)


@given(data=st.data(), size=st.integers(2, 4))
@settings(max_examples=15, deadline=None)
def test_operations_of_all_kinds_follow_one_another(data: st.DataObject, size: int) -> None:
    kinds = data.draw(st.lists(st.tuples(st.sampled_from("rgsb"), st.integers(0, 3_000)), min_size=1, max_size=8))
    with ranks(size, slot_bytes=SLOT) as members:

        def all_of_them(rank: Rank) -> list[NDArray[Any]]:
            shared_region, outs, operations = rank.region, [], []
            for kind, count in kinds:
                array, order_number = np.arange(count) + rank.number, shared_region.reserve()
                if kind == "r":
                    operations.append(shared_region.all_reduce(order_number, array, SUM))
                elif kind == "b":
                    operations.append(shared_region.broadcast(order_number, array, size - 1))
                elif kind == "g":
                    out = np.empty(count * size, np.int64)
                    spans = [Span(each * count, (each + 1) * count) for each in range(size)]
                    operations.append(shared_region.all_gather(order_number, array, out, spans))
                    array = out
                else:
                    operations.append(
                        shared_region.reduce_scatter(order_number, array, array[: len(array)], every(rank, count), SUM)
                    )
                outs.append(array)
            rank.wait(*operations)
            return outs

        def every(rank: Rank, count: int) -> list[Span]:
            return [Span(0, count) for _ in members]

        results = all_well(together(members, all_of_them))
        for at, (kind, count) in enumerate(kinds):
            rows = [np.arange(count) + number for number in range(size)]
            expected = {"r": sum(rows), "s": sum(rows), "b": rows[-1], "g": np.concatenate(rows)}[kind]
            assert all((outs[at] == expected).all() for outs in results)
