"""Every collective among real processes, against folds in rank order."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from nexar_native import reduce, shm
from ranks import FLOAT32, LIMIT, SUM, Member, members, results, world

CHUNK = 32 << 10
ITEM = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 13: 8, 14: 16, 15: 2, 16: 1, 17: 1}
OPS = range(1, 12)
AVG = 5
# in a word, in a line, in a slot, in some chunks
BYTES = (0, 16, 32, 48, 4096, 3 * CHUNK + 64)
PAIRS = [(op, dtype) for op in OPS for dtype in ITEM if reduce.supported(op, dtype)]
Raw = np.ndarray[Any, np.dtype[np.uint8]]


def numbers(rank: int, count: int, dtype: int) -> Raw:
    """Bytes of elements that are small numbers in every type."""
    sequence = (np.arange(count) * 7 + 3 * rank) % 5
    native = {10: np.float16, 11: np.float32, 12: np.float64, 13: np.complex64, 14: np.complex128}.get(dtype)
    if native is not None:
        return (sequence - 1.5).astype(native).view(np.uint8)
    if dtype == 15:  # the upper half of a float32
        return (sequence - 1.5).astype(np.float32).view(np.uint16)[1::2].copy().view(np.uint8)
    if dtype in (16, 17):  # codes of numbers around 1
        return (sequence + 0x30).astype(np.uint8)
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[ITEM[dtype]]
    return (sequence & 1 if dtype == 1 else sequence).astype(width).view(np.uint8)


def folded(inputs: list[Raw], op: int, dtype: int) -> Raw:
    out = np.empty_like(inputs[0])
    reduce.fold(out, inputs, op, dtype, len(inputs) if op == AVG else 1)
    return out


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_reduce_of_every_type_and_operation_equals_the_fold_in_rank_order(size: int) -> None:
    def body(member: Member) -> None:
        for op, dtype in PAIRS:
            for length in BYTES:
                inputs = [numbers(rank, length // ITEM[dtype], dtype) for rank in range(size)]
                wanted, mine = folded(inputs, op, dtype), inputs[member.rank]
                out = np.zeros_like(mine)
                member.run(shm.ALL_REDUCE, op, dtype, array=mine, out=out)
                assert out.tobytes() == wanted.tobytes(), (op, dtype, length)
                member.run(shm.ALL_REDUCE, op, dtype, array=mine, out=mine)
                assert mine.tobytes() == wanted.tobytes(), (op, dtype, length, "in place")

    results(size, body, chunk_bytes=CHUNK)


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_get_the_same_bits(size: int) -> None:
    def body(member: Member) -> bytes:
        generator = np.random.default_rng(member.rank)
        parts = []
        for count in (2, 8, 500, 9000, 50_001):
            array = generator.normal(size=count).astype(np.float32)
            member.reduce(array)
            parts.append(array.tobytes())
        return b"".join(parts)

    assert len(set(results(size, body))) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("length", [0, 24, 4000, 2 * CHUNK, 5 * CHUNK + 40])
def test_the_root_gets_the_reduction(size: int, length: int) -> None:
    def body(member: Member) -> None:
        inputs = [numbers(rank, length // 4, FLOAT32) for rank in range(size)]
        wanted = folded(inputs, SUM, FLOAT32)
        for root in range(size):
            mine = inputs[member.rank].copy()
            out = np.zeros_like(mine) if member.rank == root else None
            member.run(shm.REDUCE, SUM, FLOAT32, array=mine, out=out, root=root)
            assert out is None or out.tobytes() == wanted.tobytes()
            assert mine.tobytes() == inputs[member.rank].tobytes()

    results(size, body, chunk_bytes=CHUNK)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("count", [0, 1, 7, 3000, 100_003])
def test_reduce_scatter_gives_each_rank_its_part(size: int, count: int) -> None:
    def body(member: Member) -> None:
        inputs = [numbers(rank, count, FLOAT32) for rank in range(size)]
        wanted = folded(inputs, SUM, FLOAT32).view(np.float32)
        uneven = [count] + [0] * (size - 1)
        for counts in ([], uneven, uneven[::-1]):
            each = counts or [len(part) for part in np.array_split(wanted, size)]
            start = sum(each[: member.rank])
            mine = wanted[start : start + each[member.rank]]
            out = np.zeros_like(mine)
            given = inputs[member.rank].copy()
            member.run(shm.REDUCE_SCATTER, SUM, FLOAT32, array=given, out=out, counts=counts)
            assert out.tobytes() == mine.tobytes()
            inside = given.view(np.float32)[start : start + each[member.rank]]
            member.run(shm.REDUCE_SCATTER, SUM, FLOAT32, array=given, out=inside, counts=counts)
            assert inside.tobytes() == mine.tobytes()

    results(size, body, chunk_bytes=CHUNK)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("count", [0, 1, 5000, 40_001])
def test_all_gather_gives_all_parts(size: int, count: int) -> None:
    def body(member: Member) -> None:
        for counts in ([count] * size, [count * rank for rank in range(size)]):
            parts = [np.arange(each, dtype=np.float32) + rank for rank, each in enumerate(counts)]
            wanted, start = np.concatenate(parts), sum(counts[: member.rank])
            out = np.zeros_like(wanted)
            member.run(shm.ALL_GATHER, dtype=FLOAT32, array=parts[member.rank], out=out, counts=counts)
            assert out.tobytes() == wanted.tobytes()
            out[:start] = 0
            out[start + counts[member.rank] :] = 0
            inside = out[start : start + counts[member.rank]]
            member.run(shm.ALL_GATHER, dtype=FLOAT32, array=inside, out=out, counts=counts)
            assert out.tobytes() == wanted.tobytes()

    results(size, body, chunk_bytes=CHUNK)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("length", [0, 1, 5000, 3 * CHUNK + 1])
def test_broadcast_gives_the_roots_array(size: int, length: int) -> None:
    def body(member: Member) -> None:
        for root in range(size):
            array = ((np.arange(length) * 31 + root) % 251).astype(np.uint8)
            out = np.zeros_like(array)
            if member.rank == root:
                member.run(shm.BROADCAST, dtype=6, array=array, root=root)
            else:
                member.run(shm.BROADCAST, dtype=6, out=out, root=root)
                assert out.tobytes() == array.tobytes()

    results(size, body, chunk_bytes=CHUNK)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("count", [0, 1, 1000, 30_001])
def test_all_to_all_exchanges_blocks(size: int, count: int) -> None:
    def body(member: Member) -> None:
        def block(source: int, target: int) -> np.ndarray[Any, Any]:
            return np.arange(count, dtype=np.float32) + 100 * source + target

        array = np.concatenate([block(member.rank, target) for target in range(size)])
        wanted = np.concatenate([block(source, member.rank) for source in range(size)])
        out = np.zeros_like(array)
        member.run(shm.ALL_TO_ALL, dtype=FLOAT32, array=array, out=out)
        assert out.tobytes() == wanted.tobytes()
        member.run(shm.ALL_TO_ALL, dtype=FLOAT32, array=array, out=array)
        assert array.tobytes() == wanted.tobytes()

    results(size, body, chunk_bytes=CHUNK)


def test_no_rank_leaves_a_barrier_before_all_have_arrived() -> None:
    def early(member: Member) -> None:
        member.tell()
        member.run(shm.BARRIER)

    def late(member: Member) -> None:
        member.listen()
        member.run(shm.BARRIER)

    with world(3, [early, early, late]) as processes:
        for process in processes[:2]:
            process.hear()
            assert not process._line.poll(0.05)
        processes[2].say()
        for process in processes:
            process.hear()


@pytest.mark.parametrize("size", [8, 24])
def test_more_ranks_than_cores(size: int) -> None:
    def body(member: Member) -> None:
        for count in (2, 2, 2, 2000, 40_000, 2):
            array = np.full(count, float(member.rank), np.float32)
            member.reduce(array)
            assert (array == size * (size - 1) / 2).all()
            member.run(shm.BARRIER)

    results(size, body)


def test_256_ranks() -> None:
    """In threads: so many processes are too much for a test."""
    size = 256
    everybody = members(size)
    arrays = [np.full(3, float(rank), np.float64) for rank in range(size)]
    gathered = [np.zeros(size, np.uint8) for _ in range(size)]

    def run(member: Member) -> None:
        member.reduce(arrays[member.rank])
        mine = np.array([member.rank], np.uint8)
        member.run(shm.ALL_GATHER, dtype=6, array=mine, out=gathered[member.rank])

    threads = [threading.Thread(target=run, args=(member,)) for member in everybody]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert all((array == size * (size - 1) / 2).all() for array in arrays)
    assert all((each == np.arange(size)).all() for each in gathered)
    for member in everybody:
        member.group.close()


def test_the_rounds_are_those_that_the_others_run() -> None:
    """A rank that skips moves its counter by `rounds`: afterwards all must be in step."""
    calls = [
        (shm.ALL_REDUCE, length, 4, {"array": np.zeros(length, np.uint8), "out": np.zeros(length, np.uint8)})
        for length in (0, 8, 32, 36, 16 << 10, 40 << 10, CHUNK, CHUNK + 4, 10 * CHUNK)
    ] + [
        (shm.BARRIER, 0, 1, {}),
        (shm.ALL_TO_ALL, 6 * CHUNK, 4, {"array": np.zeros(6 * CHUNK, np.uint8), "out": np.zeros(6 * CHUNK, np.uint8)}),
        (shm.BROADCAST, 5 * CHUNK, 4, {"out": np.zeros(5 * CHUNK, np.uint8), "root": 2}),
        (shm.ALL_GATHER, 9 * CHUNK, 4, {"array": np.zeros(3 * CHUNK, np.uint8), "out": np.zeros(9 * CHUNK, np.uint8)}),
    ]

    def body(member: Member) -> None:
        for kind, length, item, arguments in calls:
            if member.rank == 2:
                rounds = member.group.rounds(kind, length, item)
                _, order = member.group.take(1)
                member.group.skip(order, rounds)
            else:
                pending = member.post(kind, SUM, FLOAT32, **arguments)
                assert (pending.wait(LIMIT), pending.rank) in [(shm.ABORTED, 2), (shm.ABORTED, 1 - member.rank)]
            array = np.ones(2, np.float32)
            member.run(shm.ALL_REDUCE, SUM, FLOAT32, array=array, out=array)
            assert array[0] == 3.0

    results(3, body, chunk_bytes=CHUNK)
