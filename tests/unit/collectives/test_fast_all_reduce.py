import numpy as np
import pytest

from nexar.collectives.fast_all_reduce import FastAllReduce
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import CollectiveMismatch, UsageError
from tests.ranks import on_every


def test_the_short_way_gives_what_the_usual_one_gives() -> None:
    def run(comm: Communicator) -> None:
        fast = FastAllReduce(comm._context)
        for op in ("sum", "avg", "max", "lor"):
            for shape in ((0,), (1,), (5,), (2, 3), (20_000,)):
                short = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + comm.rank
                usual = short.copy()
                assert fast.all_reduce(short, op)
                comm.all_reduce(usual, op, timeout=30)
                assert short.tobytes() == usual.tobytes()

    with local_communicators(3, Config()) as world:
        on_every(world, run)


def test_an_array_with_gaps_or_for_reading_is_left_to_the_usual_way() -> None:
    with local_communicators(1, Config()) as (comm,):
        fast = FastAllReduce(comm._context)
        assert not fast.all_reduce(np.ones((4, 4))[:, 1], "sum")
        fixed = np.ones(4)
        fixed.flags.writeable = False
        assert not fast.all_reduce(fixed, "sum")


def test_what_cannot_be_is_refused_and_takes_no_number() -> None:
    with local_communicators(1, Config()) as (comm,):
        fast = FastAllReduce(comm._context)
        for array, op in ((np.ones(3, np.int32), "avg"), (np.ones(3), "band"), (np.ones(3), "no such op")):
            with pytest.raises(UsageError):
                fast.all_reduce(array, op)
        assert comm.stats()["calls"] == 0


def test_many_shapes_do_not_pile_up() -> None:
    with local_communicators(1, Config()) as (comm,):
        fast = FastAllReduce(comm._context)
        for count in range(1000):
            fast.all_reduce(np.ones(count), "sum")
        assert len(fast._plans) <= 256


def test_a_difference_that_is_seen_with_the_last_frame_is_raised_by_that_very_call() -> None:
    def run(comm: Communicator) -> None:
        for _ in range(20):
            part = comm.group(range(2))
            assert part is not None
            with pytest.raises(CollectiveMismatch):
                part.all_reduce(np.ones(3), "sum" if comm.rank else "max")

    with local_communicators(2, Config()) as world:
        on_every(world, run)
