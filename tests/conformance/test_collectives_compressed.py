"""all_reduce_compressed on 1 to 9 ranks, against NumPy: dense arrays of the same selection, summed in rank order."""

from collections.abc import Iterator
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from nexar import FP8, Int8, NoCompression, RandomK, TopK
from nexar.arrays.compression.base import Compressor, Piece, Terms
from nexar.arrays.dtypes import DTYPES, kind_of
from nexar.collectives.compressed import seed_of
from nexar.communicator.communicator import Communicator
from tests.conformance.worlds import ranks_over
from tests.ranks import EVENT_TIMEOUT, on_every


class Halves(Compressor):
    """One of a user's: every element as a float16."""

    def size_bytes(self, count: int, dtype: np.dtype[Any]) -> int:
        return 2 * count

    def compress(self, array: NDArray[Any], terms: Terms) -> Piece:
        return array.astype(np.float16).view(np.uint8)

    def decompress(self, piece: Piece, terms: Terms) -> NDArray[Any]:
        return piece.copy().view(np.float16).astype(terms.work)


COMPRESSORS = (TopK(0.1), TopK(1), RandomK(0.3), NoCompression(), FP8(block=16), FP8("e5m2"), Int8(16), Halves())
COUNTS = (0, 1, 2, 33)
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
FLOATS = tuple(dtype for dtype in DTYPES if kind_of(dtype) == "float")


class Case(NamedTuple):
    compressor: Compressor
    elements: int
    dtype: np.dtype[Any]
    op: str
    feedback: bool

    def array(self, rank: int) -> NDArray[Any]:
        return np.random.default_rng([rank, self.elements]).normal(size=self.elements).astype(self.dtype)

    def residual(self, rank: int) -> NDArray[Any] | None:
        return self.array(rank + 100) if self.feedback else None


def cases(dtypes: tuple[np.dtype[Any], ...], counts: tuple[int, ...] = COUNTS) -> list[Case]:
    return [Case(*each) for each in product(COMPRESSORS, counts, dtypes, ("sum", "avg"), (False, True))]


@pytest.mark.full
def test_every_compressor_gives_the_sum_of_what_was_chosen_on_one_to_nine_ranks(world: list[Communicator]) -> None:
    check(world, [*cases((SINGLE,)), *(Case(each, 257, DOUBLE, "avg", feedback=True) for each in COMPRESSORS)])


@pytest.mark.parametrize("scheme", ["memory", "shm", "tls", "quic"])
def test_narrow_types_are_summed_in_float32_over_every_transport(scheme: str) -> None:
    with ranks_over(scheme, 3, collective_timeout=EVENT_TIMEOUT) as made:
        check(made, cases(FLOATS, (1, 33)))


def test_a_piece_that_does_not_travel_whole_arrives_all_the_same() -> None:
    with ranks_over("memory", 4, collective_timeout=EVENT_TIMEOUT, eager_limit_bytes=1024) as made:
        check(made, [Case(compressor, 20_011, SINGLE, "sum", feedback=True) for compressor in COMPRESSORS])


@pytest.fixture(params=range(1, 10))
def world(request: pytest.FixtureRequest) -> Iterator[list[Communicator]]:
    with ranks_over("memory", request.param, collective_timeout=EVENT_TIMEOUT) as made:
        yield made


def check(world: list[Communicator], cases: list[Case]) -> None:
    """Every rank has the same bits, and they are NumPy's; and its residual is what was not sent."""
    first = world[0]._context.call_log._next

    def task(comm: Communicator) -> list[tuple[NDArray[Any], NDArray[Any] | None]]:
        ended = []
        for case in cases:
            x, residual = case.array(comm.rank), case.residual(comm.rank)
            comm.all_reduce_compressed(x, case.compressor, residual=residual, op=case.op)
            ended.append((x, residual))
        return ended

    group = world[0]._context.group
    for number, (case, ended) in enumerate(zip(cases, zip(*on_every(world, task), strict=True), strict=True)):
        seed = seed_of(group.communicator, group.matching.generation, first + number)
        compare(case, ended, Terms(case.elements, case.dtype, seed, case.feedback))


def compare(case: Case, ended: tuple[tuple[NDArray[Any], NDArray[Any] | None], ...], terms: Terms) -> None:
    wanted = [added(case.array(rank), case.residual(rank), terms) for rank in range(len(ended))]
    sent = [chosen(case.compressor, each, terms) for each in wanted]
    expected = linear(case, wanted, sent, terms) if case.compressor.linear else total(case, sent, terms)
    for rank, (x, residual) in enumerate(ended):
        assert x.tobytes() == ended[0][0].tobytes(), f"{case} differs on rank {rank}"
        np.testing.assert_array_equal(x.astype(float), expected.astype(float), err_msg=f"{case}, rank {rank}")
        if residual is not None:
            left = (wanted[rank] - sent[rank]).astype(case.dtype)
            np.testing.assert_array_equal(residual.astype(float), left.astype(float), err_msg=f"{case}, rank {rank}")


def added(array: NDArray[Any], residual: NDArray[Any] | None, terms: Terms) -> NDArray[Any]:
    return array.astype(terms.work) + (0 if residual is None else residual.astype(terms.work))


def chosen(compressor: Compressor, wanted: NDArray[Any], terms: Terms) -> NDArray[Any]:
    """The dense array that one rank's piece stands for. Of TopK by sorting, so not by what it does itself."""
    if not isinstance(compressor, TopK):
        return compressor.decompress(compressor.compress(wanted, terms), terms)
    count = min(len(wanted), max(1, int(np.ceil(len(wanted) * compressor.ratio))))
    places = np.argsort(-np.abs(wanted), kind="stable")[:count]
    sparse = np.zeros_like(wanted)
    sparse[places] = wanted[places].astype(terms.dtype)
    return sparse


def total(case: Case, sent: list[NDArray[Any]], terms: Terms) -> NDArray[Any]:
    """In rank order, rounded once."""
    whole = reduce(np.add, sent)
    return (whole / terms.work.type(len(sent)) if case.op == "avg" else whole).astype(case.dtype)


def linear(case: Case, wanted: list[NDArray[Any]], sent: list[NDArray[Any]], terms: Terms) -> NDArray[Any]:
    """As all_reduce reduces values of the caller's dtype; what is rescaled is that."""

    def rounded(array: NDArray[Any]) -> NDArray[Any]:
        return array.astype(case.dtype).astype(terms.work)

    values = [np.where(each != 0, rounded(whole), 0) for whole, each in zip(wanted, sent, strict=True)]
    whole = reduce(np.add, values)
    if case.op == "avg" and len(sent) > 1:
        whole = whole / terms.work.type(len(sent))
    whole = rounded(whole)
    count = case.elements
    scaled = isinstance(case.compressor, RandomK) and not case.feedback and count > 0
    scale = terms.work.type(count / int(np.ceil(count * 0.3)) if scaled else 1)
    return (whole * scale).astype(case.dtype)
