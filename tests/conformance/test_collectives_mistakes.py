"""What careless users pass to collectives: one clear message, and no harm done."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nexar.communicator.communicator import Communicator
from nexar.errors import BufferMismatch, Cancelled, CollectiveMismatch, UsageError
from tests.conformance.worlds import ranks_over
from tests.ranks import EVENT_TIMEOUT, on_every

SIZE = 3


@pytest.fixture(params=["memory", "shm"])
def world(request: pytest.FixtureRequest) -> Iterator[list[Communicator]]:
    with ranks_over(request.param, SIZE, collective_timeout=EVENT_TIMEOUT) as made:
        yield made


frozen = np.ones(4)
frozen.flags.writeable = False

PARTS: list[tuple[Callable[[Communicator], Any], str]] = [
    (lambda c: c.split("red"), r"a colour is a whole number from 0 to 9223372036854775807 \(2\*\*63 - 1\)"),  # type: ignore[arg-type]
    (lambda c: c.split(-2), "from 0 to 9223372036854775807"),
    (lambda c: c.split(1 << 63), "from 0 to 9223372036854775807"),
    (lambda c: c.split(1, 1 << 63), "a key is a whole number of 64 bits"),
    (lambda c: c.group(None), "give the ranks as a list"),  # type: ignore[arg-type]
    (lambda c: c.group(1), "give the ranks as a list"),  # type: ignore[arg-type]
    (lambda c: c.group([0, 0]), "empty or repeats a rank"),
    (lambda c: c.group([5]), "ranks 0 to 2"),
]
MISTAKES: list[tuple[Callable[[Communicator], Any], str]] = [
    (lambda c: c.all_reduce(np.ones(3, np.int32), "avg"), "average of whole numbers"),
    (lambda c: c.all_reduce(np.ones(3), "band"), "bit operations"),
    (lambda c: c.all_reduce(np.ones(3, complex), "max"), "no order"),
    (lambda c: c.all_reduce(np.ones(3), "mean"), "not a reduction; allowed: sum"),
    (lambda c: c.all_reduce(np.ones(3), None), "not a reduction"),  # type: ignore[arg-type]
    (lambda c: c.all_reduce(np.array(["a"])), "cannot be sent or reduced; allowed: bool"),
    (lambda c: c.all_reduce(np.ones(3, ">f8")), "native byte order"),
    (lambda c: c.all_reduce(np.array([None])), "cannot be sent"),
    (lambda c: c.all_reduce([1, 2, 3]), "expected an array, got list"),
    (lambda c: c.all_reduce("text"), "expected an array, got str"),
    (lambda c: c.all_reduce(None), "expected an array, got NoneType"),
    (lambda c: c.all_reduce(frozen), "read-only"),
    (lambda c: c.all_reduce(b"abc"), "read-only"),
    (lambda c: c.all_reduce(np.ones(3), out=np.ones(4)), r"out= is float64\[4\], but the result is float64\[3\]"),
    (lambda c: c.all_reduce(np.ones(3), out=np.ones(3, np.float32)), "out= is float32"),
    (lambda c: c.all_reduce(np.ones(4), out=frozen), "read-only"),
    (lambda c: c.all_reduce(np.ones(3), out=3.0), "out="),
    (
        lambda c: c.all_reduce(np.ones(3), algorithm="bogus"),
        "does not exist for this operation; allowed for this all_reduce: .*ring",
    ),
    (lambda c: c.all_reduce(np.ones(3), algorithm="ring", deterministic=True), "does not fold"),
    (lambda c: c.all_reduce(np.ones(3), np.maximum, algorithm="ring", commutative=False), "rank order"),
    (lambda c: c.all_reduce(np.ones(3), algorithm="two_level"), "several hosts"),
    (lambda c: c.all_reduce(np.ones(3), timeout=-1), "above 0"),
    (lambda c: c.broadcast(np.ones(3), root=3), "ranks 0 to 2"),
    (lambda c: c.broadcast(np.ones(3), root=-1), "ranks 0 to 2"),
    (lambda c: c.broadcast(np.ones(3), root="a"), "ranks 0 to 2"),  # type: ignore[arg-type]
    (lambda c: c.reduce(np.ones(3), root=1.5), "ranks 0 to 2"),  # type: ignore[arg-type]
    (lambda c: c.gather(np.ones(3), root=None), "ranks 0 to 2"),  # type: ignore[arg-type]
    (lambda c: c.reduce_scatter(3.0), "axis 0"),
    (lambda c: c.reduce_scatter(np.ones(9), out=np.ones(4)), "out="),
    (lambda c: c.reduce_scatter_v(np.ones(9), [1, 2, 3]), "counts=.*9 rows into 3 parts"),
    (lambda c: c.reduce_scatter_v(np.ones(9), [10, -1, 0]), "counts="),
    (lambda c: c.reduce_scatter_v(np.ones(9), [4.5, 4.5, 0]), "counts="),  # type: ignore[list-item]
    (lambda c: c.reduce_scatter_v(np.ones(9), [9]), "counts="),
    (lambda c: c.all_to_all(np.ones(4)), "3 equal blocks"),
    (lambda c: c.all_to_all(3), "3 equal blocks"),
    (lambda c: c.all_to_all_v([np.ones(1)] * 2), "one array for each of 3 ranks, and got 2"),
    (lambda c: c.all_to_all_v([np.ones(1), np.ones(1), np.ones(1, np.int8)]), "one dtype"),
    (lambda c: c.scatter(np.ones(4), root=c.rank), "3 equal blocks"),
    (lambda c: c.scatter(None, root=c.rank), "expected an array, got NoneType"),
    (lambda c: c.scatter_v([], root=c.rank), "3 ranks, and got 0"),
    (lambda c: c.scatter_object([1], root=c.rank), "3 ranks, and got 1"),
    (lambda c: c.exclusive_scan(np.ones(3), "avg"), "no identity"),
    (lambda c: c.exclusive_scan(np.ones(3), np.maximum), "no identity"),
    (lambda c: c.all_gather(np.ones(3), out=np.ones((2, 3))), "out="),
    (lambda c: c.all_reduce_bucketed([np.ones(3)], bucket_bytes=0), "is too small or not a number"),
    (lambda c: c.all_reduce_bucketed([np.ones(3), "a"]), "expected an array, got str"),
    (lambda c: c.all_reduce_bucketed([np.ones(3)], bucket_bytes="a"), "bucket_bytes"),  # type: ignore[arg-type]
    (lambda c: c.broadcast_object(object(), root=c.rank), "cannot be sent|pickle"),
    *PARTS,
]


@pytest.mark.parametrize("started", [False, True], ids=["called", "started"])
def test_what_is_refused_is_no_call_and_the_next_one_works(world: list[Communicator], started: bool) -> None:
    """One clear message, at the call; and no number was taken, so only one rank need make the mistake."""
    for number, (mistake, words) in enumerate(MISTAKES):
        comm = world[number % SIZE]
        verbs = comm.start if started and number < len(MISTAKES) - len(PARTS) else comm
        if verbs is not comm:
            verbs.rank = comm.rank  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match=words):
            mistake(verbs)  # type: ignore[arg-type]
    assert on_every(world, lambda comm: comm.all_reduce(1, timeout=EVENT_TIMEOUT)) == [SIZE] * SIZE
    assert {comm._context.call_log.stats()["in_flight"] for comm in world} == {0}


DIFFERING: list[Callable[[Communicator, bool], Any]] = [
    lambda c, odd: c.all_reduce(np.ones(3), deterministic=odd),
    lambda c, odd: c.all_reduce(np.ones(3), algorithm="direct" if odd else "ring"),
    lambda c, odd: c.all_reduce(np.ones(3), algorithm="recursive_doubling" if odd else None),
    lambda c, odd: c.all_reduce(np.ones(3, np.float16), algorithm=None, deterministic=not odd),
    lambda c, odd: c.reduce(np.ones(3), deterministic=odd),
    lambda c, odd: c.reduce_scatter(np.ones(3), algorithm="direct" if odd else None),
    lambda c, odd: c.reduce_scatter_v(np.ones(3), [1, 1, 1], deterministic=odd),
    lambda c, odd: c.scan(np.ones(3), algorithm="recursive_doubling" if odd else None),
    lambda c, odd: c.exclusive_scan(np.ones(3), deterministic=odd),
    lambda c, odd: c.broadcast(np.ones(3), algorithm="flat" if odd else None),
    lambda c, odd: c.all_gather(np.ones(3), algorithm="direct" if odd else None),
    lambda c, odd: c.all_to_all(np.ones(3), algorithm="direct" if odd else None),
    lambda c, odd: c.gather(np.ones(3), algorithm="flat" if odd else None),
    lambda c, odd: c.scatter(np.ones(3) if c.rank == 0 else None, algorithm="flat" if odd else None),
    lambda c, odd: c.barrier(algorithm="two_phase" if odd else None),
    lambda c, odd: c.all_reduce_bucketed([np.ones(3)], deterministic=odd),
]


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(DIFFERING)))
def test_ranks_that_ask_for_different_algorithms_are_notified(world: list[Communicator], number: int) -> None:
    """Also where they take the same way by chance, as in shared memory: with another size they would not."""

    def call(comm: Communicator) -> None:
        DIFFERING[number](comm, comm.rank == 1)
        comm.barrier()  # who had its result already is notified at its next call

    def run(comm: Communicator) -> str:
        with pytest.raises(CollectiveMismatch) as raised:
            call(comm)
        return str(raised.value)

    said = on_every(world, run)
    assert all("deterministic=True" in each or "algorithm=" in each for each in said), said


def test_a_block_that_does_not_fit_out_is_refused_where_it_comes(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> str:
        try:
            comm.scatter(np.ones(6) if comm.rank == 0 else None, out=np.ones(2 if comm.rank != 1 else 5))
        except (BufferMismatch, Cancelled) as error:
            return type(error).__name__
        return "fine"

    ends = on_every(world, run)
    assert ends[1] == "BufferMismatch"
    assert on_every(world, lambda comm: comm.all_reduce(1)) == [SIZE] * SIZE
