"""Making and opening regions, arguments that do not fit, and memory that others fill with anything."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import signal
import struct
from typing import Any

import numpy as np
import pytest
from nexar_native import shm
from ranks import FLOAT32, SUM, Member, members, world

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
STATUSES = {shm.DONE, shm.WAITING, shm.ABORTED, shm.MISMATCH, shm.DIED, shm.FAILED}


def test_the_offer_tells_the_sizes() -> None:
    region = shm.Region.create(3)
    pid, _, ranks, chunk, nonce = region.offer.split()
    assert (int(pid), int(ranks), int(chunk), len(nonce)) == (os.getpid(), 3, region.chunk_bytes, 32)
    opened = shm.Region.open(region.offer, 3)
    assert (opened.offer, opened.ranks, opened.chunk_bytes) == (region.offer, 3, region.chunk_bytes)


@pytest.mark.parametrize("ranks", [0, 257])
def test_a_number_of_ranks_that_is_not_allowed_is_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match="allowed: 1 to 256"):
        shm.Region.create(ranks)


@pytest.mark.parametrize("chunk", [1, 4096, 100_000, 1 << 30])
def test_a_chunk_size_that_is_not_allowed_is_refused(chunk: int) -> None:
    with pytest.raises(ValueError, match="chunk_bytes"):
        shm.Region.create(2, chunk)


def changed(offer: str, index: int, text: str) -> str:
    fields = offer.split()
    fields[index] = text
    return " ".join(fields)


def test_other_texts_are_refused() -> None:
    region = shm.Region.create(2)
    offer = region.offer
    for text in ["", "1 2 3", offer + " 1", changed(offer, 0, "x"), changed(offer, 1, "-1"), changed(offer, 3, "1")]:
        with pytest.raises(ValueError, match="not that of a region of 2 ranks"):
            shm.Region.open(text, 2)
    with pytest.raises(ValueError, match="not that of a region of 3 ranks"):
        shm.Region.open(offer, 3)


def test_another_region_than_the_offered_one_is_refused() -> None:
    region = shm.Region.create(2)
    with pytest.raises(OSError, match="another region"):
        shm.Region.open(changed(region.offer, 4, "0" * 32), 2)
    with pytest.raises(OSError, match="bytes, sealed"):
        shm.Region.open(changed(region.offer, 3, str(region.chunk_bytes // 2)), 2)
    with pytest.raises(OSError, match="No such file"):
        shm.Region.open(changed(region.offer, 1, "99999"), 2)


def memory_file(size: int, seals: int = SEALS, content: bytes = b"") -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, content, 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_other_files_are_refused() -> None:
    region = shm.Region.create(2)
    size = os.stat(f"/proc/self/fd/{region.offer.split()[1]}").st_size
    reading, writing = os.pipe()
    cases = [
        (memory_file(size), "no region"),
        (memory_file(size - 1), "bytes, sealed"),
        (memory_file(size, fcntl.F_SEAL_GROW), "bytes, sealed"),
        (memory_file(size, content=struct.pack("=8sIIQ", b"nexarshm", 99, 2, region.chunk_bytes)), "another layout"),
        (writing, "not a memory file"),
        (reading, "not a memory file"),
    ]
    for descriptor, reason in cases:
        with pytest.raises(OSError, match=reason):
            shm.Region.open(changed(region.offer, 1, str(descriptor)), 2)
        os.close(descriptor)


def test_nobody_can_open_a_region_without_its_descriptor() -> None:
    region = shm.Region.create(2)
    region.close_descriptor()
    region.close_descriptor()
    with pytest.raises(OSError, match="No such file"):
        shm.Region.open(region.offer, 2)
    shm.Group(region, 0)
    region.close()
    region.close()
    with pytest.raises(ValueError, match="closed"):
        shm.Group(region, 1)


def test_a_rank_joins_once() -> None:
    region = shm.Region.create(2)
    group = shm.Group(region, 1)
    with pytest.raises(OSError, match="joined"):
        shm.Group(region, 1)
    with pytest.raises(ValueError, match="no such rank"):
        shm.Group(region, 2)
    group.close()


def test_nothing_is_left_open() -> None:
    def use() -> None:
        for member in members(2):
            member.post(shm.BARRIER, background=True)
            member.group.close()

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        use()
    assert len(os.listdir("/proc/self/fd")) == before
    with open("/proc/self/maps") as maps:
        assert "nexar-region" not in maps.read()


# -- arguments -----------------------------------------------------------------------------------------------------

EIGHT, FOUR = np.zeros(8, np.uint8), np.zeros(4, np.uint8)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (99, {}),
        (shm.BARRIER, {"array": EIGHT}),
        (shm.ALL_REDUCE, {}),
        (shm.ALL_REDUCE, {"array": EIGHT}),
        (shm.ALL_REDUCE, {"array": EIGHT, "out": FOUR}),
        (shm.ALL_REDUCE, {"array": EIGHT[1:], "out": EIGHT[:7]}),
        (shm.ALL_REDUCE, {"array": EIGHT[4:], "out": EIGHT[2:6]}),
        (shm.ALL_REDUCE, {"array": EIGHT, "out": EIGHT, "op": 0}),
        (shm.ALL_REDUCE, {"array": EIGHT, "out": EIGHT, "op": 6}),
        (shm.ALL_REDUCE, {"array": EIGHT, "out": EIGHT, "dtype": 18}),
        (shm.ALL_REDUCE, {"array": EIGHT, "out": EIGHT, "divisor": 2}),
        (shm.REDUCE, {"array": EIGHT}),
        (shm.REDUCE, {"array": EIGHT, "out": EIGHT, "root": 1}),
        (shm.REDUCE, {"array": EIGHT, "out": EIGHT, "root": 2}),
        (shm.BROADCAST, {"out": EIGHT}),
        (shm.BROADCAST, {"array": EIGHT, "root": 1}),
        (shm.ALL_TO_ALL, {"array": np.zeros(12, np.uint8), "out": np.zeros(12, np.uint8)}),
        (shm.REDUCE_SCATTER, {"array": EIGHT, "out": EIGHT}),
        (shm.REDUCE_SCATTER, {"array": EIGHT, "out": FOUR, "counts": [1]}),
        (shm.REDUCE_SCATTER, {"array": EIGHT, "out": FOUR, "counts": [2**62, 2**62]}),
        (shm.ALL_GATHER, {"array": FOUR, "out": EIGHT, "counts": [2, 0]}),
        (shm.ALL_GATHER, {"array": EIGHT[4:], "out": EIGHT}),
    ],
)
def test_arguments_that_do_not_fit_are_refused(kind: int, arguments: dict[str, Any]) -> None:
    one, _ = members(2)
    with pytest.raises(ValueError, match=r"\w"):
        one.post(kind, **{"op": SUM, "dtype": FLOAT32, **arguments})


def test_an_order_number_is_used_once() -> None:
    (one,) = members(1)
    with pytest.raises(ValueError, match="begin at 1"):
        one.group.skip(0, 1)
    with pytest.raises(ValueError, match="not so many"):
        one.group.skip(2**64 - 1, 1)
    one.run(shm.BARRIER)
    one.group.skip(3, 1)
    for used in (1, 3):
        with pytest.raises(ValueError, match="was used"):
            one.group.skip(used, 1)


@pytest.mark.parametrize("counts", [[], [2, 2, 2]])
def test_the_rounds_of_counts_that_do_not_fit_are_refused(counts: list[int]) -> None:
    one, _ = members(2)
    with pytest.raises(ValueError, match="counts"):
        one.group.rounds(shm.ALL_GATHER, 16 if counts else 7, 4, counts)


# -- hostile memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["header and records", "everything", "small numbers"])
def test_any_bytes_in_the_region_end_in_a_status(where: str) -> None:
    chunk = 32 << 10
    kinds = [
        (shm.BARRIER, 0, False),
        (shm.ALL_REDUCE, 8, True),
        (shm.ALL_REDUCE, 5 * chunk, True),
        (shm.REDUCE, 3 * chunk, True),
        (shm.ALL_TO_ALL, 6 * chunk, True),
        (shm.BROADCAST, 2 * chunk, False),
    ]

    def victim(member: Member) -> set[int]:
        found = set()
        member.tell()
        member.listen()
        for number in range(60):
            kind, length, both = kinds[number % len(kinds)]
            array = np.zeros(length, np.uint8)
            arguments: dict[str, Any] = {"array": array} if length else {}
            if both:
                arguments["out"] = array
            pending = member.post(kind, SUM, FLOAT32, **arguments, background=number % 5 == 0)
            pending.wait(0.005)
            member.group.differing(pending.sequence)
            member.group.arrivals(pending.sequence)
            pending.missing()
            if number % 2:
                pending.cancel()
            found.add(pending.status)
        member.group.interrupt()
        member.group.close()
        return found

    with world(3, [victim, hostile(where), hostile(where)], chunk_bytes=chunk) as processes:
        for process in processes:
            process.hear()  # the region is open
        for process in processes:
            process.say()
        assert processes[0].hear() <= STATUSES
        for process in processes[1:]:
            process.signal(signal.SIGKILL)
        assert processes[0].join() == 0


def hostile(where: str) -> Any:
    def body(member: Member) -> None:
        member.tell()
        member.listen()
        chance = random.Random(member.rank)
        with open("/proc/self/maps") as lines:
            maps = next(line for line in lines if "nexar-region" in line)
        start, end = (int(part, 16) for part in maps.split()[0].split("-"))
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            records = mmap.PAGESIZE + 3 * 1024
            limit = end - start if where == "everything" else records
            while True:
                at = chance.randrange(limit // 8) * 8
                size = 8 * chance.choice((1, 2, 16))
                data = chance.randbytes(size)
                if where == "small numbers":
                    data = struct.pack("=Q", chance.randrange(30)) * (size // 8)
                memory.seek(start + at)
                memory.write(data[: limit - at])

    return body
