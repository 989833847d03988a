"""What the user's arrays become, and when."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nexar
from nexar import FP8, Cancelled, CollectiveMismatch, Int8, NoCompression, RandomK, Revoked, TopK, UsageError
from nexar.arrays.compression.base import Compressor, Piece, Terms
from nexar.communicator.collective_calls import _blocks, _rows
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from tests.ranks import EVENT_TIMEOUT, on_every


@pytest.fixture
def alone() -> Iterator[Communicator]:
    """A world of one: every verb ends without anybody else."""
    with local_communicators(1, Config()) as (made,):
        yield made


def test_blocks_are_equal_parts_of_axis_0_and_single_rows_lose_it() -> None:
    cut = [
        [each.tolist() for each in _blocks(np.arange(6).reshape(shape), 3, "verb")] for shape in ((6,), (6, 1), (3, 2))
    ]
    assert cut == [[[0, 1], [2, 3], [4, 5]], [[[0], [1]], [[2], [3]], [[4], [5]]], [[0, 1], [2, 3], [4, 5]]]
    for shape in ((4,), ()):
        with pytest.raises(UsageError, match="verb_v"):
            _blocks(np.zeros(shape), 3, "verb")


def test_rows_are_cut_as_evenly_as_can_be_or_as_counts_say() -> None:
    array = np.zeros((7, 2))
    assert [row.count for row in _rows(array, 3, None)] == [len(each) for each in np.array_split(array, 3)]
    assert [tuple(row) for row in _rows(array, 3, [0, 7, 0])] == [(0, 0), (0, 7), (7, 7)]
    for counts in ([7], [3, 3, 3], [8, -1, 0], [3.5, 3.5, 0]):
        with pytest.raises(UsageError, match="counts"):
            _rows(array, 3, counts)  # type: ignore[arg-type]


def test_what_goes_in_comes_out_in_a_world_of_one(alone: Communicator) -> None:
    array = np.arange(4.0)
    assert alone.all_reduce(array) is alone.broadcast(array) is alone.reduce(array) is array
    assert array.tolist() == [0, 1, 2, 3]
    assert alone.all_gather(array).shape == alone.gather(array).shape == (1, 4)
    for verb in (alone.reduce_scatter, alone.all_to_all, alone.scan):
        got = verb(array)
        assert np.array_equal(got, array)
        assert not np.may_share_memory(got, array)
    assert alone.exclusive_scan(array, "max").tolist() == [-np.inf] * 4
    assert alone.scatter(array.reshape(1, 4)).tolist() == array.tolist()
    assert [each.tolist() for each in alone.all_gather_v(array)] == [array.tolist()]
    assert alone.all_to_all_v([array])[0].tolist() == alone.scatter_v([array]).tolist() == array.tolist()
    assert alone.all_reduce(4) == 4


def test_a_strided_array_gets_its_result_only_at_the_end(alone: Communicator) -> None:
    wide = np.arange(8.0)
    assert alone.all_reduce(wide[::2]).base is wide
    out = np.zeros((4, 2))
    assert alone.all_gather(wide, out=out[:, ::1]).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_out_must_have_room_for_the_result_and_its_dtype(alone: Communicator) -> None:
    for out in (np.zeros(5), np.zeros(4, np.float32)):
        with pytest.raises(UsageError, match="out= is float"):
            alone.scan(np.zeros(4), out=out)
    assert alone._context.call_log._next == 0


def test_it_works_in_place_or_elsewhere_and_a_number_gives_a_number() -> None:
    with local_communicators(2, Config()) as world:

        def task(comm: Communicator) -> None:
            x = np.array([[1.0, -5], [2, 0]]) * (comm.rank + 1)
            out = np.empty(4)
            assert comm.all_reduce_compressed(x, TopK(0.25), out=out) is out
            assert out.tolist() == [0, -15, 0, 0]
            assert x[0, 0] == comm.rank + 1
            assert comm.all_reduce_compressed(x, TopK(0.5), op="avg") is x
            assert x.tolist() == [[0, -7.5], [3, 0]]
            assert comm.all_reduce_compressed(1.5, TopK(1)) == 3.0
            assert comm.all_reduce_compressed(np.array(2.0), RandomK(0.1)).tolist() == 4.0

        on_every(world, task)


def test_arrays_with_gaps_are_written_where_they_are() -> None:
    with local_communicators(2, Config()) as world:

        def task(comm: Communicator) -> None:
            wide, left = np.zeros((4, 6), np.float32), np.zeros((8, 3), np.float32)
            wide[:, ::2] = np.arange(12).reshape(4, 3)
            x, residual = wide[:, ::2], left[::2]
            assert comm.all_reduce_compressed(x, TopK(0.25), residual=residual) is x
            assert x.ravel().tolist() == [0] * 9 + [18, 20, 22]
            assert residual.ravel().tolist() == [*range(9), 0, 0, 0]
            assert not wide[:, 1::2].any()
            assert not left[1::2].any()

        on_every(world, task)


@pytest.mark.parametrize("compressor", [TopK(0.2), RandomK(0.2), FP8(), Int8(), NoCompression()], ids=repr)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_what_is_sent_and_what_is_left_add_up_over_calls(compressor: Compressor, dtype: Any) -> None:
    """With a residual as wide as the work is done in, nothing gets lost but rounding of the result."""
    with local_communicators(3, Config()) as world:

        def task(comm: Communicator) -> tuple[Any, ...]:
            random = np.random.default_rng(comm.rank)
            residual = np.zeros(50, np.float64 if dtype is np.float64 else np.float32)
            brought, got = np.zeros(50), np.zeros(50)
            for _ in range(10):
                x = random.normal(size=50).astype(dtype)
                brought += x.astype(float)
                got += comm.all_reduce_compressed(x, compressor, residual=residual).astype(float)
            return brought, got, residual.astype(float)

        ended = on_every(world, task)
    for _, got, _ in ended:
        assert (got == ended[0][1]).all()
    whole = sum(brought - residual for brought, _, residual in ended)
    step = {2: 0.1 if dtype is ml_dtypes.bfloat16 else 0.01, 4: 1e-5, 8: 1e-13}[np.dtype(dtype).itemsize]
    assert np.abs(whole - ended[0][1]).max() < step


def test_requests_write_when_they_are_done() -> None:
    with local_communicators(2, Config()) as world:

        def task(comm: Communicator) -> None:
            arrays, residuals = [np.arange(5.0) for _ in range(3)], [np.zeros(5) for _ in range(3)]
            pairs = list(zip(arrays, residuals, strict=True))
            requests = [
                comm.start.all_reduce_compressed(x, TopK(0.4), residual=r, timeout=EVENT_TIMEOUT) for x, r in pairs
            ]
            assert all(done is x for done, x in zip(nexar.wait_all(requests), arrays, strict=True))
            for x, residual in pairs:
                assert x.tolist() == [0, 0, 0, 6, 8]
                assert residual.tolist() == [0, 1, 2, 0, 0]

        on_every(world, task)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"op": "max"}, "op='sum' and op='avg', not 'max'"),
        ({"op": lambda a, b: a + b}, "op='sum' and op='avg'"),
        ({"array": np.arange(4)}, "float types, not int64"),
        ({"array": np.ones(4, complex)}, "float types"),
        ({"compressor": TopK}, "is not a compressor"),
        ({"compressor": 0.01}, "is not a compressor"),
        ({"residual": np.zeros(5)}, r"residual= is float64\[5\], but has to be float64\[4\]"),
        ({"residual": np.zeros(4, np.float32)}, "residual= is float32"),
        ({"residual": 0.0, "array": np.ones(())}, "a number, which cannot be written to"),
        ({"out": np.empty(3)}, r"out= is float64\[3\]"),
        ({"array": np.broadcast_to(1.0, 4)}, "read-only"),
    ],
)
def test_what_makes_no_sense_is_refused_and_takes_no_number(arguments: dict[str, Any], says: str) -> None:
    with local_communicators(1, Config()) as (comm,):
        given: dict[str, Any] = {"array": np.ones(4), "compressor": TopK(0.5), **arguments}
        with pytest.raises(UsageError, match=says):
            comm.all_reduce_compressed(**given)
        assert comm._context.call_log._next == 0


def test_a_residual_in_the_memory_of_the_array_is_refused() -> None:
    memory = np.zeros(8)
    with local_communicators(1, Config()) as (comm,):
        for arguments in ({"array": memory[:4]}, {"array": np.ones(4), "out": memory[2:6]}):
            with pytest.raises(UsageError, match="one of its own"):
                comm.all_reduce_compressed(**arguments, compressor=TopK(1), residual=memory[1:5])


class Failing(TopK):
    """In one half of a call."""

    def __init__(self, when: str) -> None:
        super().__init__(0.5)
        object.__setattr__(self, "when", when)

    @property
    def name(self) -> str:
        return "Failing"

    def compress(self, array: Any, terms: Terms) -> Piece:
        if self.when == "compressing":  # type: ignore[attr-defined]
            raise ZeroDivisionError("here")
        return super().compress(array, terms)

    def add(self, piece: Piece, total: Any, terms: Terms) -> None:
        if self.when == "adding":  # type: ignore[attr-defined]
            raise ZeroDivisionError("here")
        super().add(piece, total, terms)


@pytest.mark.parametrize("when", ["compressing", "adding"])
@pytest.mark.parametrize("start", [False, True])
def test_a_call_that_raises_leaves_both_arrays_as_they_were(when: str, start: bool) -> None:
    with local_communicators(3, Config()) as world:

        def task(comm: Communicator) -> str:
            x, residual = np.arange(4.0), np.ones(4)
            compressor = Failing(when if comm.rank == 1 else "never")
            ended = "done"
            try:
                if start:
                    comm.start.all_reduce_compressed(x, compressor, residual=residual, timeout=EVENT_TIMEOUT).wait()
                else:
                    comm.all_reduce_compressed(x, compressor, residual=residual, timeout=EVENT_TIMEOUT)
            except (ZeroDivisionError, Cancelled) as error:
                ended = " ".join([type(error).__name__, *getattr(error, "__notes__", [])])
            assert x.tolist() == ([0, 0, 9, 12] if ended == "done" else [0, 1, 2, 3])
            assert residual.tolist() == ([1, 2, 0, 0] if ended == "done" else [1] * 4)
            return ended

        ended = on_every(world, task)
    assert ended[1] == "ZeroDivisionError"
    others = {"Cancelled"} if when == "compressing" else {"Cancelled", "done"}  # who had everything before has it
    assert {ended[0], ended[2]} <= others


def test_who_is_cancelled_or_revoked_keeps_what_it_had() -> None:
    with local_communicators(2, Config()) as world:
        x, residual = np.arange(4.0), np.ones(4)
        request = world[0].start.all_reduce_compressed(x, TopK(0.5), residual=residual)
        request.cancel()
        with pytest.raises(Cancelled):
            request.wait(EVENT_TIMEOUT)
        request = world[0].start.all_reduce_compressed(x, RandomK(0.5), residual=residual)
        on_every(world, lambda comm: comm.revoke())
        with pytest.raises((Revoked, Cancelled)):
            request.wait(EVENT_TIMEOUT)
        assert x.tolist() == [0, 1, 2, 3]
        assert residual.tolist() == [1] * 4


DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"compressor": TopK(0.25)}, r"TopK\(0.25\) without a residual"),
    ({"compressor": RandomK(0.5)}, r"RandomK\(0.5\) without a residual"),
    ({"compressor": Int8()}, r"Int8\(block=256\)"),
    ({"residual": np.zeros(8)}, r"TopK\(0.5\) with a residual"),
    ({"array": np.ones(9)}, r"float64\[9\]"),
    ({"array": np.ones(8, np.float32)}, r"float32\[8\]"),
    ({"op": "avg"}, "avg"),
]


@pytest.mark.parametrize(("arguments", "says"), DIFFERENT)
def test_ranks_that_differ_are_notified_who_called_what(arguments: dict[str, Any], says: str) -> None:
    with local_communicators(3, Config()) as world:

        def task(comm: Communicator) -> CollectiveMismatch:
            given = {"array": np.ones(8), "compressor": TopK(0.5)}
            given.update(arguments if comm.rank == 1 else {})
            before = {name: value.copy() for name, value in given.items() if isinstance(value, np.ndarray)}
            with pytest.raises(CollectiveMismatch, match=says) as raised:
                [comm.all_reduce_compressed(**given, timeout=EVENT_TIMEOUT) for _ in range(2)]  # type: ignore[arg-type]
            assert all((given[name] == value).all() for name, value in before.items())  # type: ignore[attr-defined]
            return raised.value

        ended = on_every(world, task)
    assert list(ended[0].ranks) == [1]
