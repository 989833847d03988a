import tracemalloc
from typing import Any

import numpy as np
import pytest

from nexar.arrays.compression.base import Compressor, Piece, Terms
from nexar.arrays.compression.quantized import FP8, Int8, NoCompression
from nexar.arrays.compression.sparse import RandomK, TopK
from nexar.arrays.operators import reduction_of
from nexar.collectives.compressed import (
    CompressedArguments,
    CompressedResult,
    all_reduce_compressed,
    memory_bytes,
    seed_of,
)
from nexar.communicator.communicator import Communicator
from nexar.communicator.local import local_communicators
from nexar.config import Config
from nexar.errors import Cancelled, CollectiveMismatch, NexarError, PeerMisbehaved, UsageError
from tests.ranks import EVENT_TIMEOUT, on_every

SUM = reduction_of("sum")
OURS = [TopK(0.1), RandomK(0.1), NoCompression(), FP8(), Int8()]


def perform(comm: Communicator, brought: CompressedArguments) -> CompressedResult:
    found: CompressedResult = comm._context.runner.run_blocking(
        all_reduce_compressed(comm._context, brought), EVENT_TIMEOUT
    )
    return found


def test_seeds_are_the_same_for_the_same_call_and_differ_for_others() -> None:
    seeds = [seed_of(*call) for call in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1 << 63, 7, 1 << 40))]
    assert len(set(seeds)) == 5
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert seed_of(3, 1, 4) == 0xBB77D20DB65ACE24, "ranks of different versions have to agree"


@pytest.mark.parametrize("compressor", OURS, ids=lambda each: each.name)
def test_nothing_of_the_callers_is_written(compressor: Compressor) -> None:
    with local_communicators(2, Config()) as world:

        def task(comm: Communicator) -> CompressedResult:
            array, residual = np.arange(30.0), np.ones(30)
            array.flags.writeable = residual.flags.writeable = False
            found = perform(comm, CompressedArguments(array, residual, compressor, SUM))
            assert found.residual is not None
            assert found.total.dtype == found.residual.dtype == np.float64
            return found

        one, other = on_every(world, task)
        assert (one.total == other.total).all()
        assert np.allclose(one.total, 2 * (np.arange(30.0) + 1 - one.residual))  # type: ignore[operator]


@pytest.mark.parametrize("compressor", OURS, ids=lambda each: each.name)
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_memory_that_is_reckoned_with_is_that_which_is_taken(
    compressor: Compressor, feedback: bool, dtype: type
) -> None:
    """On one rank, whose threads share the count with nobody. Not much more is reckoned, either."""
    count = 1 << 18
    array = np.random.default_rng(0).normal(size=count).astype(dtype)
    residual = np.zeros(count, dtype) if feedback else None
    brought = CompressedArguments(array, residual, compressor, SUM)
    with local_communicators(1, Config()) as (comm,):
        perform(comm, brought)
        tracemalloc.start()
        perform(comm, brought)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak - 65536 <= memory_bytes(brought, 1) <= 3 * peak


def test_more_memory_than_is_allowed_is_refused_on_every_rank_before_the_call_is_one() -> None:
    brought = CompressedArguments(np.ones(1000, np.float32), None, TopK(0.5), SUM)
    with local_communicators(3, Config(compressed_allreduce_max_bytes=memory_bytes(brought, 3))) as world:
        on_every(world, lambda comm: perform(comm, brought))
        more = brought._replace(residual=np.zeros(1000, np.float32))
        for comm in world:
            with pytest.raises(UsageError, match=r"TopK\(0\.5\) on 3 ranks would take .* NEXAR_COMPRESSED_ALLREDUCE"):
                perform(comm, more)
        assert [comm._context.call_log._next for comm in world] == [1, 1, 1]
    with local_communicators(1, Config(compressed_allreduce_max_bytes=0)) as (comm,):
        perform(comm, more)


class Odd(Compressor):
    """Follows its script, mistakes included."""

    def __init__(self, size: int = 8, piece: Any = None, array: Any = None, *, linear: bool = False) -> None:
        self._size, self._piece, self._array = size, piece, array
        self.linear = linear  # type: ignore[misc]

    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        return self._size

    def compress(self, array: Any, terms: Terms) -> Piece:
        return np.zeros(8, np.uint8) if self._piece is None else self._piece

    def decompress(self, piece: Piece, terms: Terms) -> Any:
        return np.zeros(2) if self._array is None else self._array


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (Odd(-1), "gives -1 as the size_bytes"),
        (Odd(9, linear=True), "a multiple of the item size"),
        (Odd(piece=np.zeros(7, np.uint8)), r"uint8\[7\], but size_bytes requires uint8\[8\]"),
        (Odd(piece=np.zeros(8, np.int8)), r"int8\[8\], but"),
        (Odd(piece=[0] * 8), "piece of list, but"),
        (Odd(8.0), r"gives 8\.0 as the size_bytes"),  # type: ignore[arg-type]
        (Odd(array=np.zeros(3)), r"a piece to float64\[3\], not to float64\[2\]"),
        (Odd(array=np.zeros(1)), r"a piece to float64\[1\], not"),
        (Odd(array=np.zeros(2, np.float32)), r"a piece to float32\[2\], not"),
        (Odd(array=1.0), "a piece to float, not"),
    ],
)
@pytest.mark.parametrize("feedback", [True, False])
def test_a_compressor_that_breaks_its_contract_is_reported(odd: Odd, says: str, feedback: bool) -> None:
    residual = np.zeros(2) if feedback else None
    with local_communicators(1, Config()) as (comm,), pytest.raises(UsageError, match=says):
        perform(comm, CompressedArguments(np.ones(2), residual, odd, SUM))


def test_pieces_of_other_lengths_on_other_ranks_are_a_mismatch() -> None:
    with local_communicators(2, Config()) as world:

        def task(comm: Communicator) -> str:
            size = 8 + 4 * comm.rank
            odd = Odd(size, np.zeros(size, np.uint8))
            with pytest.raises(CollectiveMismatch) as raised:
                perform(comm, CompressedArguments(np.ones(2), None, odd, SUM))
            return raised.value.found

        assert all("digest" in found for found in on_every(world, task))


class Picky(TopK):
    """Refuses pieces of other values than these."""

    reads: tuple[float, ...]

    def add(self, piece: Piece, total: Any, terms: Terms) -> None:
        if float(piece[:8].copy().view(np.float64)[0]) not in self.reads:
            raise ValueError("its values are others")
        super().add(piece, total, terms)


@pytest.mark.parametrize(("reads", "error"), [((1.0,), PeerMisbehaved), ((2.0,), ValueError)])
def test_who_sent_what_cannot_be_read_is_named_if_it_is_another_rank(
    reads: tuple[float, ...], error: type[Exception]
) -> None:
    """Rank 0 refuses the piece of rank 1, or its own; rank 1 reads both."""
    with local_communicators(2, Config()) as world:

        def task(comm: Communicator) -> Exception | None:
            compressor = Picky(1)
            object.__setattr__(compressor, "reads", (1.0, 2.0) if comm.rank else reads)
            try:
                perform(comm, CompressedArguments(np.full(1, 1.0 + comm.rank), None, compressor, SUM))
            except (NexarError, ValueError) as raised:
                return raised
            return None

        first, second = on_every(world, task)
    assert type(first) is error
    assert "its values are others" in str(first)
    assert getattr(first, "rank", None) == (1 if error is PeerMisbehaved else None)
    assert second is None or type(second) is Cancelled, "as far as it had come; and nobody is lost"
