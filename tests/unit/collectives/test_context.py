from collections.abc import Iterator

import numpy as np
import pytest

from nexar.arrays.operators import reduction_of
from nexar.collectives.context import CallOptions, CollectiveContext, program_of
from nexar.collectives.executor import Kernels
from nexar.collectives.fingerprint import Fingerprint
from nexar.collectives.operations import OperationCode
from nexar.collectives.schedules.algorithm import Shape
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import Cancelled, PeerLost, UsageError
from tests.ranks import EVENT_TIMEOUT, on_every

F32 = np.dtype(np.float32)
REDUCE = Fingerprint(OperationCode.ALL_REDUCE, 11, 3, 0, 1)


@pytest.fixture
def pair() -> Iterator[list[CollectiveContext]]:
    with local_communicators(2, Config(large_msg_bytes=4000)) as made:
        yield [comm._context for comm in made]


def test_the_same_call_chooses_the_same_way_on_every_rank_by_the_settings(pair: list[CollectiveContext]) -> None:
    for assembly in pair:
        assert assembly.choose(OperationCode.ALL_REDUCE, 10, F32) == "recursive_doubling"
        assert assembly.choose(OperationCode.ALL_REDUCE, 100_000, F32) == "pipelined_ring"
        assert assembly.choose(OperationCode.ALL_REDUCE, 10, F32, CallOptions("ring")) == "ring"
        assert (
            assembly.choose(OperationCode.ALL_REDUCE, 10, F32, CallOptions(None, deterministic=True)) == "gather_fold"
        )
        ordered = reduction_of(np.maximum, commutative=False)
        assert assembly.choose(OperationCode.ALL_REDUCE, 100_000, F32, reduction=ordered) == "direct"
        assert assembly.choose_schedule(OperationCode.ALL_REDUCE, 10, F32, 4) == "recursive_doubling"
        with pytest.raises(UsageError, match="two_level"):
            assembly.choose(OperationCode.ALL_REDUCE, 10, F32, CallOptions("two_level"))


def test_calls_take_numbers_in_a_row_and_threads_never_the_same(pair: list[CollectiveContext]) -> None:
    calls = on_every(range(8), lambda _: [pair[0].begin(REDUCE) for _ in range(20)])
    assert sorted(call.entry.sequence for each in calls for call in each) == list(range(160))
    for each in calls:
        for call in each:
            pair[0].work(call, iter(())).end(Cancelled())  # type: ignore[arg-type]


def test_a_call_that_finds_the_shared_memory_closed_is_one_and_ends_at_once(pair: list[CollectiveContext]) -> None:
    """The outcome of a call is reported with the state of the communicator; its beginning is not."""
    lost = PeerLost(rank=1, cause="its process has ended")

    class Closed:
        def announce(self, sequence: int, fingerprint: Fingerprint) -> None:
            raise lost

    pair[0].region = Closed()  # type: ignore[assignment]
    call = pair[0].begin(REDUCE)
    assert call.entry.error is lost
    raised = pair[0].work(call, iter(())).end(Cancelled())  # type: ignore[arg-type]
    assert isinstance(raised, PeerLost)


def test_a_schedule_borrows_memory_and_gives_it_back(pair: list[CollectiveContext]) -> None:
    def run(assembly: CollectiveContext) -> None:
        for _ in range(2):
            call = assembly.begin(REDUCE)
            work = np.full(3, assembly.group.rank + 1, np.float32)
            arithmetic = Kernels.of(reduction_of("sum"), F32)
            run = assembly.execute(call, "gather_fold", OperationCode.ALL_REDUCE, work, arithmetic=arithmetic)
            assembly.runner.run_blocking(assembly.work(call, run), EVENT_TIMEOUT)
            assert work.tolist() == [3] * 3

    on_every(pair, run)
    assert {assembly.scratch._kept_bytes for assembly in pair} == {4096}


def test_programs_are_kept_for_the_next_call_unless_they_are_long() -> None:
    short, long = Shape(0, 4, 1000, 0, 100), Shape(0, 4, 1_000_000, 0, 100)
    made = [program_of("pipelined_ring", OperationCode.ALL_REDUCE, shape)[0] for shape in (short, short, long, long)]
    assert made[0] is made[1]
    assert made[2] is not made[3]
    assert made[2] == made[3]
