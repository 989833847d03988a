from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from nexar.arrays.operators import reduction_of
from nexar.collectives.context import program_of
from nexar.collectives.executor import PHASE, Kernels, RunContext, ScratchMemory, exchange, execute
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.schedule import Combine, LocalCopy, Range, RecvStep, SendStep, Step, compile_steps
from nexar.collectives.schedules.algorithm import Shape
from nexar.errors import Cancelled, PeerLost, PeerMisbehaved
from nexar.group import Group
from nexar.links.messages import collective_tag
from tests.unit.collectives.posting import Hub, PostingGroup, run_all

REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 12, 8, 0, 1)
SUM = Kernels.of(reduction_of("sum"), np.dtype(np.float64))


def ground(hub: Hub, rank: int, size: int, moved: Any = lambda: None) -> RunContext:
    return RunContext(cast(Group, PostingGroup(hub, rank, size)), ScratchMemory(), 5, REDUCE, 0.0, moved)


@pytest.mark.parametrize("name", ["ring", "pipelined_ring", "recursive_doubling", "halving_doubling"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_schedules_run_to_the_same_result_on_all_ranks(name: str, size: int) -> None:
    hub, count = Hub(), 37
    arrays = [np.arange(count) * 1.0 + rank for rank in range(size)]
    runs = [
        execute(
            ground(hub, rank, size),
            program_of(name, OperationCode.ALL_REDUCE, Shape(rank, size, count, 0, 4))[0],
            [arrays[rank]],
            SUM,
        )
        for rank in range(size)
    ]
    run_all(hub, runs)
    assert all(np.array_equal(each, np.arange(count) * size + sum(range(size))) for each in arrays)
    assert not hub.sent
    assert not hub.asked


def test_data_is_combined_on_the_side_that_the_schedule_says() -> None:
    minus = Kernels(lambda out, left, right: np.subtract(left, right, out=out), lambda _, __: None)
    for how, wanted in ((Combine.COPY, 10), (Combine.BEFORE, 10 - 3), (Combine.AFTER, 3 - 10)):
        hub = Hub()
        taking = compile_steps((Step(receives=(RecvStep(1, Range(0, 0, 1), 0, how),)),))
        other = compile_steps((Step(sends=(SendStep(0, Range(0, 0, 1), 0),)),))
        mine = np.array([3.0])
        run_all(
            hub,
            [execute(ground(hub, 0, 2), taking, [mine], minus), execute(ground(hub, 1, 2), other, [np.array([10.0])])],
        )
        assert mine[0] == wanted


def test_nothing_is_written_where_a_send_still_reads() -> None:
    hub = Hub(hold=True)
    array = np.array([1.0, 2.0])
    steps = compile_steps(
        (
            Step(sends=(SendStep(1, Range(0, 0, 1), 0),)),
            Step(then=(LocalCopy(Range(0, 0, 1), Range(0, 1, 2), Combine.COPY),)),
        )
    )
    run = execute(ground(hub, 0, 2), steps, [array])
    (send,) = next(run)
    assert array[0] == 1
    cast(Any, send).end()
    with pytest.raises(StopIteration):
        next(run)
    assert array[0] == 2


def test_it_ends_only_when_all_that_it_sent_is_gone() -> None:
    hub = Hub(hold=True)
    run = execute(ground(hub, 0, 2), compile_steps((Step(sends=(SendStep(1, Range(0, 0, 1), 0),)),)), [np.zeros(1)])
    (send,) = next(run)
    assert send is hub.posted[0]


@pytest.mark.parametrize("how", ["closed", "thrown", "failed"])
def test_whatever_ends_it_early_detaches_every_buffer_first(how: str) -> None:
    hub = Hub(hold=True)
    steps = (Step(sends=(SendStep(1, Range(0, 0, 1), 0),), receives=(RecvStep(1, Range(0, 1, 2), 0, Combine.COPY),)),)
    later = Step(receives=(RecvStep(1, Range(0, 2, 3), 1, Combine.AFTER),))
    run = execute(ground(hub, 0, 2), compile_steps((*steps, later)), [np.zeros(3)], SUM)
    next(run)
    assert len(hub.posted) == 3
    if how == "closed":
        run.close()
    else:
        with pytest.raises(PeerLost):
            run.throw(PeerLost(rank=1, cause="gone"))
    assert all(each.cancelled for each in hub.posted)


def test_each_step_is_progress_and_each_phase_has_tags_of_its_own() -> None:
    hub, moves = Hub(), []
    steps = compile_steps((Step(sends=(SendStep(1, Range(0, 0, 1), 3),)), Step()))
    run_all(hub, [execute(ground(hub, 0, 2, partial(moves.append, 1)), steps, [np.zeros(1)], phase=2)])
    assert len(moves) == 2
    assert hub.sent[0][2] == collective_tag(5, 2 * PHASE + 3)


def test_peers_of_a_team_are_ranks_of_the_group() -> None:
    hub = Hub()
    steps = compile_steps((Step(sends=(SendStep(1, Range(0, 0, 1), 0),)),))
    run_all(hub, [execute(ground(hub, 0, 9), steps, [np.zeros(1)], ranks=[0, 7])])
    assert hub.sent[0][1] == 7


def test_arrays_of_any_shape_are_exchanged() -> None:
    hub = Hub()
    arrays = [np.full((rank, 2), rank, np.int16) for rank in range(3)]
    runs = []
    for rank in range(3):
        others = [other for other in range(3) if other != rank]
        runs.append(exchange(ground(hub, rank, 3), dict.fromkeys(others, arrays[rank]), others))
    for rank, found in enumerate(run_all(hub, runs)):
        assert sorted(found) == [other for other in range(3) if other != rank]
        assert all(np.array_equal(found[other], arrays[other]) for other in found)
        assert all(found[other].dtype == np.int16 for other in found)


def test_an_exchange_that_is_given_up_detaches_everything() -> None:
    hub = Hub(hold=True)
    run = exchange(ground(hub, 0, 2), {1: np.ones(3)}, [1])
    next(run)
    with pytest.raises(Cancelled):
        run.throw(Cancelled())
    assert [each.cancelled for each in hub.posted] == [True, True]


def test_who_sends_something_that_is_no_array_is_named() -> None:
    hub = Hub()
    receiving = exchange(ground(hub, 0, 2), {}, [1])
    next(receiving)
    next(exchange(ground(hub, 1, 2), {0: np.ones(3)}, ()))
    hub.sent[0][3].shape = (2, 2)
    hub.match()
    with pytest.raises(PeerMisbehaved, match=r"rank 1.*an invalid array"):
        next(receiving)


def _both(*steps: Step) -> tuple[Hub, Any, Any]:
    """Rank 0 runs these steps; its sends are done only when a test says so."""
    hub, mine = Hub(hold=True), np.array([3.0])
    return hub, mine, execute(ground(hub, 0, 2), compile_steps(steps), [mine])


def test_a_receive_into_the_range_of_an_earlier_send_is_posted_only_when_that_is_done() -> None:
    part = Range(0, 0, 1)
    hub, _, run = _both(Step(sends=(SendStep(1, part, 0),)), Step(receives=(RecvStep(1, part, 1, Combine.COPY),)))
    waited = next(run)
    assert [each.label for each in hub.posted] == ["send to 1"]
    assert list(waited) == hub.posted
    hub.posted[0].end()
    next(run)
    assert [each.label for each in hub.posted] == ["send to 1", "receive from 1"]


def test_what_arrives_for_the_range_of_a_send_of_the_same_step_is_written_only_when_that_is_done() -> None:
    part = Range(0, 0, 1)
    hub, mine, run = _both(Step(sends=(SendStep(1, part, 0),), receives=(RecvStep(1, part, 0, Combine.COPY),)))
    next(run)
    send, receive = (next(each for each in hub.posted if each.label.startswith(kind)) for kind in ("send", "receive"))
    receive.into[:] = np.array([10.0]).tobytes()
    receive.end()
    assert list(next(run)) == [send]
    assert mine[0] == 3.0, "the send still reads it"
    send.end()
    with pytest.raises(StopIteration):
        next(run)
    assert mine[0] == 10.0


def test_there_is_room_for_what_was_asked_for_and_it_fits_every_dtype() -> None:
    scratch = ScratchMemory()
    for size in (0, 1, 4096, 4097, 1_000_000):
        memory = scratch.take(size)
        assert memory.nbytes >= size
        assert memory.ctypes.data % np.dtype(np.complex128).alignment == 0


def test_what_is_given_back_is_taken_again_and_nobody_shares_it() -> None:
    scratch = ScratchMemory()
    first, second = scratch.take(5000), scratch.take(5000)
    assert not np.may_share_memory(first, second)
    scratch.give_back(first)
    assert scratch.take(6000) is first
    assert scratch.take(6000) is not first


def test_no_more_is_kept_than_is_worth_keeping() -> None:
    scratch = ScratchMemory()
    huge = scratch.take(100 << 20)
    scratch.give_back(huge)
    assert scratch.take(100 << 20) is not huge
    many = [scratch.take(16 << 20) for _ in range(5)]
    for each in many:
        scratch.give_back(each)
    again = [scratch.take(16 << 20) for _ in range(5)]
    assert sum(any(each is other for other in many) for each in again) == 4


def test_nothing_is_kept_for_a_communicator_that_is_over() -> None:
    scratch = ScratchMemory()
    free, lent = scratch.take(5000), scratch.take(5000)
    scratch.give_back(free)
    scratch.close()
    scratch.close()
    scratch.give_back(lent)
    taken = scratch.take(5000)
    assert taken is not free
    assert taken is not lent
