"""What users pass in, and what they get back: layouts, `out=`, numbers, functions."""

import array
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nexar.collectives.requests import HALF_WRITTEN
from nexar.communicator.communicator import Communicator
from nexar.errors import CollectiveMismatch, NexarError
from tests.conformance.worlds import ranks_over
from tests.ranks import EVENT_TIMEOUT, on_every

SIZE = 3


@pytest.fixture(params=["memory", "shm"])
def world(request: pytest.FixtureRequest) -> Iterator[list[Communicator]]:
    with ranks_over(request.param, SIZE, collective_timeout=EVENT_TIMEOUT) as made:
        yield made


def layouts(rank: int) -> list[np.ndarray]:
    """Twenty-four numbers each, differently laid out on different ranks."""
    wide = np.zeros((4, 12))
    wide[:, ::2] = numbers(rank).reshape(4, 6)
    square = numbers(rank).reshape(4, 6)
    return [
        square,
        np.asfortranarray(square) if rank else square.copy(),
        wide[:, ::2],
        numbers(rank)[::-1].copy()[::-1],
        numbers(rank).reshape(2, 3, 4).transpose(0, 2, 1).copy().transpose(0, 2, 1),
        np.repeat(numbers(rank), 2)[::2],
    ]


def numbers(rank: int) -> np.ndarray:
    return np.arange(24.0) + rank


TOTAL = sum(numbers(rank) for rank in range(SIZE))


# ---------------------------------------------------------------- layouts


def test_arrays_of_every_layout_are_worked_on_in_place(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        for given in layouts(comm.rank):
            assert comm.all_reduce(given) is given
            assert np.array_equal(given.ravel(), TOTAL)
        gappy = layouts(comm.rank)[2]
        comm.all_reduce(gappy)
        assert not gappy.base[:, 1::2].any(), "wrote between the elements"
        for given in layouts(comm.rank):
            assert comm.broadcast(given, root=2) is given
            assert np.array_equal(given.ravel(), numbers(2))
        for given in layouts(comm.rank):
            got = comm.reduce(given, root=1)
            assert got is (given if comm.rank == 1 else None)
            assert np.array_equal(given.ravel(), TOTAL if comm.rank == 1 else numbers(comm.rank))

    on_every(world, run)


def test_arrays_of_every_layout_are_gathered_and_cut(world: list[Communicator]) -> None:
    everyone = [numbers(rank) for rank in range(SIZE)]

    def run(comm: Communicator) -> None:
        for given in layouts(comm.rank):
            got = comm.all_gather(given)
            assert got.shape == (SIZE, *given.shape)
            assert np.array_equal(got.reshape(SIZE, -1), everyone)
            assert np.array_equal(given.ravel(), numbers(comm.rank))
            assert np.array_equal(comm.scan(given).ravel(), sum(everyone[: comm.rank + 1]))
        columns = (np.arange(24.0) + comm.rank).reshape(4, 6).T  # six rows of four
        assert np.array_equal(comm.reduce_scatter(columns), np.array_split(TOTAL.reshape(4, 6).T, SIZE)[comm.rank])
        expected = np.concatenate([np.split(each.reshape(4, 6).T, SIZE)[comm.rank] for each in everyone])
        assert np.array_equal(comm.all_to_all(columns), expected)
        assert np.array_equal(
            comm.scatter(columns if comm.rank == 0 else None), np.split(everyone[0].reshape(4, 6).T, SIZE)[comm.rank]
        )

    on_every(world, run)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4), (1, 1, 1)])
def test_arrays_without_dimensions_or_elements_are_right(world: list[Communicator], shape: tuple[int, ...]) -> None:
    def run(comm: Communicator) -> None:
        given = np.full(shape, comm.rank + 1.0)
        assert comm.all_reduce(given) is given
        assert (given == 6).all()
        assert comm.broadcast(given.copy()).shape == shape
        assert comm.all_gather(given).shape == (SIZE, *shape)
        assert comm.scan(np.ones(shape)).shape == shape
        assert (comm.scan(np.ones(shape)) == comm.rank + 1).all()
        got = comm.gather(given, root=1)
        assert (got is None) == (comm.rank != 1)
        if shape and shape[0] == 0:
            assert comm.reduce_scatter(given).shape == shape
            assert comm.all_to_all(given).shape == shape
        assert [each.shape for each in comm.all_gather_v(given)] == [shape] * SIZE

    on_every(world, run)


def test_rank_i_gets_chunk_i_of_a_reduce_scatter_with_distinct_chunks(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        for rows in (2, 3, 7, 3000):
            given = np.arange(rows * 5).reshape(rows, 5) * 100 + comm.rank
            kept = given.copy()
            got = comm.reduce_scatter(given)
            expected = np.array_split(np.arange(rows * 5).reshape(rows, 5) * 300 + 3, SIZE)[comm.rank]
            assert np.array_equal(got, expected)
            assert np.array_equal(given, kept)

    on_every(world, run)


# ---------------------------------------------------------------- out=


def test_out_gets_the_result_and_is_returned_and_the_input_stays(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        given = numbers(comm.rank)
        outs: list[tuple[Callable[..., Any], np.ndarray]] = [
            (comm.all_reduce, np.zeros(24)),
            (comm.all_gather, np.zeros((SIZE, 24))),
            (comm.reduce_scatter, np.zeros(8)),
            (comm.all_to_all, np.zeros(24)),
            (comm.scan, np.zeros(24)),
            (comm.exclusive_scan, np.zeros(24)),
        ]
        for verb, out in outs:
            wanted = verb(given.copy())
            assert verb(given, out=out) is out
            assert np.array_equal(out, wanted), verb.__name__
            assert np.array_equal(given, numbers(comm.rank)), verb.__name__
        for verb, shape in ((comm.reduce, (24,)), (comm.gather, (SIZE, 24))):
            out = np.zeros(shape)
            got = verb(given, root=1, out=out)
            assert got is (out if comm.rank == 1 else None)
            assert out.any() == (comm.rank == 1)
        out = np.zeros(8)
        assert comm.scatter(given if comm.rank == 2 else None, root=2, out=out) is out
        assert np.array_equal(out, np.split(numbers(2), SIZE)[comm.rank])

    on_every(world, run)


def test_out_may_have_another_layout_and_shape_or_be_the_input(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        given = numbers(comm.rank)
        wide = np.zeros((12, 4))
        assert comm.all_reduce(given, out=wide[:, ::2]).shape == (12, 2)
        assert np.array_equal(wide[:, ::2].ravel(), TOTAL)
        assert not wide[:, 1::2].any()
        square = np.zeros((4, 6), order="F")
        assert comm.scan(given, out=square) is square
        assert np.array_equal(square.ravel(), sum(numbers(rank) for rank in range(comm.rank + 1)))
        same = numbers(comm.rank)
        assert comm.all_reduce(same, out=same) is same
        assert np.array_equal(same, TOTAL)
        same = numbers(comm.rank)
        assert np.array_equal(comm.all_to_all(same, out=same), comm.all_to_all(numbers(comm.rank)))
        whole = np.zeros((SIZE, 24))
        whole[comm.rank] = numbers(comm.rank)
        comm.all_gather(whole[comm.rank], out=whole)
        assert np.array_equal(whole, [numbers(rank) for rank in range(SIZE)])
        part = numbers(comm.rank)
        comm.reduce_scatter(part, out=part[:8])
        assert np.array_equal(part[:8], np.split(TOTAL, SIZE)[comm.rank])

    on_every(world, run)


def test_out_may_overlap_the_input_in_any_way(world: list[Communicator]) -> None:
    """Large ones, which go through memory in several pieces: what is written early must not be read late."""

    def run(comm: Communicator) -> None:
        count = 400_000
        mine = np.arange(float(count)) + comm.rank
        total = np.arange(float(count)) * SIZE + sum(range(SIZE))
        memory = np.zeros(count + 1000)
        memory[:count] = mine
        comm.reduce(memory[:count], out=memory[1000:], root=1)
        assert np.array_equal(memory[1000:], total) if comm.rank == 1 else np.array_equal(memory[:count], mine)
        memory[:count] = mine
        comm.all_reduce(memory[:count], out=memory[1000:])
        assert np.array_equal(memory[1000:], total)
        rows = np.zeros((SIZE, count))
        other = (comm.rank + 1) % SIZE
        rows[other] = mine
        comm.all_gather(rows[other], out=rows)
        assert np.array_equal(rows, [np.arange(float(count)) + rank for rank in range(SIZE)])

    on_every(world, run)


def test_counts_that_differ_are_a_mismatch_not_garbage(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        counts = [1, 3, 2] if comm.rank else [3, 1, 2]
        with pytest.raises(CollectiveMismatch, match="counts of digest"):
            [comm.reduce_scatter_v(np.ones(6), counts) for _ in range(2)]  # who had returned raises at its next call

    on_every(world, run)


# ---------------------------------------------------------------- numbers and other kinds


def test_numbers_give_numbers_of_the_same_kind(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        cases: list[tuple[Any, Any]] = [
            (comm.rank, 3),
            (float(comm.rank), 3.0),
            (1j * comm.rank, 3j),
            (comm.rank == 1, True),
            (np.float32(comm.rank), np.float32(3)),
            (np.int8(comm.rank), np.int8(3)),
            (ml_dtypes.bfloat16(comm.rank), ml_dtypes.bfloat16(3)),
        ]
        for given, wanted in cases:
            got = comm.all_reduce(given)
            assert got == wanted
            assert type(got) is type(wanted)
        assert comm.all_reduce(comm.rank, "max") == 2
        assert comm.broadcast(comm.rank + 5, root=2) == 7
        assert comm.reduce(comm.rank, root=1) == (3 if comm.rank == 1 else None)
        assert comm.scan(1) == comm.rank + 1
        assert comm.exclusive_scan(2) == 2 * comm.rank
        assert comm.all_gather(comm.rank).tolist() == [0, 1, 2]
        gathered = comm.gather(1.5)
        assert (gathered.tolist() if comm.rank == 0 else gathered) == ([1.5] * SIZE if comm.rank == 0 else None)

    on_every(world, run)


def test_whatever_holds_numbers_is_worked_on_in_place(world: list[Communicator]) -> None:
    def run(comm: Communicator) -> None:
        for given in (array.array("d", [1, 2, 3]), bytearray([1, 2, 3]), memoryview(bytearray([1, 2, 3]))):
            assert comm.all_reduce(given) is given
            assert list(given) == [3, 6, 9]

    on_every(world, run)


def test_torch_tensors_come_back_as_tensors(world: list[Communicator]) -> None:
    torch = pytest.importorskip("torch")

    def run(comm: Communicator) -> None:
        given = torch.ones(4, 6, dtype=torch.bfloat16).T
        assert comm.all_reduce(given) is given
        assert (given == SIZE).all()
        assert torch.equal(comm.all_gather(torch.tensor([comm.rank])), torch.arange(SIZE).reshape(SIZE, 1))

    on_every(world, run)


def test_a_function_reduces_and_keeps_rank_order_when_it_must(world: list[Communicator]) -> None:
    def later(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Associative, and the right one always wins: so the last rank does, if they meet in order."""
        return np.where(right >= 0, right, left)

    def run(comm: Communicator) -> None:
        for count in (3, 20_000):
            given = np.full(count, comm.rank if comm.rank != 2 else -1)
            assert (comm.all_reduce(given.copy(), np.maximum) == 1).all()
            assert (comm.all_reduce(given.copy(), later, commutative=False) == 1).all()
            got = comm.reduce(given.copy(), later, root=0, commutative=False)
            assert got is None or (got == 1).all()
            assert (comm.reduce_scatter(given, later, commutative=False) == 1).all()
            assert (comm.scan(given, later, commutative=False) == min(comm.rank, 1)).all()

    on_every(world, run)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_deterministic_gives_the_same_bits_by_every_algorithm(world: list[Communicator], dtype: str) -> None:
    def run(comm: Communicator) -> set[bytes]:
        random = np.random.default_rng(comm.rank)
        given = random.normal(size=5000).astype(dtype)
        names = [None, "direct", "gather_fold", *(["shared_memory"] if comm._context.region is not None else [])]
        return {comm.all_reduce(given.copy(), algorithm=name, deterministic=True).tobytes() for name in names}

    found = on_every(world, run)
    assert len(set.union(*found)) == 1


def test_an_error_says_which_memory_it_may_have_left_half_written(world: list[Communicator]) -> None:
    def fails(left: Any, right: Any) -> Any:
        raise ValueError("no")

    def notes(call: Callable[[], object]) -> list[str]:
        with pytest.raises((ValueError, NexarError)) as raised:
            call()
        return getattr(raised.value, "__notes__", [])

    def run(comm: Communicator) -> None:
        array = np.ones(8)
        assert notes(lambda: comm.all_reduce(array, fails)) == [HALF_WRITTEN]
        assert notes(lambda: comm.reduce_scatter(np.ones(9), fails)) == []
        assert notes(lambda: comm.all_reduce(np.ones(16)[::2], fails)) == []
        assert notes(lambda: comm.all_reduce_bucketed([array, array], fails)) == []
        assert notes(lambda: comm.all_reduce_bucketed([array, array], fails, bucket_bytes=1)) == [HALF_WRITTEN]

    on_every(world, run)


def test_buckets_hold_many_arrays_of_several_dtypes(world: list[Communicator]) -> None:
    shapes = [(3,), (1000, 7), (), (0,), (5, 5), (20_000,)]

    def run(comm: Communicator) -> None:
        for limit in (1, 1000, 1 << 30):
            given = [np.full(shape, comm.rank + 1, dtype) for shape in shapes for dtype in (np.float32, np.int64)]
            given[4] = np.full((7, 3), comm.rank + 1.0)[:, ::2]
            got = comm.all_reduce_bucketed(given, bucket_bytes=limit)
            assert all(one is other for one, other in zip(got, given, strict=True))
            assert all((each == 6).all() for each in given)
        assert comm.all_reduce_bucketed([]) == []
        assert comm.all_reduce_bucketed([comm.rank, 1.0], "max") == [2, 1.0]

    on_every(world, run)
