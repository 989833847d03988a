import numpy as np
import pytest

from nexar.arrays.compression.codes import code_of_compressor
from nexar.arrays.compression.sparse import TopK
from nexar.arrays.dtypes import code_of
from nexar.arrays.operators import ReduceCode
from nexar.collectives.fingerprint import (
    Fingerprint,
    algorithm_name,
    code_of_algorithm,
    counted,
    operation_name,
    rooted,
)
from nexar.collectives.operations import COLLECTIVES, AlgorithmCode, OperationCode
from nexar.collectives.selection import SHARED_MEMORY, TWO_LEVEL

FLOAT = code_of(np.dtype(np.float32))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (Fingerprint(OperationCode.BARRIER), "barrier"),
        (Fingerprint(OperationCode.ALL_REDUCE, FLOAT, 8, 0, ReduceCode.SUM), "all_reduce of float32[8], sum"),
        (Fingerprint(OperationCode.BROADCAST, FLOAT, 3, rooted(2)), "broadcast of float32[3], root 2"),
        (Fingerprint(OperationCode.REDUCE, FLOAT, 3, rooted(0), ReduceCode.MAX), "reduce of float32[3], max, root 0"),
        (
            Fingerprint(
                OperationCode.ALL_REDUCE_COMPRESSED, FLOAT, 8, code_of_compressor(TopK(0.01), feedback=True), 5
            ),
            "all_reduce_compressed of float32[8], avg, TopK(0.01) with a residual",
        ),
        (Fingerprint(99, 77, 3, 0, 55), "collective 99 of dtype 77[3], op 55"),
    ],
)
def test_a_call_is_reported_as_text(call: Fingerprint, words: str) -> None:
    assert call.describe() == words


def test_root_zero_is_distinguished_from_no_root() -> None:
    assert rooted(0) != Fingerprint(OperationCode.BARRIER).root


def test_every_operation_has_the_name_that_users_write() -> None:
    assert [operation_name(code) for code in (OperationCode.ALL_REDUCE, OperationCode.ALL_TO_ALL_V)] == [
        "all_reduce",
        "all_to_all_v",
    ]
    assert operation_name(200) == "collective 200"


def test_unequal_counts_are_distinguished_by_a_digest_that_fits_its_field() -> None:
    digests = {counted(counts) for counts in ([3, 1], [1, 3], [4, 0], [0, 4], [2, 2], [22], [])}
    assert len(digests) == 7
    assert all(0 <= digest < 1 << 31 for digest in digests)
    call = Fingerprint(OperationCode.REDUCE_SCATTER_V, FLOAT, 4, counted([3, 1]), ReduceCode.SUM)
    assert call.describe() == f"reduce_scatter_v of float32[4], sum, counts of digest {counted([3, 1]):x}"


def test_the_way_is_reported_when_it_is_asked_for() -> None:
    call = Fingerprint(OperationCode.SCAN, FLOAT, 4, algorithm_code=code_of_algorithm("ring"))
    assert call.describe() == "scan of float32[4]"
    assert call.describe(with_algorithm=True) == "scan of float32[4], by ring"
    assert Fingerprint(OperationCode.SCAN).describe(with_algorithm=True) == "scan"


def test_every_algorithm_has_a_number_of_its_own_that_fits_into_a_byte() -> None:
    names = {SHARED_MEMORY, TWO_LEVEL, *(name for row in COLLECTIVES.values() for name in row.algorithms)}
    numbers = {code_of_algorithm(name) for name in names}
    assert len(numbers) == len(names) == len(AlgorithmCode)
    assert all(0 < number < 32 for number in numbers)
    assert {algorithm_name(number) for number in numbers} == names


def test_what_has_no_number_is_not_stated_and_what_is_not_known_is_named_by_its_number() -> None:
    assert code_of_algorithm("new_in_the_next_version") == 0
    assert algorithm_name(30) == "algorithm 30"


def test_what_was_asked_for_is_part_of_a_way() -> None:
    ring = code_of_algorithm("ring")
    asked = (
        code_of_algorithm("ring", forced=True),
        code_of_algorithm("direct", deterministic=True),
        code_of_algorithm("direct", forced=True, deterministic=True),
    )
    assert len({ring, *asked}) == 4
    assert max(asked) < 256
    assert [algorithm_name(each) for each in asked] == [
        "ring, algorithm='ring'",
        "direct, deterministic=True",
        "direct, algorithm='direct', deterministic=True",
    ]
